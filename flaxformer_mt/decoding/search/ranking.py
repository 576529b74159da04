"""Ranking of hypotheses: length and coverage penalties, finished hypotheses, n-best lists."""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxformer_mt.decoding.search import phrase_constraints
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.state import (
    IMPOSSIBLE,
    Hypotheses,
    SearchResult,
    SentenceConstraints,
    gather_hypotheses,
    is_possible,
)


def length_penalty(
    length: Int[Array, "*shape"],
    alpha: float | Float[Array, ""],
    kind: Literal["gnmt", "average"] = "gnmt",
) -> Float[Array, "*shape"]:
    """Returns the divisor of a log-probability: ((5 + length) / 6)**alpha, or length**alpha.

    `length` includes the end token. A larger `alpha` favors longer hypotheses; 0 = no penalty.
    `kind` is "gnmt" for the first formula, "average" for the second.

    Source: Wu et al. 2016, equation 14, without coverage; Hugging Face transformers.
    """
    tokens = length.astype(jnp.float32)
    return ((5.0 + tokens) / 6.0 if kind == "gnmt" else tokens) ** alpha


def coverage_penalty(
    coverage: Float[Array, "B W S"], beta: float | Float[Array, ""]
) -> Float[Array, "B W"]:
    r"""Returns the term of the score for source tokens that received too little attention.

    .. math:: \beta \sum_i \log \min(\sum_j p_{ij}, 1)

    `coverage` is the attention p_ij of target token j to source token i, summed over all target
    tokens. The term is finite: attention below the smallest normal number is replaced by that
    number.

    Source: Wu et al. 2016, equation 14.
    """
    received = jnp.clip(coverage, jnp.finfo(jnp.float32).tiny, 1.0)
    return beta * jnp.log(received).sum(axis=-1)


def ranking_scores(
    extended: Hypotheses, positions: Int[Array, "B"], options: SearchOptions
) -> Float[Array, "B C"]:
    """Returns the scores of hypotheses with `positions` + 1 tokens."""
    penalty = length_penalty(positions + 1, options.length_penalty, options.length_penalty_kind)
    scores = extended.log_probabilities / penalty[:, None]
    if extended.coverage is None or options.coverage_penalty is None:
        return scores
    return scores + coverage_penalty(extended.coverage, options.coverage_penalty)


def as_finished(
    extended: Hypotheses,
    complete: Bool[Array, "B C"],
    positions: Int[Array, "B"],
    options: SearchOptions,
) -> SearchResult:
    """Converts the hypotheses where `complete` is true; all others become empty."""
    is_finished = complete & is_possible(extended.log_probabilities)
    return SearchResult(
        tokens=extended.tokens,
        lengths=jnp.where(is_finished, positions[:, None] + 1, 0),
        scores=jnp.where(is_finished, ranking_scores(extended, positions, options), IMPOSSIBLE),
        log_probabilities=jnp.where(is_finished, extended.log_probabilities, IMPOSSIBLE),
    )


def select_best(found: SearchResult, count: int, constraints: SentenceConstraints) -> SearchResult:
    """Selects the `count` best results among those that lack the fewest required phrases."""
    if constraints.has_phrases:
        lacking = phrase_constraints.phrase_progress(
            found.tokens, found.lengths, constraints.phrases
        ).lacking
        num_phrases = constraints.phrases.shape[1]
        lacking = jnp.where(found.lengths > 0, lacking.sum(axis=-1), num_phrases)
        kept = (lacking == lacking.min(axis=1, keepdims=True)) & (found.lengths > 0)
        found = found._replace(
            lengths=jnp.where(kept, found.lengths, 0),
            scores=jnp.where(kept, found.scores, IMPOSSIBLE),
            log_probabilities=jnp.where(kept, found.log_probabilities, IMPOSSIBLE),
        )
    return gather_hypotheses(found, lax.top_k(found.scores, count)[1])
