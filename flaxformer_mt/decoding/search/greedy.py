"""Greedy search and sampling: each hypothesis is extended independently of the others."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from flaxformer_mt.decoding.search import sampling
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.ranking import as_finished, is_complete
from flaxformer_mt.decoding.search.state import (
    Hypotheses,
    SearchResult,
    SentenceConstraints,
    append_tokens,
    drop,
)
from flaxformer_mt.decoding.search.token_scores import TokenScores


def extend_independently(
    scores: TokenScores,
    hypotheses: Hypotheses,
    finished: SearchResult,
    positions: Array,
    constraints: SentenceConstraints,
    options: SearchOptions,
) -> tuple[Hypotheses, SearchResult, Array]:
    """Appends to each hypothesis its best next token, or a sampled one.

    Returns:
      The hypotheses to continue; the finished ones, each at its own index; and the index of the
      hypothesis, int32 [B, W], that each of the former continues, which is its own.
    """
    if options.sampling:
        logits = sampling.filter_logits(
            scores.logits,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            epsilon_cutoff=options.epsilon_cutoff,
        )
        tokens = sampling.sample(constraints.keys, positions, logits)[..., None]
        gains = scores.of(tokens)
    else:
        gains, tokens = scores.best(1)
    totals = hypotheses.log_probabilities + gains[..., 0]
    extended = append_tokens(hypotheses, tokens[..., 0], totals, positions)
    complete = is_complete(extended, positions, constraints, options)
    new = as_finished(extended, complete, positions, options)
    finished = jax.tree.map(functools.partial(_where, new.lengths > 0), new, finished)
    parents = jnp.broadcast_to(jnp.arange(totals.shape[1]), totals.shape)
    return drop(extended, complete), finished, parents


def _where(condition: Array, new: Array, old: Array) -> Array:
    return jnp.where(condition.reshape(condition.shape + (1,) * (new.ndim - 2)), new, old)
