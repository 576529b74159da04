"""Causes in the positions of self-attention: rotations and biases."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    SuspectSite,
    cause,
    combinations,
    shown,
)
from flaxformer_mt.parity.diagnosis.operations import BucketBias, LinearBias, Scores


@cause(Scores)
def rotation(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    """Another layout, base or direction of the rotation, or none."""
    ours = scores.rotation
    if ours is None:
        return
    yield Candidate(
        "rotation missing",
        "the reference does not rotate queries and keys, ours does",
        scores.but(rotation=None),
    )
    choices: dict[str, list[Any]] = {
        "layout": ["interleaved", "concatenated"],
        "base": [1e4, 1e3, 1e2, 1e5, 5e5, 1e6],
        "direction": [1, -1],
    }
    own = {name: getattr(ours, name) for name in choices}
    for change in combinations(own, choices, most=2):
        yield Candidate(
            " and ".join(f"rotation {name}" for name in change),
            "; ".join(
                f"the reference's rotation {name} is {shown(value)}, ours {shown(own[name])}"
                for name, value in change.items()
            ),
            scores.but(rotation=ours.but(**change)),
        )


@cause(Scores)
def linear_bias(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    """Other slopes of ALiBi, the same in another order, or no bias."""
    ours = scores.bias
    if not isinstance(ours, LinearBias):
        return
    yield Candidate(
        "position bias missing",
        "the reference adds no linear bias to the scores, ours does",
        scores.but(bias=None),
    )
    heads = np.arange(1, len(ours.slopes) + 1)
    others = [
        ("slope order", "are ours in reverse order", ours.slopes[::-1]),
        ("slope order", "are ours in decreasing order", np.sort(ours.slopes)[::-1]),
        ("slope values", "are 2^(-8h/H) for all heads", 2.0 ** (-8 * heads / len(heads))),
        ("slope values", "start at 1 instead of 2^(-8/H)", 2.0 ** (-8 * (heads - 1) / len(heads))),
        ("slope sign", "have the opposite sign", -ours.slopes),
    ]
    if site.theirs is not None:
        slopes = _solved_slopes(scores, site.theirs)
        listed = ", ".join(f"{slope:.6g}" for slope in slopes)
        others.append(("slope values", f"are ({listed})", slopes))
    for name, words, slopes in others:
        yield Candidate(
            name,
            f"the reference's ALiBi slopes {words}",
            scores.but(bias=ours.but(slopes=slopes)),
        )


def _solved_slopes(scores: Scores, theirs: np.ndarray) -> np.ndarray:
    unit = LinearBias(-np.ones(scores.num_heads)).values(*theirs.shape[2:])
    change = theirs - scores.but(bias=None).products()
    known = scores.mask() & np.isfinite(theirs)
    products, squares = (
        np.sum(np.where(known, unit * factor, 0), axis=(0, 2, 3)) for factor in (change, unit)
    )
    return -products / squares


@cause(Scores)
def bucket_bias(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    """Another rule of T5's buckets, another factor of the bias, or no bias."""
    ours = scores.bias
    if not isinstance(ours, BucketBias):
        return
    yield Candidate(
        "position bias missing",
        "the reference adds no relative position bias to the scores, ours does",
        scores.but(bias=None),
    )
    choices: dict[str, list[Any]] = {
        "bidirectional": [True, False],
        "max_distance": [8, 10, 16, 20, 32, 64, 128, 256],
        "mirrored": [False, True],
    }
    own = {name: getattr(ours, name) for name in choices}
    for change in combinations(own, choices, most=2):
        other = ours.but(**change)
        buckets = len(ours.table) // (2 if other.bidirectional else 1)
        if other.max_distance > buckets // 2:
            yield Candidate(
                "bucket rule",
                "the reference's buckets of distances have "
                + ", ".join(
                    f"{name}={shown(value)} in place of {shown(own[name])}"
                    for name, value in change.items()
                ),
                scores.but(bias=other),
            )
    width = scores.query.shape[-1] // scores.num_heads
    for words, scale in (("divides", width**-0.5), ("multiplies", width**0.5)):
        yield Candidate(
            "position bias scale",
            f"the reference {words} the relative position bias by sqrt(K), ours adds it unscaled",
            scores.but(bias=ours.but(scale=scale)),
        )
