"""Rules that lower or forbid the scores of next tokens.

There is a score for each token that could follow each of the W hypotheses of B rows; a forbidden
token has minus infinity. The first `positions` tokens of the hypotheses of each row are defined;
the start token is not among them.

Source of the formulas: `generation/logits_process.py` of Hugging Face transformers.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

Scores = Float[Array, "B W V"]
Tokens = Int[Array, "B W P"]
Positions = Int[Array, "B"]


def forbid(scores: Scores, ids: Sequence[int]) -> Scores:
    """Forbids tokens in every hypothesis and at every position."""
    forbidden = np.zeros(scores.shape[2], bool)
    forbidden[list(ids)] = True
    # XLA fuses a mask into the operations that read the scores; a scatter would copy them first.
    return jnp.where(forbidden, -jnp.inf, scores)


def penalize_repetition(
    scores: Scores, tokens: Tokens, positions: Positions, penalty: float | Array, bos_id: int
) -> Scores:
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


def penalize_chosen(
    scores: Scores, chosen: Int[Array, "B X"], counted: Bool[Array, "B X"], penalty: float | Array
) -> Scores:
    """Subtracts `penalty` from a token's score for each time that earlier groups chose it.

    `chosen` are tokens of the hypotheses of earlier groups at this position, of which those where
    `counted` is true count.

    Source: Vijayakumar et al. 2018, with Hamming diversity.
    """
    counts = jnp.zeros((scores.shape[0], scores.shape[2]), scores.dtype)
    rows = jnp.arange(scores.shape[0])[:, None]
    counts = counts.at[rows, chosen].add(counted.astype(scores.dtype))
    return scores - penalty * counts[:, None]


def forbid_repeated_ngrams(
    scores: Scores, tokens: Tokens, positions: Positions, size: int
) -> Scores:
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
    scores: Scores, tokens: Tokens, positions: Positions, phrases: Sequence[Sequence[int]]
) -> Scores:
    """Forbids each token that would complete one of the phrases of two or more tokens."""
    for size in sorted({len(phrase) for phrase in phrases}):
        same_size = np.array([phrase for phrase in phrases if len(phrase) == size], np.int32)
        before = last_tokens(tokens, positions, size - 1)
        begun = (before[:, :, None] == same_size[:, :-1]).all(axis=-1)  # [B, W, phrases]
        scores = forbid_tokens(scores, jnp.broadcast_to(same_size[:, -1], begun.shape), begun)
    return scores


def forbid_early_end(
    scores: Scores, positions: Positions, min_lengths: Int[Array, "B"], eos_id: int
) -> Scores:
    """Forbids the end token in rows with fewer tokens than their minimum."""
    early = jnp.where(positions < min_lengths, -jnp.inf, 0.0)
    return scores.at[..., eos_id].add(early[:, None])


def require_prefix(
    scores: Scores,
    originals: Scores,
    positions: Positions,
    prefix: Int[Array, "B Q"],
    certain: tuple[Float[Array, "B W 1"], Int[Array, "B"]] | None = None,
) -> Scores:
    """Forbids all tokens but the next one of the row's prefix, until the prefix is complete.

    `originals` are the scores before any rule was applied: rules do not apply to the prefix, which
    is padded with -1. `certain` is the score of probability 1, and how many of the first tokens get
    it.
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
    scores: Scores,
    certain: Float[Array, "B W 1"],
    positions: Positions,
    max_lengths: Int[Array, "B"],
    eos_id: int,
) -> Scores:
    """Forbids all tokens but the end token at the last position of a row.

    The required end token gets `certain`, the score of probability 1.
    """
    is_end = jnp.arange(scores.shape[2]) == eos_id
    last = (positions + 1 == max_lengths)[:, None, None]
    return jnp.where(last, jnp.where(is_end, certain, -jnp.inf), scores)


def forbid_tokens(
    scores: Scores, tokens: Int[Array, "B W N"], forbidden: Bool[Array, "B _ N"]
) -> Scores:
    """Forbids the tokens for which `forbidden`, which may have one hypothesis for all, is true."""
    return scores.at[*_hypothesis_indices(scores), tokens].add(jnp.where(forbidden, -jnp.inf, 0.0))


def last_tokens(tokens: Tokens, positions: Positions, count: int) -> Int[Array, "B W {count}"]:
    """Returns the last tokens of each hypothesis; -1 before its start."""
    indices = positions[:, None, None] - count + jnp.arange(count)
    found = jnp.take_along_axis(tokens, jnp.maximum(indices, 0), axis=2)
    return jnp.where(indices < 0, -1, found)


def _hypothesis_indices(scores: Array) -> tuple[Array, Array]:
    rows, hypotheses = jnp.ogrid[: scores.shape[0], : scores.shape[1]]
    return rows[:, :, None], hypotheses[:, :, None]
