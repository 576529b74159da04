"""Greedy and beam search over any step function: nothing here knows a model.

A step function gives the logits of the next token of W hypotheses a row, and carries a state (the
cache) along:

    step(tokens [B, W] int32, state, position int32 scalar) -> (logits [B, W, V], state)

`tokens` are the last token of each hypothesis, `bos_id` at position 0. Each search is one
`jax.lax.while_loop` of static shapes, made to be called inside `jax.jit`; rows do not influence
each other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

State = Any
Step = Callable[[Array, State, Array], tuple[Array, State]]
Reorder = Callable[[State, Array], State]

IMPOSSIBLE = -1e30
"""The log-probability of what must not be chosen. It is finite: sums and quotients of it stay
ordered and never become NaN."""


class SearchResult(NamedTuple):
    """The N best hypotheses of each row, best first.

    A place for which there was no hypothesis (an empty row, fewer than N possible, or logits that
    are not finite) has length 0 and the score `IMPOSSIBLE`.
    """

    tokens: Array
    """int32 [B, N, P], end token included, filled up with `pad_id`."""
    lengths: Array
    """int32 [B, N], end token included."""
    scores: Array
    """float32 [B, N], log-probability / length penalty."""
    log_probabilities: Array
    """float32 [B, N], sum over the tokens, end token included."""


def length_penalty(length: Array, alpha: float | Array) -> Array:
    """What a log-probability is divided by: ((5 + length) / 6)**alpha.

    Args:
      length: int32, tokens of the hypothesis, end token included.
      alpha: 0 for none; larger favours longer hypotheses.

    Source: Wu et al. 2016, equation 14, without coverage.
    """
    return ((5.0 + length.astype(jnp.float32)) / 6.0) ** alpha


def gather_hypotheses(tree: Any, hypotheses: Array) -> Any:
    """Picks hypotheses in every array [B, W, ...] of a pytree, by index [B, W']."""

    def gather(leaf: Array) -> Array:
        index = hypotheses.reshape(hypotheses.shape + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    return jax.tree.map(gather, tree)


class _Greedy(NamedTuple):
    position: Array  # int32 scalar: tokens chosen so far
    last: Array  # int32 [B, 1]
    tokens: Array  # int32 [B, P]
    lengths: Array  # int32 [B]
    log_probabilities: Array  # float32 [B]
    active: Array  # bool [B]
    state: State


def greedy_search(
    step: Step,
    state: State,
    *,
    max_lengths: Array,
    max_length: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    forbidden_ids: Sequence[int] = (),
    alpha: float | Array = 0.0,
) -> SearchResult:
    """Takes the most probable token until it is the end token.

    Equal to `beam_search` of one hypothesis without length penalty, at less cost.

    Args:
      step: see the top of this file; W is 1.
      state: what `step` carries along.
      max_lengths: int32 [B], tokens that a row's hypothesis may have, at most `max_length`; 0 = an
        empty row. A hypothesis without end token keeps all of them.
      max_length: P, of the arrays.
      bos_id: token before the first.
      eos_id: token after which a hypothesis is complete.
      pad_id: what fills the result after a hypothesis.
      forbidden_ids: tokens that are never chosen. Probabilities are not renormalised.
      alpha: length penalty of the reported score; the hypothesis does not depend on it.

    Returns:
      One hypothesis a row, N = 1.
    """
    batch_size = max_lengths.shape[0]

    def advance(loop: _Greedy) -> _Greedy:
        logits, state = step(loop.last, loop.state, loop.position)
        gains, tokens = _best_tokens(logits, 1, forbidden_ids)  # [B, 1, 1]
        gain, token = gains[:, 0, 0], tokens[:, 0, 0]
        token = jnp.where(loop.active, token, pad_id)
        lengths = loop.lengths + loop.active.astype(jnp.int32)
        return _Greedy(
            position=loop.position + 1,
            last=token[:, None],
            tokens=loop.tokens.at[:, loop.position].set(token),
            lengths=lengths,
            log_probabilities=loop.log_probabilities + jnp.where(loop.active, gain, 0.0),
            active=loop.active & (token != eos_id) & (lengths < max_lengths),
            state=state,
        )

    loop = lax.while_loop(
        lambda loop: loop.active.any(),
        advance,
        _Greedy(
            position=jnp.int32(0),
            last=jnp.full((batch_size, 1), bos_id, jnp.int32),
            tokens=jnp.full((batch_size, max_length), pad_id, jnp.int32),
            lengths=jnp.zeros(batch_size, jnp.int32),
            log_probabilities=jnp.zeros(batch_size, jnp.float32),
            active=max_lengths > 0,
            state=state,
        ),
    )
    found = (loop.lengths > 0) & _is_possible(loop.log_probabilities)
    scores = loop.log_probabilities / length_penalty(loop.lengths, alpha)
    return SearchResult(
        tokens=loop.tokens[:, None],
        lengths=jnp.where(found, loop.lengths, 0)[:, None],
        scores=jnp.where(found, scores, IMPOSSIBLE)[:, None],
        log_probabilities=jnp.where(found, loop.log_probabilities, IMPOSSIBLE)[:, None],
    )


class _Beam(NamedTuple):
    position: Array  # int32 scalar: tokens of every unfinished hypothesis
    last: Array  # int32 [B, W]
    tokens: Array  # int32 [B, W, P]
    log_probabilities: Array  # float32 [B, W], falling; IMPOSSIBLE: none to go on with
    finished: SearchResult
    state: State


def beam_search(
    step: Step,
    state: State,
    *,
    max_lengths: Array,
    max_length: int,
    beam_size: int,
    n_best: int = 1,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    forbidden_ids: Sequence[int] = (),
    alpha: float | Array = 0.0,
    reorder: Reorder = gather_hypotheses,
) -> SearchResult:
    """Extends the W best unfinished hypotheses by one token at a time.

    Each step looks at the 2W best continuations. Those among the first W that are complete (their
    last token is the end token, or the row's length is reached) compete by score for the N places
    of the result; of those that are not, the W best by log-probability go on. So there are always
    W to go on with: each hypothesis has only one continuation that is an end.

    A row is decided when the worst of its N results is at least as good as anything that an
    unfinished hypothesis could still become. No token raises a log-probability, and the penalty
    of the longest hypothesis is the mildest, so that is log-probability / penalty(max_length).

    Args:
      step: see the top of this file.
      state: what `step` carries along, for W hypotheses a row.
      max_lengths: int32 [B], tokens that a row's hypotheses may have, at most `max_length`; 0 = an
        empty row. A hypothesis that gets there without an end token is complete as it is.
      max_length: P, of the arrays.
      beam_size: W.
      n_best: N, hypotheses returned.
      bos_id: token before the first.
      eos_id: token after which a hypothesis is complete.
      pad_id: what fills the result after a hypothesis.
      forbidden_ids: tokens that are never chosen. Probabilities are not renormalised.
      alpha: length penalty, >= 0 (see `length_penalty`).
      reorder: reorder(state, hypotheses int32 [B, W]) gives the state in which hypothesis w
        continues what was hypothesis `hypotheses[b, w]`.

    Returns:
      N hypotheses a row.
    """
    batch_size = max_lengths.shape[0]

    def advance(loop: _Beam) -> _Beam:
        logits, state = step(loop.last, loop.state, loop.position)
        length = loop.position + 1

        # The 2W best continuations of a row are among the 2W best of each of its hypotheses.
        gains, tokens = _best_tokens(logits, 2 * beam_size, forbidden_ids)
        totals = loop.log_probabilities[:, :, None] + gains
        totals, index = lax.top_k(totals.reshape(batch_size, -1), 2 * beam_size)  # [B, 2W]
        parents = index // gains.shape[-1]
        last = jnp.take_along_axis(tokens.reshape(batch_size, -1), index, axis=1)
        sequences = gather_hypotheses(loop.tokens, parents).at[:, :, loop.position].set(last)

        complete = (last == eos_id) | (length >= max_lengths[:, None])
        in_beam = jnp.arange(2 * beam_size) < beam_size
        enters = complete & in_beam & _is_possible(totals)
        finished = _keep_best(
            loop.finished,
            SearchResult(
                tokens=sequences,
                lengths=jnp.where(enters, length, 0),
                scores=jnp.where(enters, totals / length_penalty(length, alpha), IMPOSSIBLE),
                log_probabilities=jnp.where(enters, totals, IMPOSSIBLE),
            ),
        )

        log_probabilities, going_on = lax.top_k(jnp.where(complete, IMPOSSIBLE, totals), beam_size)
        attainable = log_probabilities[:, 0] / length_penalty(max_lengths, alpha)
        decided = finished.scores[:, -1] >= attainable
        sequences, last, parents = gather_hypotheses((sequences, last, parents), going_on)
        return _Beam(
            position=length,
            last=last,
            tokens=sequences,
            log_probabilities=jnp.where(decided[:, None], IMPOSSIBLE, log_probabilities),
            finished=finished,
            state=reorder(state, parents),
        )

    # All hypotheses of a row are equal at first: only one of them may be continued.
    log_probabilities = jnp.full((batch_size, beam_size), IMPOSSIBLE, jnp.float32)
    log_probabilities = log_probabilities.at[:, 0].set(jnp.where(max_lengths > 0, 0.0, IMPOSSIBLE))
    loop = lax.while_loop(
        lambda loop: _is_possible(loop.log_probabilities).any(),
        advance,
        _Beam(
            position=jnp.int32(0),
            last=jnp.full((batch_size, beam_size), bos_id, jnp.int32),
            tokens=jnp.full((batch_size, beam_size, max_length), pad_id, jnp.int32),
            log_probabilities=log_probabilities,
            finished=_nothing(batch_size, n_best, max_length, pad_id),
            state=state,
        ),
    )
    return loop.finished


def _best_tokens(logits: Array, count: int, forbidden_ids: Sequence[int]) -> tuple[Array, Array]:
    """The `count` (at most V) most probable next tokens of each hypothesis.

    Returns:
      Log-probabilities float32 and tokens int32, both [B, W, count], best first.
    """
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if forbidden_ids:
        logits = logits.at[..., jnp.array(forbidden_ids)].set(IMPOSSIBLE)
    # XLA has a fast top_k for matrices only.
    flat = logits.reshape(-1, logits.shape[-1])  # [B * W, V]
    best, tokens = lax.top_k(flat, min(count, flat.shape[-1]))
    shape = (*logits.shape[:-1], best.shape[-1])
    return best.reshape(shape) - normaliser, tokens.reshape(shape)


def _is_possible(log_probabilities: Array) -> Array:
    # Whatever is added to IMPOSSIBLE, it stays far below any sum of real log-probabilities.
    return log_probabilities > IMPOSSIBLE / 2


def _keep_best(kept: SearchResult, new: SearchResult) -> SearchResult:
    """The N best of N kept and any number of new hypotheses; of equals the older."""
    both = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), kept, new)
    _, best = lax.top_k(both.scores, kept.scores.shape[1])
    return gather_hypotheses(both, best)


def _nothing(batch_size: int, n_best: int, max_length: int, pad_id: int) -> SearchResult:
    shape = (batch_size, n_best)
    return SearchResult(
        tokens=jnp.full((*shape, max_length), pad_id, jnp.int32),
        lengths=jnp.zeros(shape, jnp.int32),
        scores=jnp.full(shape, IMPOSSIBLE, jnp.float32),
        log_probabilities=jnp.full(shape, IMPOSSIBLE, jnp.float32),
    )
