"""The scores of next tokens: log-probabilities after all constraints and penalties.

There is a score for each token that could follow each of the W hypotheses of B rows; a forbidden
token has minus infinity. The first `positions` tokens of the hypotheses of each row are defined;
the start token is not among them.

Source of the formulas: `generation/logits_process.py` of Hugging Face transformers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxformer_mt.decoding.search import phrase_constraints
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.state import IMPOSSIBLE, Hypotheses, SearchState, is_possible
from flaxformer_mt.decoding.search.top_k import logsumexp, top_k

Scores = Float[Array, "B W V"]
Tokens = Int[Array, "B W P"]
Positions = Int[Array, "B"]


class TokenScores(NamedTuple):
    """What each next token adds to a hypothesis' log-probability: logits - normalizer."""

    logits: Float[Array, "B W V"]
    """Minus infinity for a token that must not be chosen."""
    normalizer: Float[Array, "B W 1"]

    def best(self, count: int) -> tuple[Float[Array, "B W N"], Int[Array, "B W N"]]:
        """Returns log-probabilities and ids of the min(count, V) best next tokens, best first."""
        best, tokens = top_k(self.logits, count)
        return self._finite(best), tokens

    def of(self, tokens: Int[Array, "B W X"]) -> Float[Array, "B W X"]:
        """Returns the log-probabilities of tokens."""
        return self._finite(jnp.take_along_axis(self.logits, tokens, axis=2))

    def _finite(self, logits: Array) -> Array:
        gains = logits - self.normalizer
        possible = is_possible(gains) & (gains < jnp.inf)
        return jnp.where(possible, gains, IMPOSSIBLE)  # NaN becomes IMPOSSIBLE as well.


def token_scores(
    logits: Float[Array, "B W V"],
    beam: SearchState,
    options: SearchOptions,
    earlier_groups: Sequence[Hypotheses] = (),
) -> TokenScores:
    """Applies all constraints and penalties to the logits of the next token.

    They are applied in the order of transformers' logits processors. (Forbidden tokens come first:
    no other rule depends on them.) `earlier_groups`, of a diverse beam search, are already extended
    by one token.
    """
    constraints, positions, tokens = beam.constraints, beam.positions, beam.hypotheses.tokens
    logits = logits.astype(jnp.float32)
    scores = logits
    if constraints.allowed is not None:
        scores = jnp.where(constraints.allowed[:, None], scores, -jnp.inf)
    forbidden = scores[..., np.array(options.forbidden_ids, int)]
    scores = forbid(scores, options.forbidden_ids)
    compete = not options.independent or constraints.has_phrases
    if options.scores or compete or options.sampling:
        # Forbidden tokens count in the sum. Adding them separately avoids writing the whole array
        # twice, with and without them.
        normalizer = jnp.logaddexp(
            logsumexp(scores), jax.nn.logsumexp(forbidden, axis=-1, keepdims=True)
        )
    else:
        normalizer = jnp.zeros((*scores.shape[:2], 1), jnp.float32)
    if earlier_groups:
        earlier = jax.tree.map(lambda *groups: jnp.concatenate(groups, axis=1), *earlier_groups)
        continued = is_possible(earlier.log_probabilities)
        scores = penalize_chosen(scores, earlier.last, continued, options.diversity_penalty)
    if options.repetition_penalty is not None:
        # The formula depends on the origin: log-probabilities in a beam search, otherwise logits.
        origin = jnp.zeros_like(normalizer) if options.independent else normalizer
        scores = origin + penalize_repetition(
            scores - origin, tokens, positions, options.repetition_penalty, options.bos_id
        )
    if options.no_repeat_ngram_size:
        scores = forbid_repeated_ngrams(scores, tokens, positions, options.no_repeat_ngram_size)
    if options.bad_phrases:
        scores = forbid_phrases(scores, tokens, positions, options.bad_phrases)
    if options.min_length:
        scores = forbid_early_end(scores, positions, constraints.min_lengths, options.eos_id)
    if constraints.has_phrases:
        scores = phrase_constraints.forbid_end_before_phrases(
            scores, tokens, positions, constraints.phrases, options.eos_id
        )
    if constraints.prefix.shape[1]:
        certain = None if constraints.certain is None else (normalizer, constraints.certain)
        scores = require_prefix(scores, logits, positions, constraints.prefix, certain)
    if options.force_end:
        scores = require_end(scores, normalizer, positions, constraints.max_lengths, options.eos_id)
    if options.renormalize:
        normalizer = logsumexp(scores)
    return TokenScores(scores, normalizer)


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

    `chosen` are their tokens at this position, of which those where `counted` is true count.

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
