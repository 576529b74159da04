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
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching import search_programs as programs
from flaxformer_mt.decoding.batching import workers
from flaxformer_mt.decoding.batching.length_buckets import longest_position, padded, row_length
from flaxformer_mt.decoding.parameters import DecodingMesh, on_devices
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
    """As all that follows, see `SentenceConstraints`."""
    max_length: int
    prefix: Sequence[int] = ()
    certain: int = 0
    phrases: Sequence[Sequence[int]] = ()
    seed: int = 0
    """Of sampling, 32 bits."""
    allowed: np.ndarray | None = None
    """The ids of the tokens that may be chosen; None = all."""


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
        """Creates a batcher for models of the same vocabularies; see `SearchOptions.from_config`.

        Raises:
          UserError: there are fewer devices than `decode.num_devices`.
        """
        models = on_devices(models, decode)
        self._configs = tuple(config for config, _ in models)
        on_first = tuple(params for _, params in models)
        # Options are checked without parameters.
        leaves = jax.tree.leaves(on_first) or [jnp.zeros(())]
        (first, *_) = leaves[0].devices()
        self._mesh = DecodingMesh.of(models)
        self._row_shards = self._mesh.row_shards if self._mesh else 1
        self._devices = workers.decoding_devices(decode, first) if not self._mesh else [first]
        self._params = {
            device: on_first if device == first else jax.device_put(on_first, device)
            for device in self._devices
        }
        self._batch_tokens = workers.batch_tokens(decode, first.platform) * self._row_shards
        self._model = self._configs[0]
        self._decode = decode
        self._options = SearchOptions.from_config(decode, self._model, bad_phrases, scores)
        self._limit = longest_position(self._configs)

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[int, TokenHypotheses]]:
        """Yields the index of each request and its hypotheses, as they finish."""
        indices_of: dict[tuple[int, bool], list[int]] = {}
        for index in sorted(range(len(requests)), key=lambda index: -len(requests[index].source)):
            request = requests[index]
            length = row_length(len(request.source), self._limit)
            # Prefixes and phrases need another program of a search, which may round differently.
            constrained = len(request.prefix) + len(request.phrases) > 0
            indices_of.setdefault((length, constrained), []).append(index)
        groups = [
            _Group.of(requests, indices, length, constrained, self._options)
            for (length, constrained), indices in indices_of.items()
        ]
        num_batches = sum(
            -(-len(group.requests) // self._batch_sizes(group.length)[-1]) for group in groups
        )
        devices = self._devices
        num_workers = min(workers.max_workers(devices[0].platform) * len(devices), num_batches)
        if self._mesh:  # Programs of two threads might wait for each other on different devices.
            num_workers = min(1, num_batches)
        with self._on_mesh():
            for group in groups:
                self._state_shape(group)  # Now, so that workers do not all trace it at once.

        def work(put: Callable[[tuple[int, TokenHypotheses]], None], number: int) -> None:
            device = devices[number % len(devices)]
            with self._on_mesh():
                for group in groups:
                    if not group.waiting:
                        continue
                    batch = _Batch(self, device, group, -(-len(group.requests) // num_workers))
                    while batch.is_busy or group.waiting:
                        batch.admit()
                        for item in batch.run():
                            put(item)

        yield from workers.gather(work, num_workers)

    def _on_mesh(self) -> contextlib.AbstractContextManager[None]:
        return self._mesh.used() if self._mesh else contextlib.nullcontext()

    def _batch_sizes(self, length: int) -> list[int]:
        """Returns the possible values of B, descending."""
        tokens = self._batch_tokens * REFERENCE_BEAM_SIZE
        rows = max(1, tokens // (length * self._options.beam_size))
        sizes = [-(-rows // self._row_shards) * self._row_shards]
        # The sentences that remain at the end of a file mostly fit into half a batch, and few need
        # less: a program for each power of two would gain nothing more.
        smaller = sizes[0] // 2
        while smaller >= MIN_BATCH_ROWS:
            sizes.append(smaller)
            smaller //= 4
        return sizes

    def _state_shape(self, group: "_Group") -> SearchState:
        """Returns the shapes of a one-row search, for the smallest P."""
        return programs.shapes_of_search.eval_shape(
            self._params[self._devices[0]],
            *group.rows([], 1, self._model.target_vocab_size),
            self._options,
            configs=self._configs,
            max_length=self._target_length(1),
        )

    def _target_length(self, length: int) -> int:
        return row_length(length, self._limit, MIN_TARGET_LENGTH)


class _Group(NamedTuple):
    """Requests that are searched for by the same programs."""

    length: int
    """S, the tokens of a row."""
    requests: list[Request]
    indices: list[int]
    """Of each among all requests."""
    waiting: collections.deque[int]
    """The numbers of those whose search is not begun."""
    sources: np.ndarray
    """Tokens of each request, then one row without a sentence."""
    constraints: SentenceConstraints
    """Of the same rows; `allowed`, which is large, is added to the rows that are searched."""

    @classmethod
    def of(
        cls,
        all_requests: Sequence[Request],
        indices: list[int],
        length: int,
        constrained: bool,
        options: SearchOptions,
    ) -> Self:
        """Groups the requests `indices`; the widths of their constraints are powers of two."""
        requests = [all_requests[index] for index in indices]
        rows = [*requests, Request([], min_length=0, max_length=0)]
        prefixes = [request.prefix for request in rows]
        phrases = [request.phrases for request in rows]
        certain = [request.certain for request in rows]
        prefix_width = _width(prefixes, int(constrained))
        least = int(constrained and not options.sampling)
        phrases_shape = _width(phrases, least), _width(itertools.chain(*phrases), least)
        sources = padded([request.source for request in rows], (len(rows), length), options.pad_id)
        arrays: dict[str, Any] = {
            "max_lengths": np.array([request.max_length for request in rows], np.int32),
            "min_lengths": np.array([request.min_length for request in rows], np.int32),
            "prefix": padded(prefixes, (len(rows), prefix_width), fill=-1),
            "keys": np.array([(0, request.seed) for request in rows], np.uint32),
            "phrases": np.stack([padded(each, phrases_shape, fill=-1) for each in phrases]),
            "source_mask": sources != options.pad_id,
            "certain": np.array(certain, np.int32) if any(certain) else None,
        }
        constraints = SentenceConstraints(**arrays)
        waiting = collections.deque(range(len(requests)))
        return cls(length, requests, indices, waiting, sources, constraints)

    def rows(
        self, numbers: Sequence[int], count: int, vocab_size: int
    ) -> tuple[np.ndarray, SentenceConstraints]:
        """Returns the rows of some requests, followed by rows without a sentence."""
        chosen = np.full(count, len(self.requests))
        chosen[: len(numbers)] = numbers
        constraints = jax.tree.map(lambda leaf: leaf[chosen], self.constraints)
        if any(request.allowed is not None for request in self.requests):
            allowed = np.zeros((count, vocab_size), bool)
            for row, number in zip(allowed, numbers, strict=False):
                own = self.requests[number].allowed
                row[slice(None) if own is None else own] = True
            constraints = constraints._replace(allowed=allowed)
        return self.sources[chosen], constraints


def _width(sequences: Iterable[Sequence[Any]], least: int) -> int:
    """Returns the power of two that holds the longest of the sequences, or 0."""
    longest = max([least, *map(len, sequences)])
    return 1 << (longest - 1).bit_length() if longest else 0


class _Batch:
    """B rows, with or without a sentence, that are searched together."""

    def __init__(self, batcher: ContinuousBatcher, device: Any, group: _Group, share: int) -> None:
        """Creates a batch without sentences, for about `share` sentences of a group."""
        self._batcher = batcher
        self._params = batcher._params[device]
        self._group = group
        sizes = batcher._batch_sizes(group.length)
        first, *smaller = [size for size in sizes if size <= share] or sizes[-1:]
        self._sizes = [first, *(size for size in smaller if size >= MIN_FINAL_BATCH_ROWS)]
        """B, followed by the sizes to which it may shrink, descending."""
        self._num_admitted = max(1, first // 8)  # R, rows admitted together.
        self._target_length = batcher._target_length(1)
        self._request_of_row: list[int | None] = [None] * first
        """Number of the request that each row is searched for."""
        self._longest = 0
        """Number of tokens of the longest unfinished hypothesis."""
        place = batcher._mesh.mesh if batcher._mesh else device
        self._state = programs.empty_search(batcher._state_shape(group), first, place)

    @property
    def is_busy(self) -> bool:
        """Whether any row has a sentence."""
        return any(number is not None for number in self._request_of_row)

    def _free_rows(self) -> list[int]:
        return [row for row, number in enumerate(self._request_of_row) if number is None]

    def admit(self) -> None:
        """Assigns waiting sentences to free rows, as long as there are enough of both."""
        batcher, group, count = self._batcher, self._group, self._num_admitted
        while len(free := self._free_rows()) >= count:
            new: list[int] = []
            with contextlib.suppress(IndexError):  # Another worker may take the last one.
                while len(new) < count:
                    new.append(group.waiting.popleft())
            if not new:
                return
            slots = np.full(count, len(self._request_of_row), np.int32)
            slots[: len(new)] = free[: len(new)]
            for row, number in zip(free, new, strict=False):
                self._request_of_row[row] = number
            self._state = programs.admit_rows(
                self._params,
                *group.rows(new, count, batcher._model.target_vocab_size),
                batcher._options,
                self._state,
                slots,
                configs=batcher._configs,
                max_length=self._target_length,
            )

    def run(self) -> list[tuple[int, TokenHypotheses]]:
        """Continues the search until some rows are finished, and returns their hypotheses.

        While sentences are waiting, it stops as soon as new ones can be admitted; then when a
        smaller batch would suffice.
        """
        batcher = self._batcher
        target_length = batcher._target_length(self._longest + 1)
        if target_length != self._target_length:
            self._state = programs.resize_search(self._state, max_length=target_length)
            self._target_length = target_length
        max_active = len(self._request_of_row) - self._num_admitted
        if not self._group.waiting:
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
        for row, number in enumerate(self._request_of_row):
            if number is not None and not running[row]:
                finished.append((self._group.indices[number], _hypotheses_of_row(found, row)))
                self._request_of_row[row] = None
        return finished

    def _shrink(self) -> None:
        """Removes rows without a sentence, if the others fit into a smaller batch."""
        free = self._free_rows()
        needed = [row for row in range(len(self._request_of_row)) if row not in free]
        while len(self._sizes) > 1 and len(needed) <= self._sizes[1]:
            self._sizes.pop(0)
        if self._sizes[0] < len(self._request_of_row):
            kept = [*needed, *free][: self._sizes[0]]
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
