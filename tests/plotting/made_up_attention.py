"""Attention with random weights, for pictures."""

import re

import numpy as np

from flaxformer_mt.decoding.attention_weights import AttentionMaps, SentenceAttention

LAYERS, HEADS = 3, 4


def weights(draw, num_rows, num_columns, layers, heads, *, causal=False, sharpness=2.0):
    """Returns weights [L, H, T, S]: a diagonal, more or less, and noise."""
    rows, columns = np.indices((num_rows, num_columns))
    distance = np.abs(rows / num_rows - columns / num_columns) * num_columns
    noise = draw.normal(size=(layers, heads, num_rows, num_columns))
    scale = draw.uniform(0, sharpness, (layers, heads, 1, 1))
    scores = 2 * noise - scale * distance
    if causal:
        scores = np.where(columns <= rows, scores, -np.inf)
    found = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (found / found.sum(axis=-1, keepdims=True)).astype(np.float32)


def pieces(text):
    """Splits a text into words, the longer ones into halves."""
    halves = re.sub(r"(\w{4})(?=\w{2})", r"\1 ", " ▁".join(["", *text.split()]))
    return tuple(halves.split())


def attention(source, target, layers=LAYERS, heads=HEADS, *, recurrent=False, seed=0):
    """Returns the attention of a sentence and its translation."""
    draw = np.random.default_rng(seed)
    sources, targets = (*pieces(source), "</s>"), (*pieces(target), "</s>")
    s, t = len(sources), len(targets)
    maps = {"encoder": AttentionMaps(weights(draw, s, s, layers, heads))}
    if not recurrent:
        maps["decoder"] = AttentionMaps(weights(draw, t, t, layers, heads, causal=True))
    maps["cross"] = AttentionMaps(weights(draw, t, s, layers, heads))
    inputs = ("<pad>", *targets[:-1])
    return SentenceAttention(source, target, sources, inputs, targets, maps)
