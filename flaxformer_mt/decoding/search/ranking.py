"""Ranking of hypotheses: length and coverage penalties."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.state import Hypotheses


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
