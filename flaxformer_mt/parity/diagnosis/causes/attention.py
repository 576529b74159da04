"""Causes inside attention, between its projections."""

import itertools
from collections.abc import Iterator

import numpy as np

from flaxformer_mt.parity.diagnosis.causes.registry import Clue, Hypothesis, cause
from flaxformer_mt.parity.diagnosis.causes.sublayers import left_on
from flaxformer_mt.parity.diagnosis.equations import JOINS, SPLITS, Context, Given, Scores, Softmax


@cause(Scores)
def attention_scale(scores: Scores, clue: Clue) -> Iterator[Hypothesis]:
    """Products multiplied by 1, 1 / K, 1 / sqrt(D), or whatever the reference's scores tell."""
    features = scores.query.shape[-1]
    width = features // scores.num_heads
    listed = {
        "1": 1.0,
        "1 / K": 1 / width,
        "sqrt(K)": width**0.5,
        "1 / sqrt(D)": clue.evidence.config.d_model**-0.5,
        "1 / sqrt(H*K)": features**-0.5,
    }
    solved = clue.solved_scale(scores.but(scale=1.0).value())
    for name, scale in (listed | solved).items():
        yield Hypothesis(
            "attention scale",
            f"the reference multiplies products of queries and keys by {name}, ours by 1 / sqrt(K)",
            scores.but(scale=scale),
        )


@cause(Scores)
def padding_mask(scores: Scores, clue: Clue) -> Iterator[Hypothesis]:
    """Padding is not hidden, or nothing else is; or is, where our model shows it."""
    everything = np.ones_like(scores.padding)
    yield Hypothesis(
        "missing padding mask",
        "the reference does not hide padding from attention, ours does",
        scores.but(padding=everything),
    )
    yield Hypothesis(
        "inverted mask",
        "the reference shows padding and hides all other keys",
        scores.but(padding=~scores.padding),
    )
    if clue.place.stack == "decoder" and clue.place.group == "self_attention":
        real = clue.evidence.target_input != clue.evidence.config.pad_id
        yield Hypothesis(
            "extra padding mask",
            "the reference hides padding of the target, ours does not",
            scores.but(padding=real[:, None, None]),
        )


@cause(Scores)
def causal_mask(scores: Scores, clue: Clue) -> Iterator[Hypothesis]:
    """The future is not hidden, or something else is; or is, where our model shows it."""
    everything = np.ones_like(scores.causal)
    if scores.causal.all():
        yield Hypothesis(
            "extra causal mask",
            "the reference hides all keys behind the query's column, ours does not",
            scores.but(causal=np.tril(everything)),
        )
        return
    others = [
        ("missing causal mask", "does not hide the future", everything),
        ("causal mask off by one", "hides each position from itself", np.tril(everything, -1)),
        ("causal mask off by one", "shows the next position", np.tril(everything, 1)),
        ("inverted mask", "hides the past, not the future", scores.causal.T),
        ("inverted mask", "shows the future and nothing else", ~scores.causal),
    ]
    for name, words, causal in others:
        yield Hypothesis(name, f"the reference {words}", scores.but(causal=causal))
    yield Hypothesis(
        "missing mask",
        "the reference hides neither padding nor the future",
        scores.but(causal=everything, padding=np.ones_like(scores.padding)),
    )


@cause(Scores)
def inverted_mask(scores: Scores, clue: Clue) -> Iterator[Hypothesis]:
    """Both parts of the mask at once are turned round."""
    yield Hypothesis(
        "inverted mask",
        "the reference hides what ours shows, and shows what ours hides",
        Given(np.where(scores.mask(), -np.inf, scores.products())),
    )


@cause(Scores)
def mask_value(scores: Scores, clue: Clue) -> Iterator[Hypothesis]:
    """Hidden scores are only made smaller, or larger, by replacing them or adding to them."""
    for adds, words in ((False, "hidden scores become"), (True, "to hidden scores is added")):
        listed = [-10.0, -100.0, -1e4, 0.0, 1e9]
        for fill in dict.fromkeys([*listed, *_solved_fill(scores, clue, adds)]):
            yield Hypothesis(
                "mask sign" if fill > 0 else "mask value",
                f"in the reference {words} {fill:.6g}, in ours -inf",
                scores.but(fill=fill, adds_fill=adds),
            )


def _solved_fill(scores: Scores, clue: Clue, adds: bool) -> list[float]:
    if clue.theirs is None:
        return []
    hidden = clue.rows(np.broadcast_to(scores.mask(), clue.theirs.shape)) == 0
    found = clue.rows(clue.theirs)[hidden]
    if adds:
        found = found - clue.rows(scores.products())[hidden]
    return [float(np.median(found))] if found.size and np.isfinite(found).all() else []


@cause(Scores)
def narrow_scores(scores: Scores, clue: Clue) -> Iterator[Hypothesis]:
    """The right scores, but cast to float32 before the softmax, as mixed precision asks for."""
    if clue.theirs is None or clue.evidence.config.dtype != "float64":
        return
    ours, theirs = scores.value(), clue.theirs
    found, expected = clue.rows(ours), clue.rows(theirs)
    finite = np.isfinite(found) & np.isfinite(expected)
    close = np.allclose(found[finite], expected[finite], rtol=1e-6, atol=1e-6)
    if close and np.array_equal(expected, expected.astype(np.float32)):
        yield Hypothesis(
            "float32 scores",
            "the reference casts scores to float32 before the softmax, ours are float64",
            Given(theirs),
        )


@cause(Scores)
@cause(Context)
def split_heads(attention: Scores | Context, clue: Clue) -> Iterator[Hypothesis]:
    """Queries and keys, or values, are split into heads in another way."""
    for split in SPLITS:
        yield Hypothesis(
            "head order",
            f"the reference splits into heads as ({split}), ours as ({attention.split})",
            attention.but(split=split),
        )


@cause(Scores)
def swapped_query_and_key(scores: Scores, clue: Clue) -> Iterator[Hypothesis]:
    """Keys ask and queries answer."""
    if scores.query.shape == scores.key.shape:
        yield Hypothesis(
            "swapped query and key",
            "the reference attends from keys to queries: its scores are transposed",
            scores.but(query=scores.key, key=scores.query),
        )


@cause(Softmax)
def softmax_axis(softmax: Softmax, clue: Clue) -> Iterator[Hypothesis]:
    """Weights sum to 1 over queries, heads or sentences."""
    # Where all is hidden, the finite scores of published masks give equal weights.
    scores = np.maximum(softmax.scores, -1e9)
    for axis, over in ((-2, "queries"), (1, "heads"), (0, "sentences")):
        yield Hypothesis(
            "softmax axis",
            f"the reference's softmax runs over {over}, ours over keys",
            Softmax(scores, axis),
        )


@cause(Softmax)
def scaled_weights(softmax: Softmax, clue: Clue) -> Iterator[Hypothesis]:
    """Multiplied by a number behind the softmax."""
    weights = softmax.value()
    for name, scale in clue.solved_scale(weights).items():
        yield Hypothesis(
            "attention scale",
            f"the reference multiplies attention weights by {name} behind the softmax",
            Given(scale * weights),
        )


@cause(Context)
def join_heads(context: Context, clue: Clue) -> Iterator[Hypothesis]:
    """Heads are joined in another way, and values perhaps split in another way, too."""
    for split, join in itertools.product(SPLITS, JOINS):
        also = "" if split == context.split else f" and splits values as ({split})"
        yield Hypothesis(
            "head order",
            f"the reference joins heads as ({join}){also}, ours as ({context.join})",
            context.but(join=join, split=split),
        )


@cause(Context)
def other_values_or_weights(context: Context, clue: Clue) -> Iterator[Hypothesis]:
    """Keys are summed up, or with weights that are transposed or averaged."""
    keys = clue.evidence.ours[f"{clue.place.prefix}/{clue.place.group}/key"]
    yield Hypothesis(
        "keys for values", "the reference sums up keys, ours values", context.but(values=keys)
    )
    if context.weights.shape[2] == context.weights.shape[3]:
        yield Hypothesis(
            "transposed weights",
            "the reference transposes attention weights before it applies them",
            context.but(weights=context.weights.swapaxes(2, 3)),
        )
    average = np.mean(context.weights, axis=1, keepdims=True)
    yield Hypothesis(
        "averaged weights",
        "the reference gives all heads the average of their weights",
        context.but(weights=np.broadcast_to(average, context.weights.shape)),
    )


@cause(Context)
def attention_dropout(context: Context, clue: Clue) -> Iterator[Hypothesis]:
    """Weights went through a dropout: found if a head has more features than there are keys."""
    if clue.theirs is None:
        return
    attended = np.max(context.weights, axis=(1, 2))[:, None, :, None] > 0
    heads = SPLITS["head, feature"](clue.theirs, context.num_heads)
    found = heads @ np.linalg.pinv(np.where(attended, context.heads(), 0))
    yield from left_on(context.weights, found, lambda kept: context.but(weights=kept))
