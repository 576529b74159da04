"""Causes inside attention, between its projections, and in its positions."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    SuspectSite,
    alternatives,
    cause,
    combinations,
    several_switches,
    shown,
)
from flaxformer_mt.parity.diagnosis.causes.sublayers import active_dropout
from flaxformer_mt.parity.diagnosis.operations import (
    JOINS,
    SPLITS,
    BucketBias,
    Context,
    Given,
    LinearBias,
    Scores,
    Softmax,
)


@cause(Scores)
def _attention_scale(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    features = scores.query.shape[-1]
    width = features // scores.num_heads
    ours = "1 / sqrt(K)" if site.inputs.config.scale_scores else "1"
    listed = {
        "1": 1.0,
        "1 / K": 1 / width,
        "sqrt(K)": width**0.5,
        "1 / sqrt(D)": site.inputs.config.d_model**-0.5,
        "1 / sqrt(H*K)": features**-0.5,
    }
    without_bias = site
    if site.theirs is not None:
        without_bias = site._replace(theirs=site.theirs - scores.bias_values())
    solved = without_bias.solved_scale(scores.but(scale=1.0, bias=None).value())
    words = f"the reference multiplies scores by {{}}, ours by {ours}"
    yield from alternatives(scores, "attention scale", words, "scale", listed | solved)


@cause(Scores)
def _padding_mask(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    everything = np.ones_like(scores.padding)
    yield Candidate(
        "missing padding mask",
        "the reference does not mask padding, ours does",
        scores.but(padding=everything),
    )
    yield Candidate(
        "inverted mask",
        "the reference attends to padding and masks all other keys",
        scores.but(padding=~scores.padding),
    )
    if site.parsed.stack == "decoder" and site.parsed.group == "self_attention":
        real = site.inputs.tokens.target_input != site.inputs.config.pad_id
        yield Candidate(
            "extra padding mask",
            "the reference masks target padding, ours does not",
            scores.but(padding=real[:, None, None]),
        )


@cause(Scores)
def _causal_mask(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    everything = np.ones_like(scores.causal)
    if scores.causal.all():
        yield Candidate(
            "extra causal mask",
            "the reference masks all keys after the query, ours does not",
            scores.but(causal=np.tril(everything)),
        )
        return
    others = [
        ("missing causal mask", "does not mask the future", everything),
        ("causal mask off by one", "masks each position from itself", np.tril(everything, -1)),
        ("causal mask off by one", "attends to the next position", np.tril(everything, 1)),
        ("inverted mask", "masks the past, not the future", scores.causal.T),
        ("inverted mask", "attends only to the future", ~scores.causal),
    ]
    for name, words, causal in others:
        yield Candidate(name, f"the reference {words}", scores.but(causal=causal))
    yield Candidate(
        "missing mask",
        "the reference masks neither padding nor the future",
        scores.but(causal=everything, padding=np.ones_like(scores.padding)),
    )


@cause(Scores)
def _inverted_mask(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    yield Candidate(
        "inverted mask",
        "the reference's mask is the complement of ours",
        Given(np.where(scores.mask(), -np.inf, scores.products())),
    )


@cause(Scores)
def _mask_value(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    for adds, words in ((False, "replaced by"), (True, "increased by")):
        listed = [-10.0, -100.0, -1e4, 0.0, 1e9]
        for fill in dict.fromkeys([*listed, *_solved_fill(scores, site, adds)]):
            yield Candidate(
                "mask sign" if fill > 0 else "mask value",
                f"masked scores are {words} {fill:.6g} in the reference, by -inf in ours",
                scores.but(fill=fill, adds_fill=adds),
            )


def _solved_fill(scores: Scores, site: SuspectSite, adds: bool) -> list[float]:
    if site.theirs is None:
        return []
    masked = site.rows(np.broadcast_to(scores.mask(), site.theirs.shape)) == 0
    found = site.rows(site.theirs)[masked]
    if adds:
        found = found - site.rows(scores.products())[masked]
    return [float(np.median(found))] if found.size and np.isfinite(found).all() else []


@cause(Scores)
def _narrow_scores(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is None or site.inputs.config.dtype != "float64":
        return
    ours, theirs = scores.value(), site.theirs
    found, expected = site.rows(ours), site.rows(theirs)
    finite = np.isfinite(found) & np.isfinite(expected)
    close = np.allclose(found[finite], expected[finite], rtol=1e-6, atol=1e-6)
    if close and np.array_equal(expected, expected.astype(np.float32)):
        yield Candidate(
            "float32 scores",
            "the reference casts scores to float32 before the softmax, ours are float64",
            Given(theirs),
        )


@cause(Scores)
@cause(Context)
def _split_heads(attention: Scores | Context, site: SuspectSite) -> Iterator[Candidate]:
    words = f"the reference splits into heads as ({{}}), ours as ({attention.split})"
    splits = {split: split for split in SPLITS}
    yield from alternatives(attention, "head order", words, "split", splits)


@cause(Scores)
@cause(Context)
def _tiled_heads(attention: Scores | Context, site: SuspectSite) -> Iterator[Candidate]:
    if 1 < attention.kv_heads < attention.num_heads:
        yield Candidate(
            "tiled key/value heads",
            "key/value heads are tiled (h % G) instead of repeated (h // (H/G)) in the reference",
            attention.but(sharing="tiled"),
        )


@cause(Scores)
def _swapped_query_and_key(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
    if scores.query.shape == scores.key.shape:
        yield Candidate(
            "swapped query and key",
            "the reference attends from keys to queries: its scores are transposed",
            scores.but(query=scores.key, key=scores.query),
        )


@cause(Softmax)
def _query_without_any_key(softmax: Softmax, site: SuspectSite) -> Iterator[Candidate]:
    without = np.all(np.isneginf(softmax.scores), axis=-1, keepdims=True)
    count = int(np.sum(site.rows(without).any(axis=(1, 2))))
    if not count:
        return
    weights = softmax.value()
    others = {
        "the mean of all values, because its masked scores are finite": 1 / weights.shape[-1],
        "NaN, because its masked scores are -inf": np.nan,
    }
    for words, weight in others.items():
        yield Candidate(
            "query without any key",
            f"all keys of {count} queries are masked, as in a sentence of padding alone: the "
            f"reference gives them {words}; ours gives zeros",
            Given(np.where(without, weight, weights)),
        )


@cause(Softmax)
def _softmax_axis(softmax: Softmax, site: SuspectSite) -> Iterator[Candidate]:
    # Where everything is masked, the finite fill values of published masks give equal weights.
    scores = np.maximum(softmax.scores, -1e9)
    for axis, over in ((-2, "queries"), (1, "heads"), (0, "sentences")):
        yield Candidate(
            "softmax axis",
            f"the reference's softmax runs over {over}, ours over keys",
            Softmax(scores, axis),
        )


@cause(Softmax)
def _scaled_weights(softmax: Softmax, site: SuspectSite) -> Iterator[Candidate]:
    weights = softmax.value()
    for name, scale in site.solved_scale(weights).items():
        yield Candidate(
            "attention scale",
            f"the reference multiplies attention weights by {name} after the softmax",
            Given(scale * weights),
        )


@cause(Context)
def _join_heads(context: Context, site: SuspectSite) -> Iterator[Candidate]:
    for split, join in itertools.product(SPLITS, JOINS):
        also = "" if split == context.split else f" and splits values as ({split})"
        yield Candidate(
            "head order",
            f"the reference joins heads as ({join}){also}, ours as ({context.join})",
            context.but(join=join, split=split),
        )


@cause(Context)
def _other_values_or_weights(context: Context, site: SuspectSite) -> Iterator[Candidate]:
    keys = site.inputs.ours[f"{site.parsed.prefix}/{site.parsed.group}/key"]
    yield Candidate(
        "keys for values", "the reference averages keys, ours values", context.but(values=keys)
    )
    if context.weights.shape[2] == context.weights.shape[3]:
        yield Candidate(
            "transposed weights",
            "the reference transposes attention weights before applying them",
            context.but(weights=context.weights.swapaxes(2, 3)),
        )
    average = np.mean(context.weights, axis=1, keepdims=True)
    yield Candidate(
        "averaged weights",
        "the reference averages attention weights over heads",
        context.but(weights=np.broadcast_to(average, context.weights.shape)),
    )


@cause(Context)
def _attention_dropout(context: Context, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is None:
        return
    attended = np.max(context.weights, axis=(1, 2))[:, None, :, None] > 0
    heads = SPLITS["head, feature"](site.theirs, context.num_heads)
    found = heads @ np.linalg.pinv(np.where(attended, context.heads(), 0))
    yield from active_dropout(context.weights, found, lambda kept: context.but(weights=kept))


# Positions inside self-attention: rotations and biases.


@cause(Scores)
def _rotation(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
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
    names = {name: f"rotation {name}" for name in choices}
    for name, words, change in several_switches("rotation", ours, names, choices, most=2):
        yield Candidate(name, words, scores.but(rotation=ours.but(**change)))


@cause(Scores)
def _linear_bias(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
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
def _bucket_bias(scores: Scores, site: SuspectSite) -> Iterator[Candidate]:
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
