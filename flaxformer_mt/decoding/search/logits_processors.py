"""Rules that lower or forbid the scores of next tokens.

All scores are float32 [B, W, V], one for each token that could follow each of the W hypotheses of
B rows; a forbidden token has minus infinity. The tokens of the hypotheses are int32 [B, W, P], the
first `positions` int32 [B] of each row being defined; the start token is not among them.

Source of the formulas: `generation/logits_process.py` of Hugging Face transformers.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array


def forbid(scores: Array, ids: Sequence[int]) -> Array:
    """Forbids tokens in every hypothesis and at every position."""
    forbidden = np.zeros(scores.shape[2], bool)
    forbidden[list(ids)] = True
    # XLA fuses a mask into the operations that read the scores; a scatter would copy them first.
    return jnp.where(forbidden, -jnp.inf, scores)


def penalize_repetition(
    scores: Array, tokens: Array, positions: Array, penalty: float | Array, bos_id: int
) -> Array:
    """Divides the scores of a hypothesis' own tokens by the penalty; multiplies negative ones.

    The start token counts as well, which matters where it is also the end token (mBART, M2M-100).
    If `bos_id` is negative, there is none.

    Source: Keskar et al. 2019, section 4.1, which does not treat negative scores separately.
    """
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (1, 0)), constant_values=bos_id)
    seen = jnp.take_along_axis(scores, tokens, axis=2)
    penalized = jnp.where(seen < 0, seen * penalty, seen / penalty)
    is_defined = (jnp.arange(tokens.shape[2]) <= positions[:, None, None]) & (tokens >= 0)
    # Indices beyond the vocabulary are dropped.
    indices = jnp.where(is_defined, tokens, scores.shape[2])
    return scores.at[*_hypothesis_indices(scores), indices].set(penalized, mode="drop")


def penalize_chosen(scores: Array, chosen: Array, counted: Array, penalty: float | Array) -> Array:
    """Subtracts `penalty` from a token's score for each time that earlier groups chose it.

    Args:
      scores: see the module docstring.
      chosen: int32 [B, X], tokens of the hypotheses of earlier groups at this position.
      counted: bool [B, X], which of them count.
      penalty: subtracted once per counted token.

    Source: Vijayakumar et al. 2018, with Hamming diversity.
    """
    counts = jnp.zeros((scores.shape[0], scores.shape[2]), scores.dtype)
    rows = jnp.arange(scores.shape[0])[:, None]
    counts = counts.at[rows, chosen].add(counted.astype(scores.dtype))
    return scores - penalty * counts[:, None]


def forbid_repeated_ngrams(scores: Array, tokens: Array, positions: Array, size: int) -> Array:
    """Forbids each token that would repeat a sequence of `size` tokens."""
    count = tokens.shape[2] - size + 1  # Number of n-grams that fit.
    if count < 1:
        return scores
    before = last_tokens(tokens, positions, size - 1)  # [B, W, size - 1]
    repeats = jnp.arange(count) + size - 1 < positions[:, None, None]
    for offset in range(size - 1):
        window = tokens[..., offset : offset + count]
        repeats = repeats & (window == before[..., offset : offset + 1])
    return forbid_tokens(scores, tokens[..., size - 1 :], repeats)


def forbid_phrases(
    scores: Array, tokens: Array, positions: Array, phrases: Sequence[Sequence[int]]
) -> Array:
    """Forbids each token that would complete one of the phrases.

    Args:
      scores: see the module docstring.
      tokens: see the module docstring.
      positions: see the module docstring.
      phrases: token ids, at least two per phrase.
    """
    for size in sorted({len(phrase) for phrase in phrases}):
        same_size = np.array([phrase for phrase in phrases if len(phrase) == size], np.int32)
        before = last_tokens(tokens, positions, size - 1)
        begun = (before[:, :, None] == same_size[:, :-1]).all(axis=-1)  # [B, W, phrases]
        scores = forbid_tokens(scores, jnp.broadcast_to(same_size[:, -1], begun.shape), begun)
    return scores


def forbid_early_end(scores: Array, positions: Array, min_lengths: Array, eos_id: int) -> Array:
    """Forbids the end token in rows with fewer tokens than their minimum, int32 [B]."""
    early = jnp.where(positions < min_lengths, -jnp.inf, 0.0)
    return scores.at[..., eos_id].add(early[:, None])


def require_prefix(
    scores: Array,
    originals: Array,
    positions: Array,
    prefix: Array,
    certain: tuple[Array, Array] | None = None,
) -> Array:
    """Forbids all tokens but the next one of the row's prefix, until the prefix is complete.

    Args:
      scores: see the module docstring.
      originals: the scores before any rule was applied: rules do not apply to the prefix.
      positions: see the module docstring.
      prefix: int32 [B, prefix length], padded with -1.
      certain: the score of probability 1 [B, W, 1], and int32 [B], how many of the first tokens
        get it; None = none.
    """
    if certain is not None:
        score, count = certain
        originals = jnp.where((positions < count)[:, None, None], score, originals)
    length = prefix.shape[1]
    index = jnp.minimum(positions, length - 1)[:, None]
    token = jnp.where(positions[:, None] < length, jnp.take_along_axis(prefix, index, axis=1), -1)
    is_next = jnp.arange(scores.shape[2]) == token  # [B, V]
    only_next = jnp.where(is_next[:, None], originals, -jnp.inf)
    return jnp.where(token[:, :, None] >= 0, only_next, scores)


def require_end(
    scores: Array, certain: Array, positions: Array, max_lengths: Array, eos_id: int
) -> Array:
    """Forbids all tokens but the end token at the last position of a row.

    Args:
      scores: see the module docstring.
      certain: [B, W, 1], the score of probability 1, which the required end token gets.
      positions: see the module docstring.
      max_lengths: int32 [B].
      eos_id: the end token.
    """
    is_end = jnp.arange(scores.shape[2]) == eos_id
    last = (positions + 1 == max_lengths)[:, None, None]
    return jnp.where(last, jnp.where(is_end, certain, -jnp.inf), scores)


def forbid_tokens(scores: Array, tokens: Array, forbidden: Array) -> Array:
    """Forbids the tokens int32 [B, W, N] for which `forbidden` bool [B, W, N] is true."""
    return scores.at[*_hypothesis_indices(scores), tokens].add(jnp.where(forbidden, -jnp.inf, 0.0))


def last_tokens(tokens: Array, positions: Array, count: int) -> Array:
    """Returns the last tokens of each hypothesis, int32 [B, W, count]; -1 before its start."""
    indices = positions[:, None, None] - count + jnp.arange(count)
    found = jnp.take_along_axis(tokens, jnp.maximum(indices, 0), axis=2)
    return jnp.where(indices < 0, -1, found)


def _hypothesis_indices(scores: Array) -> tuple[Array, Array]:
    rows, hypotheses = jnp.ogrid[: scores.shape[0], : scores.shape[1]]
    return rows[:, :, None], hypotheses[:, :, None]
