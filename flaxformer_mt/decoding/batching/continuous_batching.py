"""Continuous batching: searches for many sentences in batches of fixed shapes.

A batch has B rows, each with one sentence. When some rows are finished, the next sentences are
admitted to them while the other rows continue; at the end of the input the batch shrinks. No
sentence therefore waits for the longest translation of its batch, and few shapes are compiled: rows
of S source and P target tokens, where S and P are powers of two, and few values of B.

The result for a sentence does not depend on the other sentences: other rows do not enter its
computation, and a longer P only adds zeros. (P and B are shapes of a compiled program, so the last
digit of a score may round differently.)
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching import search_programs as programs
from flaxformer_mt.decoding.batching.length_buckets import longest_position, row_length
from flaxformer_mt.decoding.batching.workers import (
    batch_tokens,
    decoding_devices,
    gather,
    max_workers,
)
from flaxformer_mt.decoding.parameters import rounded_matrices
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.state import SearchResult, SearchState, SentenceConstraints

MIN_TARGET_LENGTH = 32
"""The initial P."""

REFERENCE_BEAM_SIZE = 4
"""The beam size for which `decode.batch_tokens` is defined."""

MIN_BATCH_ROWS = 4
"""Lower bound of B for few sentences: smaller batches would hardly be faster."""

MIN_FINAL_BATCH_ROWS = 16
"""Lower bound of B for a shrinking batch: fewer rows finish before another program is loaded."""


class Request(NamedTuple):
    """A sentence to be translated, as tokens, with its constraints."""

    source: Sequence[int]
    """Tokens, the end token included."""
    min_length: int
    """Minimum number of tokens of a hypothesis, end token excluded."""
    max_length: int
    """Maximum number of tokens of a hypothesis, end token included."""
    prefix: Sequence[int] = ()
    """The first tokens of every hypothesis."""
    certain: int = 0
    """How many of the prefix' first tokens have probability 1."""
    phrases: Sequence[Sequence[int]] = ()
    """Token sequences that must appear."""
    seed: int = 0
    """Seed of sampling, 32 bits."""
    allowed: np.ndarray | None = None
    """The tokens that may be chosen, ascending; None = all."""


class TokenHypotheses(NamedTuple):
    """The hypotheses of a sentence, best first; empty if the parameters are not finite."""

    tokens: list[tuple[int, ...]]
    """The end token is the last one, unless the maximum length was reached."""
    scores: list[float]
    log_probabilities: list[float]


class ContinuousBatcher:
    """Searches for translations with one model, or an ensemble, and one set of options."""

    def __init__(
        self,
        models: Sequence[tuple[TransformerConfig, Any]],
        decode: DecodeConfig,
        bad_phrases: Sequence[Sequence[int]] = (),
        scores: bool = True,
    ) -> None:
        """Creates a batcher.

        Args:
          models: configuration and parameters of each model; all have the same vocabularies.
          decode: the options. Its texts are ignored, and the requests give the lengths.
          bad_phrases: token sequences that must not appear.
          scores: whether they are needed; see `SearchOptions.scores`.

        Raises:
          UserError: there are fewer devices than `decode.num_devices`.
        """
        self._configs = tuple(config for config, _ in models)
        params = tuple(rounded_matrices(*model) for model in models)
        on_first = jax.device_put(params)
        # Options are checked without parameters.
        leaves = jax.tree.leaves(on_first) or [jnp.zeros(())]
        (first, *_) = leaves[0].devices()
        self._devices = decoding_devices(decode, first)
        self._params = {
            device: on_first if device == first else jax.device_put(on_first, device)
            for device in self._devices
        }
        self._batch_tokens = batch_tokens(decode, first.platform)
        self._model = self._configs[0]
        self._decode = decode
        self._options = SearchOptions.from_config(decode, self._model, bad_phrases, scores)
        self._limit = longest_position(self._configs)

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[int, TokenHypotheses]]:
        """Yields the index of each request and its hypotheses, as they finish."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for index in sorted(range(len(requests)), key=lambda index: -len(requests[index].source)):
            request = requests[index]
            length = row_length(len(request.source), self._limit)
            # Prefixes and phrases need another program of a search, which may round differently.
            constrained = len(request.prefix) + len(request.phrases) > 0
            groups.setdefault((length, constrained), []).append(index)
        num_batches = sum(
            -(-len(indices) // self._batch_sizes(length)[-1])
            for (length, _), indices in groups.items()
        )
        devices = self._devices
        num_workers = min(max_workers(devices[0].platform) * len(devices), num_batches)
        queues = [
            (
                length,
                _ConstraintWidths.of(
                    [requests[index] for index in indices],
                    minimum=int(constrained),
                    minimum_phrases=int(constrained and not self._options.sampling),
                ),
                collections.deque(indices),
                -(-len(indices) // num_workers),
            )
            for (length, constrained), indices in groups.items()
        ]

        for length, widths, _, _ in queues:
            self._state_shape(length, widths)  # Now, so that workers do not all trace it at once.

        def work(put: Callable[[tuple[int, TokenHypotheses]], None], number: int) -> None:
            device = devices[number % len(devices)]
            for length, widths, waiting, share in queues:
                if not waiting:
                    continue
                batch = _Batch(self, device, length, widths, share)
                while batch.is_busy or waiting:
                    batch.admit(requests, waiting)
                    for item in batch.run(keep_full=bool(waiting)):
                        put(item)

        yield from gather(work, num_workers)

    def _batch_sizes(self, length: int) -> list[int]:
        """Returns the possible numbers of rows, descending, for `length` source tokens."""
        tokens = self._batch_tokens * REFERENCE_BEAM_SIZE
        sizes = [max(1, tokens // (length * self._options.beam_size))]
        # The sentences that remain at the end of a file mostly fit into half a batch, and few need
        # less: a program for each power of two would gain nothing more.
        smaller = sizes[0] // 2
        while smaller >= MIN_BATCH_ROWS:
            sizes.append(smaller)
            smaller //= 4
        return sizes

    def _state_shape(self, length: int, widths: "_ConstraintWidths") -> SearchState:
        """Returns the shapes of a one-row search, for S = `length` and the smallest P."""
        sources, constraints = self._arrays(length, widths, [None])
        shapes: SearchState = programs.shapes_of_search.eval_shape(
            self._params[self._devices[0]],
            sources,
            constraints,
            self._options,
            configs=self._configs,
            max_length=self._target_length(1),
        )
        return shapes

    def _target_length(self, length: int) -> int:
        return row_length(length, self._limit, MIN_TARGET_LENGTH)

    def _arrays(
        self, length: int, widths: "_ConstraintWidths", requests: Sequence[Request | None]
    ) -> tuple[np.ndarray, SentenceConstraints]:
        """Returns source tokens [R, S] and constraints; None is a row without a sentence."""
        model = self._model
        count = len(requests)
        sources = np.full((count, length), model.pad_id, np.int32)
        max_lengths, min_lengths = np.zeros((2, count), np.int32)
        prefixes = np.full((count, widths.prefix), -1, np.int32)
        keys = np.zeros((count, 2), np.uint32)
        phrases = np.full((count, widths.num_phrases, widths.phrase), -1, np.int32)
        allowed = certain = None
        if widths.has_certain:
            certain = np.array(
                [request.certain if request else 0 for request in requests], np.int32
            )
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
        arrays: Any = (
            max_lengths, min_lengths, prefixes, keys, phrases, source_mask, allowed, certain,
        )  # fmt: skip
        return sources, SentenceConstraints(*arrays)


class _ConstraintWidths(NamedTuple):
    prefix: int
    num_phrases: int
    phrase: int
    has_allowed: bool
    has_certain: bool

    @classmethod
    def of(cls, requests: Sequence[Request], minimum: int, minimum_phrases: int) -> Self:
        """Returns powers of two, or 0; `minimum` is for prefixes, the other for phrases."""
        phrases = [request.phrases for request in requests]
        return cls(
            _power_of_two(max([minimum, *(len(request.prefix) for request in requests)])),
            _power_of_two(max([minimum_phrases, *map(len, phrases)])),
            _power_of_two(max([minimum_phrases, *map(len, itertools.chain(*phrases))])),
            any(request.allowed is not None for request in requests),
            any(request.certain for request in requests),
        )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0


class _Batch:
    """B rows, with or without a sentence, that are searched together."""

    def __init__(
        self,
        batcher: ContinuousBatcher,
        device: Any,
        length: int,
        widths: _ConstraintWidths,
        share: int,
    ) -> None:
        """Creates a batch without sentences, for about `share` sentences of S = `length` tokens."""
        self._batcher = batcher
        self._params = batcher._params[device]
        self._length = length
        self._widths = widths
        sizes = batcher._batch_sizes(length)
        first, *smaller = [size for size in sizes if size <= share] or sizes[-1:]
        self._sizes = [first, *(size for size in smaller if size >= MIN_FINAL_BATCH_ROWS)]
        """B, followed by the sizes to which it may shrink, descending."""
        self._num_admitted = max(1, self._sizes[0] // 8)  # R, rows admitted together.
        self._target_length = batcher._target_length(1)
        self._request_of_row: list[int | None] = [None] * self._sizes[0]
        """Index of the request that each row is searched for."""
        self._longest = 0
        """Number of tokens of the longest unfinished hypothesis."""
        shape = batcher._state_shape(length, widths)
        self._state = programs.empty_search(shape, self._sizes[0], device)

    @property
    def is_busy(self) -> bool:
        """Whether any row has a sentence."""
        return any(index is not None for index in self._request_of_row)

    def admit(self, requests: Sequence[Request], waiting: collections.deque[int]) -> None:
        """Assigns waiting sentences to free rows, as long as there are enough of both."""
        batcher = self._batcher
        while True:
            free = [row for row, index in enumerate(self._request_of_row) if index is None]
            if len(free) < self._num_admitted:
                return
            new: list[int] = []
            while len(new) < self._num_admitted and waiting:
                try:
                    new.append(waiting.popleft())
                except IndexError:  # Another worker took the last one.
                    break
            if not new:
                return
            slots = np.full(self._num_admitted, len(self._request_of_row), np.int32)
            slots[: len(new)] = free[: len(new)]
            for row, index in zip(free, new, strict=False):
                self._request_of_row[row] = index
            rows = [requests[index] for index in new]
            self._state = programs.admit_rows(
                self._params,
                *batcher._arrays(
                    self._length, self._widths, [*rows, *[None] * (self._num_admitted - len(new))]
                ),
                batcher._options,
                self._state,
                slots,
                configs=batcher._configs,
                max_length=self._target_length,
            )

    def run(self, keep_full: bool) -> list[tuple[int, TokenHypotheses]]:
        """Continues the search until some rows are finished, and returns their hypotheses.

        With `keep_full`, it stops as soon as new sentences can be admitted; otherwise when a
        smaller batch would suffice.
        """
        batcher = self._batcher
        target_length = batcher._target_length(self._longest + 1)
        if target_length != self._target_length:
            self._state = programs.resize_search(self._state, max_length=target_length)
            self._target_length = target_length
        max_active = len(self._request_of_row) - self._num_admitted
        if not keep_full:
            self._shrink()
            max_active = self._sizes[1] if len(self._sizes) > 1 else 0
        self._state, running, positions, found = programs.run_search(
            self._params,
            self._state,
            batcher._options,
            max_active,
            configs=batcher._configs,
            ensemble=batcher._decode.ensemble,
        )
        running, positions, found = jax.device_get((running, positions, found))
        self._longest = int(np.max(positions, where=running, initial=0))
        finished = []
        for row, index in enumerate(self._request_of_row):
            if index is not None and not running[row]:
                finished.append((index, _hypotheses_of_row(found, row)))
                self._request_of_row[row] = None
        return finished

    def _shrink(self) -> None:
        """Removes rows without a sentence, if the others fit into a smaller batch."""
        needed = [row for row, index in enumerate(self._request_of_row) if index is not None]
        while len(self._sizes) > 1 and len(needed) <= self._sizes[1]:
            self._sizes.pop(0)
        size = self._sizes[0]
        if size == len(self._request_of_row):
            return
        free = [row for row, index in enumerate(self._request_of_row) if index is None]
        kept = [*needed, *free][:size]
        self._state = programs.select_rows(self._state, np.array(kept, np.int32))
        self._request_of_row = [self._request_of_row[row] for row in kept]


def _hypotheses_of_row(result: SearchResult, row: int) -> TokenHypotheses:
    lengths = result.lengths[row]
    return TokenHypotheses(
        [
            tuple(tokens[:length].tolist())
            for tokens, length in zip(result.tokens[row], lengths, strict=True)
            if length
        ],
        result.scores[row][lengths > 0].tolist(),
        result.log_probabilities[row][lengths > 0].tolist(),
    )
