"""One step of a search: greedy search, sampling and beam search extend hypotheses by a token."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxformer_mt.decoding.search import phrase_constraints, sampling
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.ranking import (
    as_finished,
    is_complete,
    length_penalty,
    ranking_scores,
    select_best,
)
from flaxformer_mt.decoding.search.state import (
    IMPOSSIBLE,
    Hypotheses,
    SearchResult,
    SentenceConstraints,
    append_tokens,
    drop,
    gather_hypotheses,
    is_possible,
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
        logits = sampling.filter_logits(scores.logits, options)
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
    """Selects `new` [B, W, ...] where `condition` bool [B, W] is true, otherwise `old`."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (new.ndim - 2)), new, old)


def extend_beam(
    scores: TokenScores,
    beam: Hypotheses,
    finished: SearchResult,
    positions: Array,
    constraints: SentenceConstraints,
    options: SearchOptions,
) -> tuple[Hypotheses, SearchResult, Array]:
    """Extends the W best unfinished hypotheses by one token.

    The 2W best continuations are candidates. The complete ones among the first W compete by score
    for the W entries of finished hypotheses; the first W incomplete ones are continued. Before
    the maximum length there are always W of them, because each hypothesis has only one continuation
    that ends it.

    Returns:
      The hypotheses to continue; the W best finished ones, best first; and the index of the
      hypothesis, int32 [B, W], that each of the former continues.
    """
    width = beam.last.shape[1]
    has_phrases = constraints.phrases.shape[1] > 0
    continue_best = _continue_with_phrases if has_phrases else _continue_best
    candidates, parents = continue_best(scores, beam, positions, constraints)  # [B, 2W]
    complete = is_complete(candidates, positions, constraints, options)

    new = as_finished(candidates, complete, positions, options)
    both = jax.tree.map(
        lambda old, new: jnp.concatenate([old, new[:, :width]], axis=1), finished, new
    )
    finished = select_best(both, width, constraints)

    # top_k returns the first of equal values.
    _, continued = lax.top_k((~complete).astype(jnp.int32), width)
    beam, parents = gather_hypotheses((drop(candidates, complete), parents), continued)
    decided = _is_decided(beam, finished, positions, constraints, options)
    return drop(beam, decided), finished, parents


def _continue_best(
    scores: TokenScores, beam: Hypotheses, positions: Array, constraints: SentenceConstraints
) -> tuple[Hypotheses, Array]:
    """Returns the 2W best continuations, best first, and the hypothesis of each, int32 [B, 2W]."""
    count = 2 * beam.last.shape[1]
    # The 2W best continuations of a row are among the 2W best of each of its hypotheses.
    gains, tokens = scores.best(count)
    totals = beam.log_probabilities[:, :, None] + gains
    totals, index = lax.top_k(totals.reshape(totals.shape[0], -1), count)
    parents = index // gains.shape[-1]
    tokens = jnp.take_along_axis(tokens.reshape(tokens.shape[0], -1), index, axis=1)
    return append_tokens(gather_hypotheses(beam, parents), tokens, totals, positions), parents


def _continue_with_phrases(
    scores: TokenScores, beam: Hypotheses, positions: Array, constraints: SentenceConstraints
) -> tuple[Hypotheses, Array]:
    """Like `_continue_best`, with the beam divided among banks; see `phrase_constraints`."""
    width = beam.last.shape[1]
    phrases = constraints.phrases
    gains, tokens = scores.best(2 * width)
    progress = phrase_constraints.phrase_progress(beam.tokens, positions[:, None], phrases)
    required = phrase_constraints.only_new(
        phrase_constraints.next_tokens(progress, phrases), tokens
    )
    required_gains = jnp.where(required < 0, IMPOSSIBLE, scores.of(jnp.maximum(required, 0)))
    gains = jnp.concatenate([gains, required_gains], axis=2)
    tokens = jnp.concatenate([tokens, required], axis=2)
    totals = beam.log_probabilities[:, :, None] + gains

    flat_shape = (tokens.shape[0], width * tokens.shape[2])
    parents = jnp.broadcast_to(jnp.arange(width)[:, None], tokens.shape)
    tokens, totals, parents = (a.reshape(flat_shape) for a in (tokens, totals, parents))
    candidates = append_tokens(gather_hypotheses(beam, parents), tokens, totals, positions)
    progress = phrase_constraints.phrase_progress(
        candidates.tokens, positions[:, None] + 1, phrases
    )
    banks = phrase_constraints.banks(progress, phrases)
    banks = jnp.where(is_possible(totals), banks, -1)
    index = phrase_constraints.round_robin(banks, totals)[:, : 2 * width]
    return gather_hypotheses((candidates, parents), index)


def _is_decided(
    beam: Hypotheses,
    finished: SearchResult,
    positions: Array,
    constraints: SentenceConstraints,
    options: SearchOptions,
) -> Array:
    """Whether W hypotheses are finished and no better one is expected, bool [B, 1].

    No token increases a log-probability, and the longest hypothesis has the largest length penalty.
    The score of an unfinished hypothesis can therefore become at most its log-probability /
    penalty(max_length).
    """
    worst = finished.scores[:, -1:]
    if options.early_stopping == "first" or options.independent:  # Greedy search with phrases.
        return is_possible(worst)
    if options.early_stopping == "heuristic":
        attainable = ranking_scores(beam, positions, options)
    else:
        longest = constraints.max_lengths[:, None]
        largest = length_penalty(longest, options.length_penalty, options.length_penalty_kind)
        attainable = beam.log_probabilities / largest
    return worst >= attainable.max(axis=1, keepdims=True)
