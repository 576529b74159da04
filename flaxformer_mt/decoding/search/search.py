"""Greedy search, beam search and sampling over any step function.

A search is `start`, then `advance` while any row is `active`, then `results`; `search` does all
three. Shapes never change, so each of them can be part of a compiled program, and rows do not
influence each other: a row may be replaced by that of a new search between two steps.

In each step hypotheses are extended by a token: each on its own (greedy search, sampling), or in
competition with the other hypotheses of its row or group (beam search).

Beam search follows Hugging Face transformers 5.23 (`_beam_search` in generation/utils.py), except
that each row stops on its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxformer_mt.decoding.search import phrase_constraints, sampling
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.ranking import length_penalty, ranking_scores
from flaxformer_mt.decoding.search.state import (
    IMPOSSIBLE,
    Hypotheses,
    ReorderFunction,
    SearchResult,
    SearchState,
    SentenceConstraints,
    StepFunction,
    StepState,
    append_tokens,
    drop,
    gather_hypotheses,
    is_possible,
)
from flaxformer_mt.decoding.search.token_scores import TokenScores, token_scores

Extension = tuple[Hypotheses, SearchResult, Array]
"""The hypotheses to continue; the finished ones; and the parents int32 [B, W], the index of the
hypothesis that each of the former continues."""


def search(
    step: StepFunction,
    reorder: ReorderFunction,
    options: SearchOptions,
    search_state: SearchState,
) -> SearchResult:
    """Searches until every row is decided; the arguments are those of `advance`."""
    proceed = functools.partial(advance, step, reorder, options)
    search_state = lax.while_loop(lambda state: active(state).any(), proceed, search_state)
    return results(search_state, options)


def start(
    constraints: SentenceConstraints, state: StepState, options: SearchOptions, max_length: int
) -> SearchState:
    """Returns the initial state of a search.

    `state` is that of the step function, for W hypotheses per row; `max_length`, P, is the maximum
    of `constraints.max_lengths`.

    Raises:
      ValueError: sampling is combined with required phrases, or the coverage penalty lacks the
        source mask.
    """
    if options.sampling and constraints.has_phrases:
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
    found = _select_best(search_state.finished, options.n_best, search_state.constraints)
    is_token = jnp.arange(found.tokens.shape[2]) < found.lengths[:, :, None]
    return found._replace(tokens=jnp.where(is_token, found.tokens, options.pad_id))


def advance(
    step: StepFunction,
    reorder: ReorderFunction,
    options: SearchOptions,
    search_state: SearchState,
) -> SearchState:
    """Extends every unfinished hypothesis by one token. Rows that are decided do not change.

    `reorder` is not called if hypotheses are independent; `options` are those given to `start`.

    Raises:
      ValueError: there is a coverage penalty, but the step function returns no attention.
    """
    constraints, positions, hypotheses, finished, state = search_state
    running = active(search_state)
    last_position = hypotheses.tokens.shape[2] - 1
    output, state = step(hypotheses.last, state, jnp.minimum(positions, last_position))
    hypotheses = _add_attention(hypotheses, output.attention)

    alone = options.independent and not constraints.has_phrases
    extend = _extend_independently if alone else _extend_beam
    size = options.beam_size // options.beam_groups
    extended: list[Extension] = []
    for begin in range(0, options.beam_size, size):
        group, done, logits = jax.tree.map(
            lambda leaf, begin=begin: leaf[:, begin : begin + size],
            (hypotheses, finished, output.logits),
        )
        beam = search_state._replace(hypotheses=group, finished=done)
        scores = token_scores(logits, beam, options, [earlier for earlier, _, _ in extended])
        group, done, parents = extend(scores, beam, options)
        extended.append((group, done, parents + begin))
    hypotheses, finished, parents = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves, axis=1), *extended
    )
    return search_state._replace(
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


def _extend_independently(
    scores: TokenScores, beam: SearchState, options: SearchOptions
) -> Extension:
    """Appends to each hypothesis its best next token, or a sampled one.

    Each hypothesis keeps its index, also among the finished ones.
    """
    positions = beam.positions
    if options.sampling:
        logits = sampling.filter_logits(scores.logits, options)
        tokens = sampling.sample(beam.constraints.keys, positions, logits)[..., None]
        gains = scores.of(tokens)
    else:
        gains, tokens = scores.best(1)
    totals = beam.hypotheses.log_probabilities + gains[..., 0]
    extended = append_tokens(beam.hypotheses, tokens[..., 0], totals, positions)
    complete = _is_complete(extended, beam, options)
    new = _as_finished(extended, complete, positions, options)
    finished = jax.tree.map(functools.partial(_where, new.lengths > 0), new, beam.finished)
    parents = jnp.broadcast_to(jnp.arange(totals.shape[1]), totals.shape)
    return drop(extended, complete), finished, parents


def _where(condition: Array, new: Array, old: Array) -> Array:
    """Selects `new` [B, W, ...] where `condition` bool [B, W] is true, otherwise `old`."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (new.ndim - 2)), new, old)


def _extend_beam(scores: TokenScores, beam: SearchState, options: SearchOptions) -> Extension:
    """Extends the W best unfinished hypotheses by one token.

    The 2W best continuations are candidates. The complete ones among the first W compete by score
    for the W entries of finished hypotheses; the first W incomplete ones are continued. Before
    the maximum length there are always W of them, because each hypothesis has only one continuation
    that ends it.
    """
    width = beam.hypotheses.last.shape[1]
    continue_best = _continue_with_phrases if beam.constraints.has_phrases else _continue_best
    candidates, parents = continue_best(scores, beam)  # [B, 2W]
    complete = _is_complete(candidates, beam, options)

    new = _as_finished(candidates, complete, beam.positions, options)
    both = jax.tree.map(
        lambda old, new: jnp.concatenate([old, new[:, :width]], axis=1), beam.finished, new
    )
    finished = _select_best(both, width, beam.constraints)

    # top_k returns the first of equal values.
    _, continued = lax.top_k((~complete).astype(jnp.int32), width)
    hypotheses, parents = gather_hypotheses((drop(candidates, complete), parents), continued)
    decided = _is_decided(beam._replace(hypotheses=hypotheses, finished=finished), options)
    return drop(hypotheses, decided), finished, parents


def _continue_best(scores: TokenScores, beam: SearchState) -> tuple[Hypotheses, Array]:
    """Returns the 2W best continuations, best first, and the hypothesis of each, int32 [B, 2W]."""
    hypotheses = beam.hypotheses
    count = 2 * hypotheses.last.shape[1]
    # The 2W best continuations of a row are among the 2W best of each of its hypotheses.
    gains, tokens = scores.best(count)
    totals = hypotheses.log_probabilities[:, :, None] + gains
    totals, index = lax.top_k(totals.reshape(totals.shape[0], -1), count)
    parents = index // gains.shape[-1]
    tokens = jnp.take_along_axis(tokens.reshape(tokens.shape[0], -1), index, axis=1)
    continued = gather_hypotheses(hypotheses, parents)
    return append_tokens(continued, tokens, totals, beam.positions), parents


def _continue_with_phrases(scores: TokenScores, beam: SearchState) -> tuple[Hypotheses, Array]:
    """Like `_continue_best`, with the beam divided among banks; see `phrase_constraints`."""
    hypotheses, positions = beam.hypotheses, beam.positions
    width = hypotheses.last.shape[1]
    phrases = beam.constraints.phrases
    gains, tokens = scores.best(2 * width)
    progress = phrase_constraints.phrase_progress(hypotheses.tokens, positions[:, None], phrases)
    required = phrase_constraints.only_new(
        phrase_constraints.next_tokens(progress, phrases), tokens
    )
    required_gains = jnp.where(required < 0, IMPOSSIBLE, scores.of(jnp.maximum(required, 0)))
    gains = jnp.concatenate([gains, required_gains], axis=2)
    tokens = jnp.concatenate([tokens, required], axis=2)
    totals = hypotheses.log_probabilities[:, :, None] + gains

    flat_shape = (tokens.shape[0], width * tokens.shape[2])
    parents = jnp.broadcast_to(jnp.arange(width)[:, None], tokens.shape)
    tokens, totals, parents = (a.reshape(flat_shape) for a in (tokens, totals, parents))
    continued = gather_hypotheses(hypotheses, parents)
    candidates = append_tokens(continued, tokens, totals, positions)
    progress = phrase_constraints.phrase_progress(
        candidates.tokens, positions[:, None] + 1, phrases
    )
    banks = phrase_constraints.banks(progress, phrases)
    banks = jnp.where(is_possible(totals), banks, -1)
    index = phrase_constraints.round_robin(banks, totals)[:, : 2 * width]
    return gather_hypotheses((candidates, parents), index)


def _is_complete(extended: Hypotheses, beam: SearchState, options: SearchOptions) -> Array:
    """Whether each of the extended hypotheses ends with its last token, bool [B, C]."""
    is_longest = beam.positions + 1 >= beam.constraints.max_lengths
    return (extended.last == options.eos_id) | is_longest[:, None]


def _is_decided(beam: SearchState, options: SearchOptions) -> Array:
    """Whether W hypotheses are finished and no better one is expected, bool [B, 1].

    No token increases a log-probability, and the longest hypothesis has the largest length penalty
    (with a negative alpha, the shortest). The score of an unfinished hypothesis can therefore
    become at most its log-probability / penalty(max_length).
    """
    worst = beam.finished.scores[:, -1:]
    if options.early_stopping == "first" or options.independent:  # Greedy search with phrases.
        return is_possible(worst)
    if options.early_stopping == "heuristic":
        attainable = ranking_scores(beam.hypotheses, beam.positions, options)
    else:
        alpha = options.length_penalty
        best = jnp.where(alpha < 0, beam.positions + 1, beam.constraints.max_lengths)[:, None]
        largest = length_penalty(best, alpha, options.length_penalty_kind)
        attainable = beam.hypotheses.log_probabilities / largest
    return worst >= attainable.max(axis=1, keepdims=True)


def _as_finished(
    extended: Hypotheses, complete: Array, positions: Array, options: SearchOptions
) -> SearchResult:
    """Converts the hypotheses where `complete` is true; all others become empty."""
    is_finished = complete & is_possible(extended.log_probabilities)
    return SearchResult(
        tokens=extended.tokens,
        lengths=jnp.where(is_finished, positions[:, None] + 1, 0),
        scores=jnp.where(is_finished, ranking_scores(extended, positions, options), IMPOSSIBLE),
        log_probabilities=jnp.where(is_finished, extended.log_probabilities, IMPOSSIBLE),
    )


def _select_best(found: SearchResult, count: int, constraints: SentenceConstraints) -> SearchResult:
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
