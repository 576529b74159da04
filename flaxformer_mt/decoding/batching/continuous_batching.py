"""From token sequences to hypotheses: keeps full batches of fixed shapes going.

A batch has B rows, one a sentence. When some rows are finished, the next sentences take their
places, in the middle of what the others are doing; when none are left, the batch gets smaller. So
nobody waits for the longest translation of a batch, and there are few shapes to compile: rows for S
source tokens, and for P target tokens, where S and P are powers of two, and few B.

What is found for a sentence does not depend on the others: what stands in other rows does not
enter its numbers, and a longer P adds nothing but zeros. (P and B are shapes of a compiled program,
so the last digit of a score may be rounded otherwise.)
"""

import collections
import functools
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching.length_buckets import longest_sentence, row_length
from flaxformer_mt.decoding.ensemble import combine, reorder_each
from flaxformer_mt.decoding.scoring.teacher_forcing import never_chosen
from flaxformer_mt.decoding.search.search import (
    IMPOSSIBLE,
    Reorder,
    Rows,
    SearchOptions,
    SearchResult,
    SearchState,
    Step,
    StepOutput,
    active,
    advance,
    results,
    start,
)
from flaxformer_mt.model.transformer import (
    Transformer,
    insert_rows,
    reorder_cache,
    resize_cache,
)
from flaxformer_mt.runtime import decoding_options

SHORTEST_TARGET = 32
"""P, at first."""

USUAL_BEAM = 4
"""The number of hypotheses that `decode.batch_tokens` is meant for."""

FEWEST_ROWS = 4
"""A batch for few sentences has at least so many rows: with less it would hardly be faster."""

FEWEST_ROWS_LEFT = 16
"""A batch at its end does not get smaller than this: that is over before a program is loaded."""

MOST_WORKERS = 8


class Request(NamedTuple):
    """A sentence to be translated."""

    source: Sequence[int]
    """Tokens, the end token included."""
    min_length: int
    """Tokens of a hypothesis at least, the end token not counted."""
    max_length: int
    """Tokens of a hypothesis at most, the end token included."""
    prefix: Sequence[int] = ()
    """What every hypothesis begins with."""
    phrases: Sequence[Sequence[int]] = ()
    """Token sequences that must appear."""
    seed: int = 0
    """Of sampling, 32 bits."""
    allowed: np.ndarray | None = None
    """The tokens that may be chosen, ascending; None = all."""


class Found(NamedTuple):
    """The hypotheses of a sentence, best first; none if the parameters are not finite."""

    tokens: list[tuple[int, ...]]
    """The end token is the last, if the model came to an end."""
    scores: list[float]
    log_probabilities: list[float]


class ContinuousBatcher:
    """Searches with one model, or an ensemble, and one set of options."""

    def __init__(
        self,
        models: Sequence[tuple[TransformerConfig, Any]],
        decode: DecodeConfig,
        bad_phrases: Sequence[Sequence[int]] = (),
        scores: bool = True,
    ) -> None:
        """Makes an engine.

        Args:
          models: configuration and parameters of each; all have the same vocabularies.
          decode: the options. Its texts are not looked at, and lengths are those of the requests.
          bad_phrases: token sequences that must not appear.
          scores: whether they are needed; see `SearchOptions.scores`.
        """
        self._configs = tuple(config for config, _ in models)
        self._params = jax.device_put(tuple(params for _, params in models))
        self._model = self._configs[0]
        self._decode = decode
        model = self._model
        self._options = SearchOptions.from_config(
            decode,
            bos_id=model.bos_id,
            eos_id=model.eos_id,
            pad_id=model.pad_id,
            forbidden_ids=never_chosen(model),
            bad_phrases=bad_phrases,
            scores=scores,
        )
        limits = [limit for config in self._configs if (limit := longest_sentence(config))]
        self._limit = min(limits, default=None)
        self._shapes: dict[tuple[int, _Widths, int], SearchState] = {}

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[int, Found]]:
        """Searches for translations.

        Args:
          requests: of any length, in any order.

        Yields:
          The index of a request and what was found for it, as they finish.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        for index in sorted(range(len(requests)), key=lambda index: -len(requests[index].source)):
            request = requests[index]
            length = row_length(len(request.source), self._limit)
            # Prefixes and phrases make another program of a search, which may round differently.
            has_wishes = len(request.prefix) + len(request.phrases) > 0
            groups.setdefault((length, has_wishes), []).append(index)
        num_batches = sum(
            -(-len(indices) // self._batch_sizes(length)[-1])
            for (length, _), indices in groups.items()
        )
        num_workers = min(_most_workers(), num_batches)
        queues = [
            (
                length,
                _Widths.of([requests[index] for index in indices], int(has_wishes)),
                collections.deque(indices),
                -(-len(indices) // num_workers),
            )
            for (length, has_wishes), indices in groups.items()
        ]

        for length, widths, _, _ in queues:
            self._state_shape(length, widths)  # Now, so that workers do not all trace it at once.

        def work(put: Callable[[tuple[int, Found]], None]) -> None:
            for length, widths, waiting, share in queues:
                if not waiting:
                    continue
                batch = _Batch(self, length, widths, share)
                while batch.is_busy or waiting:
                    batch.admit(requests, waiting)
                    for item in batch.run(keep_full=bool(waiting)):
                        put(item)

        yield from _gathered(work, num_workers)

    def _batch_sizes(self, length: int) -> list[int]:
        """The numbers of rows that batches may have, falling, for `length` source tokens."""
        tokens = self._decode.batch_tokens * USUAL_BEAM
        sizes = [max(1, tokens // (length * self._options.beam_size))]
        # Most of what is left at the end of a file fits into half a batch, and little needs less:
        # a program for each power of two would gain nothing more.
        smaller = sizes[0] // 2
        while smaller >= FEWEST_ROWS:
            sizes.append(smaller)
            smaller //= 4
        return sizes

    def _state_shape(self, length: int, widths: "_Widths") -> SearchState:
        """The shapes of a search of one row, for S = `length` and the shortest P."""
        key = length, widths, self._target_length(1)
        if key not in self._shapes:
            sources, rows = self._arrays(length, widths, [None])
            begin = functools.partial(_begin, configs=self._configs, max_length=key[-1])
            self._shapes[key] = jax.eval_shape(begin, self._params, sources, rows, self._options)
        return self._shapes[key]

    def _target_length(self, length: int) -> int:
        """P for hypotheses of at least `length` tokens."""
        return row_length(length, self._limit, SHORTEST_TARGET)

    def _arrays(
        self, length: int, widths: "_Widths", requests: Sequence[Request | None]
    ) -> tuple[np.ndarray, Rows]:
        """Source tokens [R, S] and what is asked of each row; None is a row without sentence."""
        model = self._model
        count = len(requests)
        sources = np.full((count, length), model.pad_id, np.int32)
        max_lengths, min_lengths = np.zeros((2, count), np.int32)
        prefixes = np.full((count, widths.prefix), -1, np.int32)
        keys = np.zeros((count, 2), np.uint32)
        phrases = np.full((count, widths.num_phrases, widths.phrase), -1, np.int32)
        allowed = None
        if widths.has_allowed:
            allowed = np.zeros((count, model.target_vocab_size), bool)
        for row, request in enumerate(requests):
            if request is None:
                continue
            sources[row, : len(request.source)] = request.source
            max_lengths[row] = request.max_length
            min_lengths[row] = request.min_length
            prefixes[row, : len(request.prefix)] = request.prefix
            keys[row, 1] = request.seed
            for phrase, tokens in zip(phrases[row], request.phrases, strict=False):
                phrase[: len(tokens)] = tokens
            if allowed is not None:
                allowed[row, slice(None) if request.allowed is None else request.allowed] = True
        source_mask = sources != model.pad_id
        arrays: Any = (max_lengths, min_lengths, prefixes, keys, phrases, source_mask, allowed)
        return sources, Rows(*arrays)


class _Widths(NamedTuple):
    """How wide the arrays of `Rows` must be, so that every request fits."""

    prefix: int
    num_phrases: int
    phrase: int
    has_allowed: bool

    @classmethod
    def of(cls, requests: Sequence[Request], least: int) -> "_Widths":
        """Powers of two, or 0; none is below `least`, which is 0 or 1."""
        phrases = [request.phrases for request in requests]
        return cls(
            _power_of_two(max([least, *(len(request.prefix) for request in requests)])),
            _power_of_two(max([least, *map(len, phrases)])),
            _power_of_two(max([least, *map(len, itertools.chain(*phrases))])),
            any(request.allowed is not None for request in requests),
        )


def _power_of_two(number: int) -> int:
    """The smallest that is not below `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


class _Batch:
    """B rows, each with a sentence or without, that are searched together."""

    def __init__(self, engine: ContinuousBatcher, length: int, widths: _Widths, share: int) -> None:
        """Makes a batch without sentences.

        Args:
          engine: whose parameters and options these are.
          length: S.
          widths: of what is asked of the rows.
          share: how many sentences there are for it; more rows than that would be idle.
        """
        self._engine = engine
        self._length = length
        self._widths = widths
        sizes = engine._batch_sizes(length)
        first, *smaller = [size for size in sizes if size <= share] or sizes[-1:]
        self._sizes = [first, *(size for size in smaller if size >= FEWEST_ROWS_LEFT)]
        """B, and what it may become, falling."""
        self._admitted = max(1, self._sizes[0] // 8)  # R: rows that are given away together.
        self._target_length = engine._target_length(1)
        self._owners: list[int | None] = [None] * self._sizes[0]
        """The request that each row works for."""
        self._longest = 0
        """Tokens of the longest unfinished hypothesis."""
        self._state = _nothing(engine._state_shape(length, widths), self._sizes[0])

    @property
    def is_busy(self) -> bool:
        """Whether any row has a sentence."""
        return any(owner is not None for owner in self._owners)

    def admit(self, requests: Sequence[Request], waiting: collections.deque[int]) -> None:
        """Gives free rows to sentences that wait, as long as there are enough of either."""
        engine = self._engine
        while True:
            free = [row for row, owner in enumerate(self._owners) if owner is None]
            if len(free) < self._admitted:
                return
            new: list[int] = []
            while len(new) < self._admitted and waiting:
                try:
                    new.append(waiting.popleft())
                except IndexError:  # Another worker was faster.
                    break
            if not new:
                return
            slots = np.full(self._admitted, len(self._owners), np.int32)
            slots[: len(new)] = free[: len(new)]
            for row, index in zip(free, new, strict=False):
                self._owners[row] = index
            rows = [requests[index] for index in new]
            self._state = _admit(
                engine._params,
                *engine._arrays(
                    self._length, self._widths, [*rows, *[None] * (self._admitted - len(new))]
                ),
                engine._options,
                self._state,
                slots,
                configs=engine._configs,
                max_length=self._target_length,
            )

    def run(self, keep_full: bool) -> list[tuple[int, Found]]:
        """Goes on until some rows are finished.

        Args:
          keep_full: stop as soon as there is room for new sentences; otherwise when a smaller
            batch would do.

        Returns:
          The requests that are finished.
        """
        engine = self._engine
        fitting = engine._target_length(self._longest + 1)
        if fitting != self._target_length:
            self._state = _resize(self._state, max_length=fitting)
            self._target_length = fitting
        busy = len(self._owners) - self._admitted
        if not keep_full:
            self._shrink()
            busy = self._sizes[1] if len(self._sizes) > 1 else 0
        self._state, running, positions, found = _run(
            engine._params,
            self._state,
            engine._options,
            busy,
            configs=engine._configs,
            how=engine._decode.ensemble,
        )
        running, positions, found = jax.device_get((running, positions, found))
        self._longest = int(np.max(positions, where=running, initial=0))
        finished = []
        for row, index in enumerate(self._owners):
            if index is not None and not running[row]:
                finished.append((index, _found(found, row)))
                self._owners[row] = None
        return finished

    def _shrink(self) -> None:
        """Leaves out rows that nobody needs."""
        needed = [row for row, owner in enumerate(self._owners) if owner is not None]
        while len(self._sizes) > 1 and len(needed) <= self._sizes[1]:
            self._sizes.pop(0)
        size = self._sizes[0]
        if size == len(self._owners):
            return
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        kept = [*needed, *free][:size]
        self._state = _keep(self._state, np.array(kept, np.int32))
        self._owners = [self._owners[row] for row in kept]


def _found(result: SearchResult, row: int) -> Found:
    lengths = result.lengths[row]
    return Found(
        [
            tuple(tokens[:length].tolist())
            for tokens, length in zip(result.tokens[row], lengths, strict=True)
            if length
        ],
        result.scores[row][lengths > 0].tolist(),
        result.log_probabilities[row][lengths > 0].tolist(),
    )


def _begin(
    params: Any,
    sources: Array,
    rows: Rows,
    options: SearchOptions,
    *,
    configs: tuple[TransformerConfig, ...],
    max_length: int,
) -> SearchState:
    """The beginning of a search of source tokens int32 [R, S]; `max_length` is P."""
    caches = []
    for config, own in zip(configs, params, strict=True):
        model, variables = Transformer(config), {"params": own}
        encoded = model.apply(variables, sources, method="encode")
        caches.append(
            model.apply(
                variables, encoded, sources, options.beam_size, max_length, method="init_cache"
            )
        )
    return start(rows, tuple(caches), options, max_length)


def _nothing(of_one_row: SearchState, num_rows: int) -> SearchState:
    """A search in which no row has a sentence; `of_one_row` tells the shape of one that has one."""

    def zeros(leaf: Any) -> np.ndarray:
        return np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)

    state: Any = jax.tree.map(zeros, of_one_row)
    state.hypotheses.log_probabilities[:] = IMPOSSIBLE
    # Nothing is compiled for this; and memory of numpy's could not be written over later.
    moved: SearchState = jax.device_put(state, may_alias=False)
    return moved


@functools.partial(
    jax.jit,
    static_argnames=("configs", "max_length"),
    donate_argnames="search_state",
    compiler_options=decoding_options(),
)
def _admit(
    params: Any,
    sources: Array,
    rows: Rows,
    options: SearchOptions,
    search_state: SearchState,
    slots: Array,
    *,
    configs: tuple[TransformerConfig, ...],
    max_length: int,
) -> SearchState:
    """Begins new searches in the rows `slots` int32 [R]; one that is not below B is left out."""
    new = _begin(params, sources, rows, options, configs=configs, max_length=max_length)

    def replace(old: Array, inserted: Array) -> Array:
        return old.at[slots].set(inserted, mode="drop")

    caches = tuple(
        insert_rows(old, inserted, slots)
        for old, inserted in zip(search_state.state, new.state, strict=True)
    )
    others = jax.tree.map(replace, search_state._replace(state=()), new._replace(state=()))
    return others._replace(state=caches)


@functools.partial(
    jax.jit,
    static_argnames=("configs", "how"),
    donate_argnames="search_state",
    compiler_options=decoding_options(),
)
def _run(
    params: Any,
    search_state: SearchState,
    options: SearchOptions,
    busy: int,
    *,
    configs: tuple[TransformerConfig, ...],
    how: Any,
) -> tuple[SearchState, Array, Array, SearchResult]:
    """Goes on until no more than `busy` rows are active, or one of them is full.

    Returns:
      The search; which rows are active, bool [B], their positions, and what was found in the
      others.
    """
    step = combine(
        [_step(config, own, options) for config, own in zip(configs, params, strict=True)], how
    )
    reorder: Reorder = reorder_each(reorder_cache)
    max_length = search_state.hypotheses.tokens.shape[-1]

    def goes_on(state: SearchState) -> Array:
        running = active(state)
        is_full = running & (state.positions >= max_length)
        return (running.sum() > busy) & ~is_full.any()

    search_state = lax.while_loop(
        goes_on, functools.partial(advance, step, reorder, options), search_state
    )
    return (
        search_state,
        active(search_state),
        search_state.positions,
        results(search_state, options),
    )


def _step(config: TransformerConfig, params: Any, options: SearchOptions) -> Step:
    """A model's step function for the search."""
    model, variables = Transformer(config), {"params": params}
    needs_attention = options.coverage_penalty is not None

    def step(tokens: Array, cache: Any, positions: Array) -> tuple[StepOutput, Any]:
        logits, cache, *attention = model.apply(
            variables,
            tokens,
            cache,
            positions,
            method="decode_step",
            return_attention=needs_attention,
        )
        return StepOutput(logits, *attention), cache

    return step


@jax.jit
def _keep(search_state: SearchState, rows: Array) -> SearchState:
    """The search of these rows alone, int32 [R]."""
    kept: SearchState = jax.tree.map(lambda leaf: leaf[rows], search_state)
    return kept


@functools.partial(jax.jit, static_argnames="max_length")
def _resize(search_state: SearchState, *, max_length: int) -> SearchState:
    """The same search, with arrays for hypotheses of `max_length` tokens."""

    def resize(tokens: Array) -> Array:
        missing = max(0, max_length - tokens.shape[-1])
        return jnp.pad(tokens, ((0, 0), (0, 0), (0, missing)))[..., :max_length]

    hypotheses, finished = search_state.hypotheses, search_state.finished
    return search_state._replace(
        hypotheses=hypotheses._replace(tokens=resize(hypotheses.tokens)),
        finished=finished._replace(tokens=resize(finished.tokens)),
        state=tuple(resize_cache(cache, max_length) for cache in search_state.state),
    )


def _most_workers() -> int:
    """How many batches to have in flight.

    XLA uses several cores only within large operations: on CPUs, each core gets a batch of its own.
    On accelerators a second batch fills the pauses in which the host looks at the first.
    """
    if jax.default_backend() != "cpu":
        return 2
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def _gathered(
    work: Callable[[Callable[[Any], None]], None], num_workers: int
) -> Iterator[tuple[int, Found]]:
    """What `num_workers` threads put, as they put it.

    If the reader stops early, the threads stop at their next `put`.
    """
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopped = threading.Event()

    class Stopped(Exception):
        pass

    def put(item: tuple[int, Found]) -> None:
        if stopped.is_set():
            raise Stopped
        finished.put(item)

    def run() -> None:
        try:
            work(put)
            finished.put(None)
        except Stopped:
            pass
        except BaseException as error:  # It is raised again where results are read.
            finished.put(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    try:
        working = num_workers
        while working:
            item = finished.get()
            if item is None:
                working -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
