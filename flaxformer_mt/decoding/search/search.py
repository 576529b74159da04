"""Greedy search, beam search and sampling over any step function.

A search is `start`, then `advance` while any row is `active`, then `results`; `search` does all
three. Shapes never change, so each of them can be part of a compiled program, and rows do not
influence each other: a row may be replaced by that of a new search between two steps.

Beam search follows Hugging Face transformers 5.23 (`_beam_search` in generation/utils.py), except
that each row stops on its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxformer_mt.decoding.search.extension import extend_beam, extend_independently
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.ranking import select_best
from flaxformer_mt.decoding.search.state import (
    IMPOSSIBLE,
    Hypotheses,
    ReorderFunction,
    SearchResult,
    SearchState,
    SentenceConstraints,
    StepFunction,
    StepState,
    gather_hypotheses,
    is_possible,
)
from flaxformer_mt.decoding.search.token_scores import token_scores


def search(
    step: StepFunction,
    state: StepState,
    constraints: SentenceConstraints,
    options: SearchOptions,
    max_length: int,
    reorder: ReorderFunction = gather_hypotheses,
) -> SearchResult:
    """Searches until every row is decided; see `start` and `advance` for the arguments."""
    return results(
        lax.while_loop(
            lambda search_state: active(search_state).any(),
            functools.partial(advance, step, reorder, options),
            start(constraints, state, options, max_length),
        ),
        options,
    )


def start(
    constraints: SentenceConstraints, state: StepState, options: SearchOptions, max_length: int
) -> SearchState:
    """Returns the initial state of a search.

    Args:
      constraints: of each row.
      state: of the step function, for W hypotheses per row.
      options: of all rows.
      max_length: P, the maximum of `constraints.max_lengths`.

    Raises:
      ValueError: sampling is combined with required phrases, or the coverage penalty lacks the
        source mask.
    """
    if options.sampling and constraints.phrases.shape[1]:
        raise ValueError("required phrases are not supported with sampling")
    batch_size, width = constraints.max_lengths.shape[0], options.beam_size
    log_probabilities = jnp.zeros((batch_size, width), jnp.float32)
    if not options.independent:
        # Initially, all hypotheses of a group are equal: only one of them may be continued.
        first = jnp.arange(width) % (width // options.beam_groups) == 0
        log_probabilities = jnp.where(first, log_probabilities, IMPOSSIBLE)
    coverage = None
    if options.coverage_penalty is not None:
        if constraints.source_mask is None:
            raise ValueError("the coverage penalty needs SentenceConstraints.source_mask")
        padding = jnp.where(constraints.source_mask, 0.0, 1.0)[:, None]
        coverage = jnp.repeat(padding, width, axis=1)
    tokens = jnp.full((batch_size, width, max_length), options.pad_id, jnp.int32)
    impossible = jnp.full((batch_size, width), IMPOSSIBLE, jnp.float32)
    return SearchState(
        constraints=constraints,
        positions=jnp.zeros(batch_size, jnp.int32),
        hypotheses=Hypotheses(
            tokens=tokens,
            last=jnp.full((batch_size, width), options.bos_id, jnp.int32),
            log_probabilities=jnp.where(
                constraints.max_lengths[:, None] > 0, log_probabilities, impossible
            ),
            coverage=coverage,
        ),
        finished=SearchResult(
            tokens, jnp.zeros((batch_size, width), jnp.int32), impossible, impossible
        ),
        state=state,
    )


def active(search_state: SearchState) -> Array:
    """Returns which rows are not decided yet, bool [B]."""
    return is_possible(search_state.hypotheses.log_probabilities).any(axis=1)


def results(search_state: SearchState, options: SearchOptions) -> SearchResult:
    """Returns the best complete hypotheses; those of an active row are not final."""
    found = select_best(search_state.finished, options.n_best, search_state.constraints)
    is_token = jnp.arange(found.tokens.shape[2]) < found.lengths[:, :, None]
    return found._replace(tokens=jnp.where(is_token, found.tokens, options.pad_id))


def advance(
    step: StepFunction,
    reorder: ReorderFunction,
    options: SearchOptions,
    search_state: SearchState,
) -> SearchState:
    """Extends every unfinished hypothesis by one token. Rows that are decided do not change.

    Args:
      step: gives the logits of the next token; see `StepFunction`.
      reorder: see `ReorderFunction`; not called if hypotheses are independent.
      options: as given to `start`.
      search_state: the search so far.

    Raises:
      ValueError: there is a coverage penalty, but the step function returns no attention.
    """
    constraints, positions, hypotheses, finished, state = search_state
    running = active(search_state)
    last_position = hypotheses.tokens.shape[2] - 1
    output, state = step(hypotheses.last, state, jnp.minimum(positions, last_position))
    hypotheses = _add_attention(hypotheses, output.attention)

    has_phrases = constraints.phrases.shape[1] > 0
    extend = extend_independently if options.independent and not has_phrases else extend_beam
    size = options.beam_size // options.beam_groups
    extended: list[tuple[Hypotheses, SearchResult, Array]] = []
    for begin in range(0, options.beam_size, size):
        group, done, logits = jax.tree.map(
            lambda leaf, begin=begin: leaf[:, begin : begin + size],
            (hypotheses, finished, output.logits),
        )
        earlier_groups = [earlier for earlier, _, _ in extended]
        scores = token_scores(logits, group, positions, constraints, options, earlier_groups)
        group, done, parents = extend(scores, group, done, positions, constraints, options)
        extended.append((group, done, parents + begin))
    hypotheses, finished, parents = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves, axis=1), *extended
    )
    return SearchState(
        constraints=constraints,
        positions=positions + running.astype(jnp.int32),
        hypotheses=hypotheses,
        finished=finished,
        state=state if options.independent else reorder(state, parents),
    )


def _add_attention(hypotheses: Hypotheses, attention: Array | None) -> Hypotheses:
    if hypotheses.coverage is None:
        return hypotheses
    if attention is None:
        raise ValueError("the coverage penalty needs a step function that returns attention")
    return hypotheses._replace(coverage=hypotheses.coverage + attention)
