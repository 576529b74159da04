"""What may follow a hypothesis: rules that lower the scores of next tokens.

All scores are float32 [B, W, V], one for each token that could follow each of the W hypotheses of
B rows; what is ruled out is minus infinity. The hypotheses' tokens so far are int32 [B, W, P], of
which a row has `positions` int32 [B]; what stands after them is not looked at. The token that
starts decoding is not among them.

Source of the formulas: `generation/logits_process.py` of Hugging Face transformers.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array


def forbid(scores: Array, ids: Sequence[int]) -> Array:
    """Rules tokens out, for every hypothesis and at every position."""
    forbidden = np.zeros(scores.shape[2], bool)
    forbidden[list(ids)] = True
    # A mask becomes part of the operations that read the scores; a scatter would copy them first.
    return jnp.where(forbidden, -jnp.inf, scores)


def penalise_repetition(
    scores: Array, tokens: Array, positions: Array, penalty: float | Array
) -> Array:
    """Divides the scores of tokens that a hypothesis has, multiplies them where they are negative.

    Source: Keskar et al. 2019, section 4.1, which does not treat negative scores apart.
    """
    seen = jnp.take_along_axis(scores, tokens, axis=2)
    penalised = jnp.where(seen < 0, seen * penalty, seen / penalty)
    written = jnp.arange(tokens.shape[2]) < positions[:, None, None]
    places = jnp.where(written, tokens, scores.shape[2])  # Behind the vocabulary: left out.
    return scores.at[*_each_hypothesis(scores), places].set(penalised, mode="drop")


def penalise_chosen(scores: Array, chosen: Array, counted: Array, penalty: float | Array) -> Array:
    """Takes `penalty` off a token's score for each time that others chose it.

    Args:
      scores: see the top of this file.
      chosen: int32 [B, X], tokens that hypotheses of earlier groups have at this position.
      counted: bool [B, X], which of them there are.
      penalty: how much.

    Source: Vijayakumar et al. 2018, with Hamming diversity.
    """
    counts = jnp.zeros((scores.shape[0], scores.shape[2]), scores.dtype)
    rows = jnp.arange(scores.shape[0])[:, None]
    counts = counts.at[rows, chosen].add(counted.astype(scores.dtype))
    return scores - penalty * counts[:, None]


def forbid_repeated_ngrams(scores: Array, tokens: Array, positions: Array, size: int) -> Array:
    """Rules out each token that would complete a sequence of `size` tokens a second time."""
    count = tokens.shape[2] - size + 1  # Sequences of this size that fit.
    if count < 1:
        return scores
    before = last_tokens(tokens, positions, size - 1)  # [B, W, size - 1]
    repeats = jnp.arange(count) + size - 1 < positions[:, None, None]
    for offset in range(size - 1):
        window = tokens[..., offset : offset + count]
        repeats = repeats & (window == before[..., offset : offset + 1])
    return rule_out(scores, tokens[..., size - 1 :], repeats)


def forbid_phrases(
    scores: Array, tokens: Array, positions: Array, phrases: Sequence[Sequence[int]]
) -> Array:
    """Rules out each token that would complete one of the phrases, which are two tokens or longer.

    Args:
      scores: see the top of this file.
      tokens: see the top of this file.
      positions: see the top of this file.
      phrases: token ids.
    """
    for size in sorted({len(phrase) for phrase in phrases}):
        same_size = np.array([phrase for phrase in phrases if len(phrase) == size], np.int32)
        before = last_tokens(tokens, positions, size - 1)
        begun = (before[:, :, None] == same_size[:, :-1]).all(axis=-1)  # [B, W, phrases]
        scores = rule_out(scores, jnp.broadcast_to(same_size[:, -1], begun.shape), begun)
    return scores


def forbid_early_end(scores: Array, positions: Array, min_lengths: Array, eos_id: int) -> Array:
    """Rules out the end token in rows that have fewer than their int32 [B] minimum of tokens."""
    early = jnp.where(positions < min_lengths, -jnp.inf, 0.0)
    return scores.at[..., eos_id].add(early[:, None])


def force_prefix(scores: Array, originals: Array, positions: Array, prefix: Array) -> Array:
    """Rules out all but the next token of the row's prefix, if it is not over.

    Args:
      scores: see the top of this file.
      originals: like `scores`, before any rule: a token that is forced may break them.
      positions: see the top of this file.
      prefix: int32 [B, F], filled with -1.
    """
    length = prefix.shape[1]
    index = jnp.minimum(positions, length - 1)[:, None]
    token = jnp.where(positions[:, None] < length, jnp.take_along_axis(prefix, index, axis=1), -1)
    is_next = jnp.arange(scores.shape[2]) == token  # [B, V]
    forced = jnp.where(is_next[:, None], originals, -jnp.inf)
    return jnp.where(token[:, :, None] >= 0, forced, scores)


def force_end(
    scores: Array, free: Array, positions: Array, max_lengths: Array, eos_id: int
) -> Array:
    """Rules out all but the end token where a row int32 [B] has room for one more token only.

    Args:
      scores: see the top of this file.
      free: [B, W, 1], the score that stands for probability 1: being forced costs nothing.
      positions: see the top of this file.
      max_lengths: int32 [B].
      eos_id: the end token.
    """
    is_end = jnp.arange(scores.shape[2]) == eos_id
    last = (positions + 1 == max_lengths)[:, None, None]
    return jnp.where(last, jnp.where(is_end, free, -jnp.inf), scores)


def rule_out(scores: Array, tokens: Array, which: Array) -> Array:
    """Rules out those of the tokens int32 [B, W, N] for which `which` bool [B, W, N] is true."""
    return scores.at[*_each_hypothesis(scores), tokens].add(jnp.where(which, -jnp.inf, 0.0))


def last_tokens(tokens: Array, positions: Array, count: int) -> Array:
    """The last tokens of each hypothesis, int32 [B, W, count]; -1 where it had not yet begun."""
    places = positions[:, None, None] - count + jnp.arange(count)
    found = jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=2)
    return jnp.where(places < 0, -1, found)


def _each_hypothesis(scores: Array) -> tuple[Array, Array]:
    """The first two indices of every hypothesis, [B, 1, 1] and [1, W, 1]."""
    rows, hypotheses = jnp.ogrid[: scores.shape[0], : scores.shape[1]]
    return rows[:, :, None], hypotheses[:, :, None]
