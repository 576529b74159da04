"""Greedy search, beam search and sampling over any step function: nothing here knows a model.

A step function gives the logits of the next token of W hypotheses a row, and carries a state (the
model's cache) along:

    step(tokens [B, W] int32, state, positions [B] int32) -> (StepOutput, state)

`tokens` are the last token of each hypothesis, at first `bos_id`; `positions` are how many tokens
the hypotheses of each row already have. A search is `start`, then `advance` as long as any row is
`active`, then `results`; `search` does all three. Shapes never change, so each can be part of a
compiled program, and rows do not influence each other: a row may be replaced by that of a new
search between two steps.

Beam search is that of Hugging Face transformers 5.23 (`_beam_search` in generation/utils.py), with
the difference that each row stops for itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.decoding.search import logits_processors as processors
from flaxformer_mt.decoding.search import phrase_constraints as constraints
from flaxformer_mt.decoding.search import sampling
from flaxformer_mt.decoding.search.top_k import logsumexp, top_k

State = Any

IMPOSSIBLE = -1e30
"""The log-probability of what must not be chosen. It is finite: sums and quotients of it stay
ordered and never become NaN."""


class StepOutput(NamedTuple):
    """What a step function says about the next token."""

    logits: Array
    """[B, W, V]"""
    attention: Array | None = None
    """float32 [B, W, S], how much the step attended to each source token; only needed for the
    coverage penalty."""


Step = Callable[[Array, State, Array], tuple[StepOutput, State]]
Reorder = Callable[[State, Array], State]
"""reorder(state, parents int32 [B, W]): the state in which hypothesis w of row b continues what was
hypothesis parents[b, w]."""


class Rows(NamedTuple):
    """What is asked of each row."""

    max_lengths: Array
    """int32 [B], tokens that a hypothesis may have, end token included. A hypothesis that gets
    there without an end token is complete as it is. 0 = no sentence in this row."""
    min_lengths: Array
    """int32 [B], tokens that a hypothesis has at least, end token not counted."""
    prefix: Array
    """int32 [B, F], the first tokens of every hypothesis, filled with -1. They count for lengths
    and scores like all others."""
    keys: Array
    """uint32 [B, 2], threefry keys of sampling."""
    phrases: Array
    """int32 [B, C, M], token sequences that must appear, filled with -1."""
    source_mask: Array | None = None
    """bool [B, S], True = a source token; only needed for the coverage penalty."""
    allowed: Array | None = None
    """bool [B, V], the tokens that there are: probabilities of these sum to 1. None = all."""


def unconstrained(max_lengths: Array) -> Rows:
    """Rows of which nothing is asked but to keep to their maximum length, int32 [B]."""
    batch_size = max_lengths.shape[0]
    return Rows(
        max_lengths=max_lengths,
        min_lengths=jnp.zeros_like(max_lengths),
        prefix=jnp.zeros((batch_size, 0), jnp.int32),
        keys=jnp.zeros((batch_size, 2), jnp.uint32),
        phrases=jnp.zeros((batch_size, 0, 0), jnp.int32),
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "length_penalty", "coverage_penalty", "repetition_penalty", "diversity_penalty",
        "temperature", "top_p", "min_p", "epsilon_cutoff",
    ),
    meta_fields=(
        "beam_size", "n_best", "beam_groups", "sampling", "top_k", "length_penalty_kind",
        "early_stopping", "min_length", "force_end", "renormalize", "no_repeat_ngram_size",
        "bos_id", "eos_id", "pad_id", "forbidden_ids", "bad_phrases", "scores",
    ),
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """What is asked of all rows; `DecodeConfig` explains the fields of the same names.

    A pytree whose leaves are the numbers that a compiled program takes as arguments. An option that
    is None costs nothing.
    """

    bos_id: int
    """Token before the first."""
    eos_id: int
    """Token after which a hypothesis is complete."""
    pad_id: int
    """What fills the result after a hypothesis."""
    beam_size: int = 1
    """W: hypotheses, or samples, of a row."""
    n_best: int = 1
    """N: how many of them are returned."""
    length_penalty: float | Array = 0.0
    length_penalty_kind: Literal["gnmt", "average"] = "gnmt"
    coverage_penalty: float | Array | None = None
    early_stopping: Literal["never", "heuristic", "first"] = "never"
    min_length: bool = False
    """Whether any row has a minimum length."""
    force_end: bool = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float | Array | None = None
    forbidden_ids: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    bad_phrases: tuple[tuple[int, ...], ...] = ()
    """Sequences of two or more tokens that never appear."""
    renormalize: bool = False
    beam_groups: int = 1
    diversity_penalty: float | Array = 0.0
    sampling: bool = False
    temperature: float | Array | None = None
    top_k: int = 0
    top_p: float | Array | None = None
    min_p: float | Array | None = None
    epsilon_cutoff: float | Array | None = None
    scores: bool = True
    """Whether log-probabilities and scores are needed. Greedy search does not compute them then:
    they mean nothing."""

    @classmethod
    def from_config(
        cls,
        decode: DecodeConfig,
        *,
        bos_id: int,
        eos_id: int,
        pad_id: int,
        forbidden_ids: Sequence[int] = (),
        bad_phrases: Sequence[Sequence[int]] = (),
        scores: bool = True,
    ) -> Self:
        """The options that a configuration asks for.

        Args:
          decode: the configuration; its texts (`bad_words`, `bad_word_ids`) are not looked at.
          bos_id: see above.
          eos_id: see above.
          pad_id: see above.
          forbidden_ids: tokens that are never chosen.
          bad_phrases: token sequences that never appear; a single end token among them is ignored.
          scores: see above.
        """
        bad_words = {phrase[0] for phrase in bad_phrases if len(phrase) == 1} - {eos_id}

        def unless(value: float, off: float) -> float | None:
            return None if value == off else value

        return cls(
            bos_id=bos_id,
            eos_id=eos_id,
            pad_id=pad_id,
            beam_size=(decode.mbr_samples or decode.n_best) if decode.samples else decode.beam_size,
            n_best=decode.mbr_samples or decode.n_best,
            length_penalty=decode.length_penalty,
            length_penalty_kind=decode.length_penalty_kind,
            coverage_penalty=unless(decode.coverage_penalty, 0),
            early_stopping=decode.early_stopping,
            min_length=decode.min_length > 0 or decode.min_length_factor > 0,
            force_end=decode.force_end,
            no_repeat_ngram_size=decode.no_repeat_ngram_size,
            repetition_penalty=unless(decode.repetition_penalty, 1),
            forbidden_ids=tuple(sorted(bad_words.union(forbidden_ids))),
            bad_phrases=tuple(tuple(phrase) for phrase in bad_phrases if len(phrase) > 1),
            renormalize=decode.renormalize,
            beam_groups=1 if decode.samples else decode.beam_groups,
            diversity_penalty=decode.diversity_penalty,
            sampling=decode.samples,
            temperature=unless(decode.temperature, 1),
            top_k=decode.top_k,
            top_p=unless(decode.top_p, 1),
            min_p=unless(decode.min_p, 0),
            epsilon_cutoff=unless(decode.epsilon_cutoff, 0),
            scores=scores,
        )

    @property
    def independent(self) -> bool:
        """Whether a row's hypotheses know nothing of each other: greedy search and sampling."""
        return self.sampling or self.beam_size == 1


class Hypotheses(NamedTuple):
    """The unfinished hypotheses of each row; K of them while the best W are not yet chosen."""

    tokens: Array
    """int32 [B, W, P], as many as the row's position says; what follows them means nothing."""
    last: Array
    """int32 [B, W], the last of them, at first `bos_id`."""
    log_probabilities: Array
    """float32 [B, W], sum over the tokens; IMPOSSIBLE where there is nothing to go on with."""
    coverage: Array | None
    """float32 [B, W, S], attention that each source token has received, 1 for padding; None without
    coverage penalty."""


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
    """float32 [B, N], log-probability / length penalty + coverage penalty."""
    log_probabilities: Array
    """float32 [B, N], sum over the tokens, end token included, as the options left them: a forced
    end is certain, and penalties of repetition and of other groups' tokens are taken off."""


class SearchState(NamedTuple):
    """A search that can be continued; all but `state` leads with B in every array."""

    rows: Rows
    positions: Array
    """int32 [B], tokens of every unfinished hypothesis."""
    hypotheses: Hypotheses
    finished: SearchResult
    """The W best complete hypotheses so far, in a beam of groups those of each group."""
    state: State
    """Of the step function."""


def length_penalty(
    length: Array, alpha: float | Array, kind: Literal["gnmt", "average"] = "gnmt"
) -> Array:
    """What a log-probability is divided by: ((5 + length) / 6)**alpha, or length**alpha.

    Args:
      length: int32, tokens of the hypothesis, end token included.
      alpha: 0 for none; larger favours longer hypotheses.
      kind: "gnmt" for the first, "average" for the second.

    Source: Wu et al. 2016, equation 14, without coverage; Hugging Face transformers.
    """
    tokens = length.astype(jnp.float32)
    return ((5.0 + tokens) / 6.0 if kind == "gnmt" else tokens) ** alpha


def coverage_penalty(coverage: Array, beta: float | Array) -> Array:
    r"""What is added to a score for source tokens that received too little attention.

    .. math:: \beta \sum_i \log \min(\sum_j p_{ij}, 1)

    Args:
      coverage: float32 [B, W, S], attention p_ij of target token j to source token i, summed over
        all target tokens.
      beta: 0 for none.

    Returns:
      float32 [B, W], finite: less attention than the smallest normal number counts as that.

    Source: Wu et al. 2016, equation 14.
    """
    received = jnp.clip(coverage, jnp.finfo(jnp.float32).tiny, 1.0)
    return beta * jnp.log(received).sum(axis=-1)


def gather_hypotheses(tree: Any, hypotheses: Array) -> Any:
    """Picks hypotheses in every array [B, W, ...] of a pytree, by index [B, W']."""

    def gather(leaf: Array) -> Array:
        index = hypotheses.reshape(hypotheses.shape + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    return jax.tree.map(gather, tree)


def search(
    step: Step,
    state: State,
    rows: Rows,
    options: SearchOptions,
    max_length: int,
    reorder: Reorder = gather_hypotheses,
) -> SearchResult:
    """Searches all rows to their end; arguments as of `start` and `advance`."""
    return results(
        lax.while_loop(
            lambda search_state: active(search_state).any(),
            functools.partial(advance, step, reorder, options),
            start(rows, state, options, max_length),
        ),
        options,
    )


def start(rows: Rows, state: State, options: SearchOptions, max_length: int) -> SearchState:
    """The beginning of a search.

    Args:
      rows: what is asked of each row.
      state: of the step function, for W hypotheses a row.
      options: what is asked of all rows.
      max_length: P, the largest value that `rows.max_lengths` may have.

    Raises:
      ValueError: phrases are asked of samples, or the coverage penalty lacks the source's mask.
    """
    if options.sampling and rows.phrases.shape[1]:
        raise ValueError("a phrase that must appear can be searched for, but not sampled")
    batch_size, width = rows.max_lengths.shape[0], options.beam_size
    log_probabilities = jnp.zeros((batch_size, width), jnp.float32)
    if not options.independent:
        # The hypotheses of a group are all equal at first: only one of them may be continued.
        first = jnp.arange(width) % (width // options.beam_groups) == 0
        log_probabilities = jnp.where(first, log_probabilities, IMPOSSIBLE)
    coverage = None
    if options.coverage_penalty is not None:
        if rows.source_mask is None:
            raise ValueError("the coverage penalty needs Rows.source_mask")
        padding = jnp.where(rows.source_mask, 0.0, 1.0)[:, None]
        coverage = jnp.repeat(padding, width, axis=1)
    tokens = jnp.full((batch_size, width, max_length), options.pad_id, jnp.int32)
    nothing = jnp.full((batch_size, width), IMPOSSIBLE, jnp.float32)
    return SearchState(
        rows=rows,
        positions=jnp.zeros(batch_size, jnp.int32),
        hypotheses=Hypotheses(
            tokens=tokens,
            last=jnp.full((batch_size, width), options.bos_id, jnp.int32),
            log_probabilities=jnp.where(rows.max_lengths[:, None] > 0, log_probabilities, nothing),
            coverage=coverage,
        ),
        finished=SearchResult(tokens, jnp.zeros((batch_size, width), jnp.int32), nothing, nothing),
        state=state,
    )


def active(search_state: SearchState) -> Array:
    """Which rows are not decided yet, bool [B]."""
    return _is_possible(search_state.hypotheses.log_probabilities).any(axis=1)


def results(search_state: SearchState, options: SearchOptions) -> SearchResult:
    """The best complete hypotheses; those of an active row are not final."""
    found = _best_found(search_state.finished, options.n_best, search_state.rows)
    written = jnp.arange(found.tokens.shape[2]) < found.lengths[:, :, None]
    return found._replace(tokens=jnp.where(written, found.tokens, options.pad_id))


def advance(
    step: Step, reorder: Reorder, options: SearchOptions, search_state: SearchState
) -> SearchState:
    """One token more for every unfinished hypothesis. Rows that are decided stay so.

    Args:
      step: see the top of this file.
      reorder: see `Reorder`; not called where hypotheses are independent.
      options: as given to `start`.
      search_state: what has been found so far.

    Raises:
      ValueError: the step function gives no attention, but there is a coverage penalty.
    """
    rows, positions, hypotheses, finished, state = search_state
    running = active(search_state)
    last_place = hypotheses.tokens.shape[2] - 1
    output, state = step(hypotheses.last, state, jnp.minimum(positions, last_place))
    hypotheses = _attended(hypotheses, output.attention)

    has_phrases = rows.phrases.shape[1] > 0
    extend = _extend_each if options.independent and not has_phrases else _extend_beam
    size = options.beam_size // options.beam_groups
    grown: list[tuple[Hypotheses, SearchResult, Array]] = []
    for begin in range(0, options.beam_size, size):
        beam, done, logits = jax.tree.map(
            lambda leaf, begin=begin: leaf[:, begin : begin + size],
            (hypotheses, finished, output.logits),
        )
        scores = _token_scores(logits, beam, positions, rows, options, [g for g, _, _ in grown])
        beam, done, parents = extend(scores, beam, done, positions, rows, options)
        grown.append((beam, done, parents + begin))
    hypotheses, finished, parents = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves, axis=1), *grown
    )
    return SearchState(
        rows=rows,
        positions=positions + running.astype(jnp.int32),
        hypotheses=hypotheses,
        finished=finished,
        state=state if options.independent else reorder(state, parents),
    )


class _TokenScores(NamedTuple):
    """What each next token adds to a hypothesis' log-probability: logits - normaliser."""

    logits: Array  # float32 [B, W, V]; minus infinity: ruled out
    normaliser: Array  # float32 [B, W, 1]

    def best(self, count: int) -> tuple[Array, Array]:
        """The `count` (at most V) best next tokens of each hypothesis.

        Returns:
          Log-probabilities float32 and tokens int32, both [B, W, count], best first.
        """
        best, tokens = top_k(self.logits, count)
        return self._finite(best), tokens

    def of(self, tokens: Array) -> Array:
        """The log-probabilities float32 [B, W, X] of tokens int32 [B, W, X]."""
        return self._finite(jnp.take_along_axis(self.logits, tokens, axis=2))

    def _finite(self, logits: Array) -> Array:
        gains = logits - self.normaliser
        possible = _is_possible(gains) & (gains < jnp.inf)
        return jnp.where(possible, gains, IMPOSSIBLE)  # Also in the place of NaN.


def _token_scores(
    logits: Array,
    beam: Hypotheses,
    positions: Array,
    rows: Rows,
    options: SearchOptions,
    earlier_groups: Sequence[Hypotheses],
) -> _TokenScores:
    """Applies all rules to the logits [B, W, V] of next tokens, in the order of Hugging Face.

    (What is forbidden everywhere comes first: no other rule depends on it.)
    """
    tokens = beam.tokens
    logits = logits.astype(jnp.float32)
    scores = logits
    if rows.allowed is not None:
        scores = jnp.where(rows.allowed[:, None], scores, -jnp.inf)
    forbidden = scores[..., np.array(options.forbidden_ids, int)]
    scores = processors.forbid(scores, options.forbidden_ids)
    if options.scores or not options.independent or options.sampling or rows.phrases.shape[1]:
        # What is forbidden has its share in the sum. Added up apart, it spares writing the whole
        # array twice, with and without.
        normaliser = jnp.logaddexp(
            logsumexp(scores), jax.nn.logsumexp(forbidden, axis=-1, keepdims=True)
        )
    else:
        normaliser = jnp.zeros((*scores.shape[:2], 1), jnp.float32)
    if earlier_groups:
        earlier = jax.tree.map(lambda *groups: jnp.concatenate(groups, axis=1), *earlier_groups)
        going_on = _is_possible(earlier.log_probabilities)
        scores = processors.penalise_chosen(
            scores, earlier.last, going_on, options.diversity_penalty
        )
    if options.repetition_penalty is not None:
        # The formula depends on where 0 is: log-probabilities in a beam, else logits.
        zero = jnp.zeros_like(normaliser) if options.independent else normaliser
        scores = zero + processors.penalise_repetition(
            scores - zero, tokens, positions, options.repetition_penalty
        )
    if options.no_repeat_ngram_size:
        scores = processors.forbid_repeated_ngrams(
            scores, tokens, positions, options.no_repeat_ngram_size
        )
    if options.bad_phrases:
        scores = processors.forbid_phrases(scores, tokens, positions, options.bad_phrases)
    if options.min_length:
        scores = processors.forbid_early_end(scores, positions, rows.min_lengths, options.eos_id)
    if rows.phrases.shape[1]:
        scores = constraints.forbid_early_end(
            scores, tokens, positions, rows.phrases, options.eos_id
        )
    if rows.prefix.shape[1]:
        scores = processors.force_prefix(scores, logits, positions, rows.prefix)
    if options.force_end:
        scores = processors.force_end(
            scores, normaliser, positions, rows.max_lengths, options.eos_id
        )
    if options.renormalize:
        normaliser = logsumexp(scores)
    return _TokenScores(scores, normaliser)


def _extend_each(
    scores: _TokenScores,
    hypotheses: Hypotheses,
    finished: SearchResult,
    positions: Array,
    rows: Rows,
    options: SearchOptions,
) -> tuple[Hypotheses, SearchResult, Array]:
    """Gives each hypothesis its best next token, or one drawn at random.

    Returns:
      The hypotheses that go on, those that are finished, each in its own place, and the number of
      the hypothesis [B, W] that each continues: its own.
    """
    if options.sampling:
        logits = sampling.likely_tokens(
            scores.logits,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            epsilon_cutoff=options.epsilon_cutoff,
        )
        tokens = sampling.draw(rows.keys, positions, logits)[..., None]
        gains = scores.of(tokens)
    else:
        gains, tokens = scores.best(1)
    totals = hypotheses.log_probabilities + gains[..., 0]
    grown = _append(hypotheses, tokens[..., 0], totals, positions)
    complete = _is_complete(grown, positions, rows, options)
    new = _as_finished(grown, complete, positions, rows, options)
    finished = jax.tree.map(functools.partial(_where_each, new.lengths > 0), new, finished)
    parents = jnp.broadcast_to(jnp.arange(totals.shape[1]), totals.shape)
    return _drop(grown, complete), finished, parents


def _extend_beam(
    scores: _TokenScores,
    beam: Hypotheses,
    finished: SearchResult,
    positions: Array,
    rows: Rows,
    options: SearchOptions,
) -> tuple[Hypotheses, SearchResult, Array]:
    """Extends the W best unfinished hypotheses by one token.

    The 2W best continuations are candidates. Those among the first W that are complete compete by
    score for the W places of finished hypotheses; of those that are not, the first W go on. So
    there are always W to go on with: each hypothesis has only one continuation that is an end.

    Returns:
      The hypotheses that go on, W finished ones, best first, and the number of the hypothesis
      [B, W] that each of the former continues.
    """
    width = beam.last.shape[1]
    continue_best = _continue_with_phrases if rows.phrases.shape[1] else _continue_best
    grown, parents = continue_best(scores, beam, positions, rows)  # [B, 2W]
    complete = _is_complete(grown, positions, rows, options)

    new = _as_finished(grown, complete, positions, rows, options)
    both = jax.tree.map(
        lambda old, new: jnp.concatenate([old, new[:, :width]], axis=1), finished, new
    )
    finished = _best_found(both, width, rows)

    _, going_on = lax.top_k((~complete).astype(jnp.int32), width)  # Of equals the first.
    beam, parents = gather_hypotheses((_drop(grown, complete), parents), going_on)
    return _drop(beam, _is_decided(beam, finished, positions, rows, options)), finished, parents


def _continue_best(
    scores: _TokenScores, beam: Hypotheses, positions: Array, rows: Rows
) -> tuple[Hypotheses, Array]:
    """The 2W best continuations of W hypotheses, best first, and which each continues [B, 2W]."""
    count = 2 * beam.last.shape[1]
    # The 2W best continuations of a row are among the 2W best of each of its hypotheses.
    gains, tokens = scores.best(count)
    totals = beam.log_probabilities[:, :, None] + gains
    totals, index = lax.top_k(totals.reshape(totals.shape[0], -1), count)
    parents = index // gains.shape[-1]
    tokens = jnp.take_along_axis(tokens.reshape(tokens.shape[0], -1), index, axis=1)
    return _append(gather_hypotheses(beam, parents), tokens, totals, positions), parents


def _continue_with_phrases(
    scores: _TokenScores, beam: Hypotheses, positions: Array, rows: Rows
) -> tuple[Hypotheses, Array]:
    """Like `_continue_best`, but places go in turns to the banks; see `constraints`."""
    width = beam.last.shape[1]
    gains, tokens = scores.best(2 * width)
    so_far = constraints.progress(beam.tokens, positions[:, None], rows.phrases)
    wanted = constraints.only_new(constraints.next_tokens(so_far, rows.phrases), tokens)
    wanted_gains = jnp.where(wanted < 0, IMPOSSIBLE, scores.of(jnp.maximum(wanted, 0)))
    gains = jnp.concatenate([gains, wanted_gains], axis=2)
    tokens = jnp.concatenate([tokens, wanted], axis=2)
    totals = beam.log_probabilities[:, :, None] + gains

    rows_and_candidates = (tokens.shape[0], width * tokens.shape[2])
    parents = jnp.broadcast_to(jnp.arange(width)[:, None], tokens.shape)
    tokens, totals, parents = (a.reshape(rows_and_candidates) for a in (tokens, totals, parents))
    candidates = _append(gather_hypotheses(beam, parents), tokens, totals, positions)
    then = constraints.progress(candidates.tokens, positions[:, None] + 1, rows.phrases)
    banks = constraints.banks(then, rows.phrases)
    banks = jnp.where(_is_possible(totals), banks, -1)
    index = constraints.in_turns(banks, totals)[:, : 2 * width]
    return gather_hypotheses((candidates, parents), index)


def _best_found(found: SearchResult, count: int, rows: Rows) -> SearchResult:
    """The `count` best results; those that lack more phrases than others do are left out."""
    if rows.phrases.shape[1]:
        lacking = constraints.progress(found.tokens, found.lengths, rows.phrases).lacking
        lacking = jnp.where(found.lengths > 0, lacking.sum(axis=-1), rows.phrases.shape[1])
        kept = (lacking == lacking.min(axis=1, keepdims=True)) & (found.lengths > 0)
        found = found._replace(
            lengths=jnp.where(kept, found.lengths, 0),
            scores=jnp.where(kept, found.scores, IMPOSSIBLE),
            log_probabilities=jnp.where(kept, found.log_probabilities, IMPOSSIBLE),
        )
    return gather_hypotheses(found, lax.top_k(found.scores, count)[1])


def _is_decided(
    beam: Hypotheses,
    finished: SearchResult,
    positions: Array,
    rows: Rows,
    options: SearchOptions,
) -> Array:
    """Where W hypotheses are finished and nothing better is expected, bool [B, 1].

    No token raises a log-probability, and the penalty of the longest hypothesis is the mildest. So
    what an unfinished hypothesis can still become is at most its log-probability /
    penalty(max_length).
    """
    worst = finished.scores[:, -1:]
    if options.early_stopping == "first" or options.independent:  # Greedy search, with phrases.
        return _is_possible(worst)
    if options.early_stopping == "heuristic":
        attainable = _scores(beam, positions, rows, options)
    else:
        longest = rows.max_lengths[:, None]
        mildest = length_penalty(longest, options.length_penalty, options.length_penalty_kind)
        attainable = beam.log_probabilities / mildest
    return worst >= attainable.max(axis=1, keepdims=True)


def _attended(hypotheses: Hypotheses, attention: Array | None) -> Hypotheses:
    """Hypotheses whose source has received `attention` [B, W, S] more."""
    if hypotheses.coverage is None:
        return hypotheses
    if attention is None:
        raise ValueError("the coverage penalty needs a step function that returns attention")
    return hypotheses._replace(coverage=hypotheses.coverage + attention)


def _append(hypotheses: Hypotheses, tokens: Array, totals: Array, positions: Array) -> Hypotheses:
    """Hypotheses of one token [B, K] more; `totals` [B, K] become their log-probabilities."""
    here = jnp.arange(hypotheses.tokens.shape[2]) == positions[:, None, None]
    return hypotheses._replace(
        tokens=jnp.where(here, tokens[:, :, None], hypotheses.tokens),
        last=tokens,
        log_probabilities=jnp.where(_is_possible(totals), totals, IMPOSSIBLE),
    )


def _drop(hypotheses: Hypotheses, which: Array) -> Hypotheses:
    """Marks hypotheses, bool [B, K], as not to go on with."""
    kept = jnp.where(which, IMPOSSIBLE, hypotheses.log_probabilities)
    return hypotheses._replace(log_probabilities=kept)


def _is_complete(grown: Hypotheses, positions: Array, rows: Rows, options: SearchOptions) -> Array:
    """Which hypotheses, one token longer than `positions` say, end with that token; bool [B, K]."""
    is_longest = positions + 1 >= rows.max_lengths
    return (grown.last == options.eos_id) | is_longest[:, None]


def _scores(grown: Hypotheses, positions: Array, rows: Rows, options: SearchOptions) -> Array:
    """Scores float32 [B, K] of hypotheses that are one token longer than `positions` say."""
    penalty = length_penalty(positions + 1, options.length_penalty, options.length_penalty_kind)
    scores = grown.log_probabilities / penalty[:, None]
    if grown.coverage is None or options.coverage_penalty is None:
        return scores
    return scores + coverage_penalty(grown.coverage, options.coverage_penalty)


def _as_finished(
    grown: Hypotheses,
    complete: Array,
    positions: Array,
    rows: Rows,
    options: SearchOptions,
) -> SearchResult:
    """The complete ones, bool [B, K], of the hypotheses as results; nothing in other places."""
    enters = complete & _is_possible(grown.log_probabilities)
    return SearchResult(
        tokens=grown.tokens,
        lengths=jnp.where(enters, positions[:, None] + 1, 0),
        scores=jnp.where(enters, _scores(grown, positions, rows, options), IMPOSSIBLE),
        log_probabilities=jnp.where(enters, grown.log_probabilities, IMPOSSIBLE),
    )


def _where_each(which: Array, new: Array, old: Array) -> Array:
    """`new` [B, W, ...] where `which` bool [B, W] is true, else `old`."""
    return jnp.where(which.reshape(which.shape + (1,) * (new.ndim - 2)), new, old)


def _is_possible(log_probabilities: Array) -> Array:
    # Whatever is added to IMPOSSIBLE, it stays far below any sum of real log-probabilities.
    return log_probabilities > IMPOSSIBLE / 2
