"""Causes inside attention, between its projections, and in its positions."""

import itertools
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    Found,
    SuspectSite,
    alternatives,
    cause,
    combinations,
    several_switches,
    shown,
)
from flaxformer_mt.parity.diagnosis.causes.sublayers import active_dropout


@cause(ops.Scores)
def _attention_scale(scores: ops.Scores, site: SuspectSite) -> Found:
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
    solved = site.solved_scale(scores.but(scale=1.0, bias=None).value(), scores.bias_values())
    words = f"the reference multiplies scores by {{}}, ours by {ours}"
    yield from alternatives(scores, "attention scale", words, "scale", listed | solved)


@cause(ops.Scores)
def _padding_mask(scores: ops.Scores, site: SuspectSite) -> Found:
    everything = np.ones_like(scores.padding)
    others = [
        ("missing padding mask", "does not mask padding, ours does", everything),
        ("inverted mask", "attends to padding and masks all other keys", ~scores.padding),
    ]
    if site.parsed.stack == "decoder" and site.parsed.group == "self_attention":
        real = site.inputs.tokens.target_input != site.inputs.config.pad_id
        words = "masks target padding, ours does not"
        others.append(("extra padding mask", words, real[:, None, None]))
    for label, words, padding in others:
        yield Candidate(label, f"the reference {words}", scores.but(padding=padding))


@cause(ops.Scores)
def _causal_mask(scores: ops.Scores, site: SuspectSite) -> Found:
    everything = np.ones_like(scores.causal)
    if scores.causal.all():
        words = "the reference masks all keys after the query, ours does not"
        yield Candidate("extra causal mask", words, scores.but(causal=np.tril(everything)))
        return
    others = [
        ("missing causal mask", "does not mask the future", everything),
        ("causal mask off by one", "masks each position from itself", np.tril(everything, -1)),
        ("causal mask off by one", "attends to the next position", np.tril(everything, 1)),
        ("inverted mask", "masks the past, not the future", scores.causal.T),
        ("inverted mask", "attends only to the future", ~scores.causal),
    ]
    for label, words, causal in others:
        yield Candidate(label, f"the reference {words}", scores.but(causal=causal))
    unmasked = scores.but(causal=everything, padding=np.ones_like(scores.padding))
    words = "the reference masks neither padding nor the future"
    yield Candidate("missing mask", words, unmasked)


@cause(ops.Scores)
def _mask_value(scores: ops.Scores, site: SuspectSite) -> Found:
    words = "the reference's mask is the complement of ours"
    complement = np.where(scores.mask(), -np.inf, scores.products())
    yield Candidate("inverted mask", words, ops.Given(complement))
    for adds, change in ((False, "replaced by"), (True, "increased by")):
        listed = [-10.0, -100.0, -1e4, 0.0, 1e9]
        for fill in dict.fromkeys([*listed, *_solved_fill(scores, site, adds)]):
            label = "mask sign" if fill > 0 else "mask value"
            words = f"masked scores are {change} {fill:.6g} in the reference, by -inf in ours"
            yield Candidate(label, words, scores.but(fill=fill, adds_fill=adds))


def _solved_fill(scores: ops.Scores, site: SuspectSite, adds: bool) -> list[float]:
    if site.known is None:
        return []
    masked = site.rows(np.broadcast_to(scores.mask(), site.known.shape)) == 0
    found = site.rows(site.known)[masked]
    if adds:
        found = found - site.rows(scores.products())[masked]
    return [float(np.median(found))] if found.size and np.isfinite(found).all() else []


@cause(ops.Scores)
def _narrow_scores(scores: ops.Scores, site: SuspectSite) -> Found:
    site.require_float64()
    found, expected = site.rows(scores.value()), site.rows(site.theirs)
    finite = np.isfinite(found) & np.isfinite(expected)
    close = np.allclose(found[finite], expected[finite], rtol=1e-6, atol=1e-6)
    if close and np.array_equal(expected, expected.astype(np.float32)):
        words = "the reference casts scores to float32 before the softmax, ours are float64"
        yield Candidate("float32 scores", words, ops.Given(site.theirs))


@cause(ops.Scores, ops.Context)
def _heads(attention: ops.Scores | ops.Context, site: SuspectSite) -> Found:
    words = f"the reference splits into heads as ({{}}), ours as ({attention.split})"
    splits = {split: split for split in ops.SPLITS}
    yield from alternatives(attention, "head order", words, "split", splits)
    if 1 < attention.kv_heads < attention.num_heads:
        words = (
            "key/value heads are tiled (h % G) instead of repeated (h // (H/G)) in the reference"
        )
        yield Candidate("tiled key/value heads", words, attention.but(sharing="tiled"))


@cause(ops.Scores)
def _swapped_query_and_key(scores: ops.Scores, site: SuspectSite) -> Found:
    if scores.query.shape == scores.key.shape:
        words = "the reference attends from keys to queries: its scores are transposed"
        swapped = scores.but(query=scores.key, key=scores.query)
        yield Candidate("swapped query and key", words, swapped)


@cause(ops.Softmax)
def _query_without_any_key(softmax: ops.Softmax, site: SuspectSite) -> Found:
    without = np.all(np.isneginf(softmax.scores), axis=-1, keepdims=True)
    count = int(np.sum(site.rows(without).any(axis=(1, 2))))
    if not count:
        return
    weights = softmax.value()
    others = {
        "the mean of all values, because its masked scores are finite": 1 / weights.shape[-1],
        "NaN, because its masked scores are -inf": np.nan,
    }
    words = (
        f"all keys of {count} queries are masked, as in a sentence of padding alone: the reference "
        "gives them {}; ours gives zeros"
    )
    results = {name: np.where(without, weight, weights) for name, weight in others.items()}
    yield from alternatives(ops.Given(weights), "query without any key", words, "result", results)


@cause(ops.Softmax)
def _softmax_axis(softmax: ops.Softmax, site: SuspectSite) -> Found:
    # Where everything is masked, the finite fill values of published masks give equal weights.
    finite = ops.Softmax(np.maximum(softmax.scores, -1e9))
    words = "the reference's softmax runs over {}, ours over keys"
    axes = {"queries": -2, "heads": 1, "sentences": 0}
    yield from alternatives(finite, "softmax axis", words, "axis", axes)
    weights = softmax.value()
    words = "the reference multiplies attention weights by {} after the softmax"
    scaled = {name: scale * weights for name, scale in site.solved_scale(weights).items()}
    yield from alternatives(ops.Given(weights), "attention scale", words, "result", scaled)


@cause(ops.Context)
def _join_heads(context: ops.Context, site: SuspectSite) -> Found:
    for split, join in itertools.product(ops.SPLITS, ops.JOINS):
        also = "" if split == context.split else f" and splits values as ({split})"
        words = f"the reference joins heads as ({join}){also}, ours as ({context.join})"
        yield Candidate("head order", words, context.but(join=join, split=split))


@cause(ops.Context)
def _other_values_or_weights(context: ops.Context, site: SuspectSite) -> Found:
    keys = site.inputs.beside(site.parsed, "key")
    words = "the reference averages keys, ours values"
    yield Candidate("keys for values", words, context.but(values=keys))
    weights = context.weights
    if weights.shape[2] == weights.shape[3]:
        words = "the reference transposes attention weights before applying them"
        transposed = context.but(weights=weights.swapaxes(2, 3))
        yield Candidate("transposed weights", words, transposed)
    average = np.broadcast_to(np.mean(weights, axis=1, keepdims=True), weights.shape)
    words = "the reference averages attention weights over heads"
    yield Candidate("averaged weights", words, context.but(weights=average))


@cause(ops.Context)
def _attention_dropout(context: ops.Context, site: SuspectSite) -> Found:
    attended = np.max(context.weights, axis=(1, 2))[:, None, :, None] > 0
    heads = ops.SPLITS["head, feature"](site.theirs, context.num_heads)
    found = heads @ np.linalg.pinv(np.where(attended, context.heads(), 0))
    yield from active_dropout(context.weights, found, lambda kept: context.but(weights=kept))


# Positions inside self-attention: rotations and biases.


@cause(ops.Scores)
def _rotation(scores: ops.Scores, site: SuspectSite) -> Found:
    ours = scores.rotation
    if ours is None:
        return
    words = "the reference does not rotate queries and keys, ours does"
    yield Candidate("rotation missing", words, scores.but(rotation=None))
    choices: dict[str, list[Any]] = {
        "layout": ["interleaved", "concatenated"],
        "base": [1e4, 1e3, 1e2, 1e5, 5e5, 1e6],
        "direction": [1, -1],
    }
    names = {name: f"rotation {name}" for name in choices}
    for label, words, change in several_switches("rotation", ours, names, choices, most=2):
        yield Candidate(label, words, scores.but(rotation=ours.but(**change)))


@cause(ops.Scores)
def _linear_bias(scores: ops.Scores, site: SuspectSite) -> Found:
    ours = scores.bias
    if not isinstance(ours, ops.LinearBias):
        return
    words = "the reference adds no linear bias to the scores, ours does"
    yield Candidate("position bias missing", words, scores.but(bias=None))
    heads = np.arange(1, len(ours.slopes) + 1)
    others = [
        ("slope order", "are ours in reverse order", ours.slopes[::-1]),
        ("slope order", "are ours in decreasing order", np.sort(ours.slopes)[::-1]),
        ("slope values", "are 2^(-8h/H) for all heads", 2.0 ** (-8 * heads / len(heads))),
        ("slope values", "start at 1 instead of 2^(-8/H)", 2.0 ** (-8 * (heads - 1) / len(heads))),
        ("slope sign", "have the opposite sign", -ours.slopes),
    ]
    if site.known is not None:
        slopes = _solved_slopes(scores, site.known)
        listed = ", ".join(f"{slope:.6g}" for slope in slopes)
        others.append(("slope values", f"are ({listed})", slopes))
    for label, words, slopes in others:
        changed = scores.but(bias=ours.but(slopes=slopes))
        yield Candidate(label, f"the reference's ALiBi slopes {words}", changed)


def _solved_slopes(scores: ops.Scores, theirs: np.ndarray) -> np.ndarray:
    unit = ops.LinearBias(-np.ones(scores.num_heads)).values(*theirs.shape[2:])
    change = theirs - scores.but(bias=None).products()
    known = scores.mask() & np.isfinite(theirs)
    products, squares = (
        np.sum(np.where(known, unit * factor, 0), axis=(0, 2, 3)) for factor in (change, unit)
    )
    return -products / squares


@cause(ops.Scores)
def _bucket_bias(scores: ops.Scores, site: SuspectSite) -> Found:
    ours = scores.bias
    if not isinstance(ours, ops.BucketBias):
        return
    words = "the reference adds no relative position bias to the scores, ours does"
    yield Candidate("position bias missing", words, scores.but(bias=None))
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
            changes = ", ".join(
                f"{name}={shown(value)} in place of {shown(own[name])}"
                for name, value in change.items()
            )
            words = f"the reference's buckets of distances have {changes}"
            yield Candidate("bucket rule", words, scores.but(bias=other))
    width = scores.query.shape[-1] // scores.num_heads
    words = "the reference {} the relative position bias by sqrt(K), ours adds it unscaled"
    for verb, scale in (("divides", width**-0.5), ("multiplies", width**0.5)):
        changed = scores.but(bias=ours.but(scale=scale))
        yield Candidate("position bias scale", words.format(verb), changed)
