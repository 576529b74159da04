"""The infinite stream of training batches, a function of the configuration and the data.

The pairs of an epoch, in random order, are divided among up to 256 virtual streams, and each of
these into blocks (`mixture`). A block is planned on demand as a function of (seed, epoch, stream,
number): its sources are tokenized again with `data.subword_sampling`, its pairs are assigned to
rows, and the rows are shuffled. Each row of a batch is read from one of the streams, sequentially,
across the boundaries of blocks and epochs, so that all batches have the same size. Tokens are read
from the store when a batch is made.

Therefore a checkpoint only needs the position in each stream, corpora of any size start without
delay, and a process only plans the streams of its own rows. Which rows are read from which stream
depends neither on devices nor on processes.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.batches import (
    WHOLE_BATCH,
    Batch,
    BatchShape,
    DataPosition,
    Shard,
    packed_batch,
    packed_shape,
)
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.mixture import Mixture, generator, select_pairs
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs, plan_rows
from flaxformer_mt.data.stream.placement import own_shard, place_batch
from flaxformer_mt.data.stream.prefetch import Prefetched
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer
from flaxformer_mt.errors import UserError

GOOD_FILL = 0.955
"""Fraction of used positions at which a row length that is efficient on accelerators is chosen."""

_SAMPLE_PAIRS, _SAMPLE_BLOCKS = 32_768, 32
# Keys of random number generators; the mixture uses 0 and 1.
_BLOCK_KEY, _SAMPLE_KEY = 2, 3


class Fill(NamedTuple):
    """Fractions of the positions in training rows that hold a token."""

    source: float
    """0 for a language model."""
    target: float


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive pairs of a virtual stream, in the order of the rows that they are packed into."""

    pairs: np.ndarray
    """Their indices, int64 [pairs]."""
    ends: Sequence[int]
    """Row i has the pairs from `ends[i]` to `ends[i + 1]`."""
    shapes: Sequence[BatchShape]
    """The shape of the batch of each row."""
    tokens: Sequence[int]
    """Numbers of source and target tokens."""
    sources: Sentences | None
    """The sources, with subword sampling."""


class TrainingStream:
    """The infinite stream of training batches, with random access by position.

    Attributes:
      corpora: the corpora, with reports that include pairs longer than a row.
      shapes: all batch shapes that occur.
      pairs: number of pairs in an epoch.
      start: the position of the first batch.
      config: the experiment, with the row length of sources that was chosen if it was 0.

    Args:
      corpora: the training corpora.
      config: the experiment.
      sampler: the vocabulary of the sources, for `data.subword_sampling`.
    """

    start = DataPosition()

    def __init__(
        self,
        corpora: Sequence[EncodedCorpus],
        config: ExperimentConfig,
        sampler: Tokenizer | None = None,
    ) -> None:
        if not config.data.source_row_length:
            length = choose_source_row_length(corpora, config, sampler)
            data = dataclasses.replace(config.data, source_row_length=length)
            config = dataclasses.replace(config, data=data)
        self.config = config
        selected = [select_pairs(corpus, config.data) for corpus in corpora]
        self.corpora = tuple(corpus for corpus, _ in selected)
        kept = [pairs for _, pairs in selected]
        self.shapes = _shapes(self.corpora, kept, config)
        _, *row_lengths = self.shapes[-1]
        self._reader = _PairReader(corpora, kept, row_lengths, config, sampler)
        self._mixture = self._reader.mixture
        self.pairs = self._mixture.size(0)
        # Blocks are planned ahead in a thread. Of each stream, two are kept.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "blocks")
        self._future = functools.lru_cache(2 * self._mixture.streams)(self._start_block)
        self._current: dict[int, tuple[tuple[int, int], Block]] = {}

    def batches(self, mesh: Mesh, position: DataPosition | None = None) -> Prefetched[Batch]:
        """Returns an iterator of batches on the devices, read ahead in a thread.

            for batch, position in data.batches(mesh, position):
                state, sums = step(state, batch)
                if position.step == 20_000:
                    break

        Args:
          mesh: the devices; each process reads and places its own rows.
          position: where to begin, from an earlier iteration; by default `start`.

        Returns:
          An iterator of a batch and the position after it, whose `step` is the number of batches so
          far. As a context manager, it stops its thread at the end.
        """
        place = functools.partial(place_batch, mesh=mesh)
        return self.prefetched(own_shard(mesh), place, position or self.start)

    def prefetched(
        self, shard: Shard, place: Callable[[Batch], Batch], position: DataPosition
    ) -> Prefetched[Batch]:
        """Reads ahead as `batches`, which `place` transfers to the devices."""

        def read(position: DataPosition) -> tuple[Batch, DataPosition]:
            batch, after = self.read(position, shard)
            return place(batch), after

        return Prefetched(read, position)

    def read(
        self, position: DataPosition, shard: Shard = WHOLE_BATCH
    ) -> tuple[Batch, DataPosition]:
        """Returns the part `shard` of the batch at a position, and the position after it."""
        places = self._places(position)
        shape = self.shapes[0]
        if len(self.shapes) > 1:
            ((epoch, number, row),) = places
            shape = self._block(epoch, 0, number).shapes[row]
        own = shard.part(shape.rows)
        streams = self._mixture.streams_of_rows(shape.rows, position.step)
        rows = []
        for row in np.flatnonzero(np.isin(streams, streams[own])).tolist():
            stream = int(streams[row])
            epoch, number, first = places[stream]
            block = self._block(epoch, stream, number)
            if own.start <= row < own.stop:
                rows.append((block, first))
            if first + 1 < len(block.shapes):
                places[stream] = epoch, number, first + 1
            else:
                places[stream] = *self._after(epoch, number), 0
        batch = self._make_batch(rows, shape)
        if len(places) == 1:
            return batch, DataPosition(*places[0], position.step + 1)
        furthest, _, _ = max(places)
        return batch, DataPosition(furthest, step=position.step + 1, streams=tuple(places))

    @property
    def fill(self) -> Fill:
        """Fractions of used positions in the rows of the first blocks."""
        blocks = self._first_blocks()
        sources, targets = np.sum([block.tokens for block in blocks], axis=0).tolist()
        shapes = [shape for block in blocks for shape in block.shapes]
        return Fill(
            sources / sum(shape.source_length for shape in shapes),
            targets / sum(shape.target_length for shape in shapes),
        )

    @property
    def batches_per_epoch(self) -> float:
        """Number of batches per epoch, extrapolated from the first blocks."""
        blocks = self._first_blocks()
        batches = sum(1 / shape.rows for block in blocks for shape in block.shapes)
        return batches * self.pairs / sum(len(block.pairs) for block in blocks)

    def _first_blocks(self) -> list[Block]:
        streams = range(min(self._mixture.streams, _SAMPLE_BLOCKS))
        return [self._block(0, stream, 0) for stream in streams]

    def _places(self, position: DataPosition) -> list[tuple[int, int, int]]:
        """Returns epoch, block and row of each stream."""
        streams = self._mixture.streams
        places = [*position.streams] or [(position.epoch, position.block, position.row)] * streams
        is_whole = position.streams or streams == 1
        if len(places) != streams or not (is_whole or position.block == position.row == 0):
            raise UserError(
                "the position is one in other data, or of an earlier version, whose order is "
                f"data.order=1: set that, or begin with DataPosition(epoch={position.epoch + 1})"
            )
        return places

    def _make_batch(self, rows: Sequence[tuple[Block, int]], shape: BatchShape) -> Batch:
        """Reads the tokens of rows, given by their blocks and their numbers there."""
        bounds = [(block, block.ends[row], block.ends[row + 1]) for block, row in rows]
        counts = np.array([last - first for _, first, last in bounds])
        pairs = self._reader.read(
            np.concatenate([block.pairs[first:last] for block, first, last in bounds])
        )
        if rows[0][0].sources is not None:
            parts = [
                block.sources.span(first, last)
                for block, first, last in bounds
                if block.sources is not None
            ]
            pairs = dataclasses.replace(pairs, sources=Sentences.join(parts))
        return packed_batch(pairs, counts, shape, self.config.model)

    def _block(self, epoch: int, stream: int, number: int) -> Block:
        """Returns a block, and starts planning the next one."""
        place, block = self._current.get(stream, (None, None))
        if block is None or place != (epoch, number):
            future = self._future(epoch, stream, number)
            following, after = self._after(epoch, number)
            self._future(following, stream, after)
            block = future.result()
            self._current[stream] = (epoch, number), block
        return block

    def _start_block(
        self, epoch: int, stream: int, number: int
    ) -> concurrent.futures.Future[Block]:
        return self._thread.submit(self._make_block, epoch, stream, number)

    def _make_block(self, epoch: int, stream: int, number: int) -> Block:
        key = (epoch, number, stream) if self._mixture.streams > 1 else (epoch, number)
        random = generator(self.config.train.seed, _BLOCK_KEY, *key)
        # Ascending, for sequential access to stores on disk.
        draws = np.sort(self._mixture.draws(epoch, stream, number))
        lengths, sources = self._reader.plan(draws, random)
        plan = _pack_rows if self.config.data.batching == "packed" else _sort_into_buckets
        rows, shapes = plan(lengths, self.shapes, random)
        return Block(
            draws[rows.tokens],
            rows.offsets.tolist(),
            shapes,
            lengths.sum(axis=1).tolist(),
            None if sources is None else sources.take(rows.tokens),
        )

    def _after(self, epoch: int, number: int) -> tuple[int, int]:
        return (epoch, number + 1) if number + 1 < self._mixture.blocks(epoch) else (epoch + 1, 0)


class _PairReader:
    """Reads the kept pairs of several corpora, truncated to the lengths of a row.

    Pairs are given as int64 [pairs] indices into those that are kept of all corpora, in a row;
    `kept` has the indices of these in each corpus, or None for all.

    Attributes:
      mixture: the order of these pairs.
    """

    def __init__(
        self,
        corpora: Sequence[EncodedCorpus],
        kept: Sequence[np.ndarray | None],
        row_lengths: Sequence[int],
        config: ExperimentConfig,
        sampler: Tokenizer | None,
    ) -> None:
        self._corpora = corpora
        self._kept = kept
        self._row_lengths = row_lengths
        self._config = config
        self._sampler = sampler
        sizes = [
            len(corpus.targets) if pairs is None else len(pairs)
            for corpus, pairs in zip(corpora, kept, strict=True)
        ]
        self._ends = np.cumsum(sizes)
        is_sampled = config.data.subword_sampling > 0
        self._stored = [
            TokenPairs(None if is_sampled else corpus.sources, corpus.targets, corpus.links)
            for corpus in corpora
        ]
        weights = [corpus.weight for corpus in corpora]
        self.mixture = Mixture(sizes, weights, config.data, config.train.seed)

    def read(self, draws: np.ndarray) -> TokenPairs:
        """Reads the tokens of pairs, without the sources if these are sampled."""
        pairs = self._take(self._stored, draws)
        if self._config.data.long_sentences != "truncate":
            return pairs
        (source_length, target_length), eos_id = self._row_lengths, self._config.model.eos_id
        return TokenPairs(
            None if pairs.sources is None else pairs.sources.truncate(source_length, eos_id),
            pairs.targets.truncate(target_length, eos_id),
            pairs.links,
        )

    def plan(
        self, draws: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, Sentences | None]:
        """Returns the source and target lengths of pairs in ascending order, int64 [2, pairs].

        With subword sampling also the sources, which are drawn with `random`.
        """
        lengths = np.zeros((2, len(draws)), np.int64)
        for where, number, indices in self._located(draws):
            corpus = self._corpora[number]
            for row, side in zip(lengths, (corpus.sources, corpus.targets), strict=True):
                if side is not None:
                    row[where] = side.offsets[indices + 1] - side.offsets[indices]
        lengths = np.minimum(lengths, np.array(self._row_lengths)[:, np.newaxis])
        if self._config.data.subword_sampling and self._config.model.has_inputs:
            sources = self._resample(self._take(self._corpora, draws), random)
            return np.stack([sources.lengths, lengths[1]]), sources
        return lengths, None

    def _located(self, draws: np.ndarray) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """Yields for each corpus which of the pairs it has, its number, and its own indices."""
        corpora = np.searchsorted(self._ends, draws, side="right")
        for number, (kept, first) in enumerate(zip(self._kept, [0, *self._ends], strict=False)):
            where = np.flatnonzero(corpora == number)
            indices = draws[where] - first
            yield where, number, indices if kept is None else kept[indices]

    def _take(self, corpora: Sequence[TokenPairs], draws: np.ndarray) -> TokenPairs:
        located = list(self._located(draws))
        parts = [corpora[number].take(indices) for _, number, indices in located]
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([where for where, _, _ in located]))
        return TokenPairs.join(parts).take(order)

    def _resample(self, pairs: TokenPairs, random: np.random.Generator) -> Sentences:
        """Tokenizes sources with subword sampling, except where the result exceeds a row."""
        texts, length = pairs.texts, self._row_lengths[0]
        if self._sampler is None or texts is None or pairs.sources is None:
            raise ValueError("data.subword_sampling needs a vocabulary to sample from")
        decoded = [texts[index].tobytes().decode() for index in range(len(texts))]
        amount = self._config.data.subword_sampling
        seed = int(random.integers(2**32))
        drawn = Sentences.of_lengths(*self._sampler.sample_sources(decoded, seed, amount))
        sources = pairs.sources.truncate(length, self._config.model.eos_id)
        indices = np.arange(len(texts)) + len(texts) * (drawn.lengths > length)
        return Sentences.join([drawn, sources]).take(indices)


def _shapes(
    corpora: Sequence[EncodedCorpus], kept: Sequence[np.ndarray | None], config: ExperimentConfig
) -> tuple[BatchShape, ...]:
    """Returns the shapes of training batches: one if packed, otherwise one per nonempty bucket.

    The number of rows of each bucket is a multiple of that of the longest, so that all of them are
    divisible by the numbers of devices and accumulation steps.
    """
    if config.data.batching == "packed":
        return (packed_shape(config),)
    lengths = np.array(config.data.bucket_lengths)
    used = set()
    for corpus, pairs in zip(corpora, kept, strict=True):
        longest = np.maximum(*corpus.lengths)[slice(None) if pairs is None else pairs]
        longest = np.minimum(longest, lengths[-1])
        used.update(lengths[np.unique(np.searchsorted(lengths, longest))].tolist())
    return tuple(
        BatchShape(config.rows_per_batch * (int(lengths[-1]) // length), length, length)
        for length in sorted(used)
    )


def _pack_rows(
    lengths: np.ndarray,
    shapes: tuple[BatchShape, ...],
    random: np.random.Generator,
) -> tuple[Sentences, list[BatchShape]]:
    """Plans rows for pairs of source and target lengths, int [2, pairs].

    Returns:
      The indices of the pairs in each row, and the shape of the batch of each row.
    """
    (shape,) = shapes
    order = random.permutation(lengths.shape[1])
    row_lengths = shape.source_length, shape.target_length
    pairs, counts = plan_rows(lengths[0], lengths[1], *row_lengths, order)
    rows = Sentences.of_lengths(pairs, counts).take(random.permutation(len(counts)))
    return rows, [shape] * len(rows)


def _sort_into_buckets(
    lengths: np.ndarray,
    shapes: tuple[BatchShape, ...],
    random: np.random.Generator,
) -> tuple[Sentences, list[BatchShape]]:
    """Assigns each pair a row of its bucket, and shuffles the batches; returns as `_pack_rows`.

    The rows of a batch are contiguous. The last batch of each shape is padded with empty rows, so
    that no batch extends into the next block.
    """
    buckets = np.searchsorted([shape.target_length for shape in shapes], lengths.max(axis=0))
    batches = []
    for bucket, shape in enumerate(shapes):
        pairs = random.permutation(np.flatnonzero(buckets == bucket))
        batches += [
            (shape, pairs[first : first + shape.rows]) for first in range(0, len(pairs), shape.rows)
        ]
    batches = [batches[i] for i in random.permutation(len(batches))]
    counts = [np.arange(shape.rows) < len(pairs) for shape, pairs in batches]
    rows = Sentences.of_lengths(
        np.concatenate([pairs for _, pairs in batches]), np.concatenate(counts)
    )
    return rows, [shape for shape, _ in batches for _ in range(shape.rows)]


def choose_source_row_length(
    corpora: Sequence[EncodedCorpus], config: ExperimentConfig, sampler: Tokenizer | None = None
) -> int:
    """Chooses S so that source and target rows are filled equally; for `data.source_row_length=0`.

    Multiples of 8, or else of 4, are efficient on accelerators, and are preferred if they can be
    filled well. At most one source in a thousand is longer than a row. The choice is based on a
    fixed sample of the pairs, without those whose targets are too long to be trained on.
    """
    target_row_length = config.data.row_lengths[1]
    if config.data.batching == "buckets":
        return target_row_length
    pairs: Sequence[np.ndarray | None] = [None] * len(corpora)
    if config.data.long_sentences != "truncate":
        fitting = [np.flatnonzero(corpus.lengths[1] <= target_row_length) for corpus in corpora]
        if all(map(len, fitting)):  # Otherwise `select_pairs` raises an error.
            pairs = fitting
    longest = max(int(corpus.lengths[0].max()) for corpus in corpora)
    reader = _PairReader(corpora, pairs, (longest, target_row_length), config, sampler)
    random = generator(config.train.seed, _SAMPLE_KEY)
    draws = reader.mixture.sample(_SAMPLE_PAIRS)
    lengths, _ = reader.plan(np.sort(draws), random)
    if not config.model.has_inputs:
        return target_row_length
    source_lengths, target_lengths = lengths[:, random.permutation(len(draws))]

    def fill(source_row_length: int) -> float:
        """Returns the fraction of used positions on the side where it is lower."""
        fits = source_lengths <= source_row_length
        fitting = source_lengths[fits], target_lengths[fits]
        rows = len(plan_rows(*fitting, source_row_length, target_row_length)[1])
        return min(
            fitting[0].sum() / (rows * source_row_length),
            fitting[1].sum() / (rows * target_row_length),
        )

    least = max(2, int(np.quantile(source_lengths, 0.999, method="inverted_cdf")))
    even = target_row_length * source_lengths.sum() / target_lengths.sum()
    fills: dict[int, float] = {}
    for multiple in (8, 4, 1):
        below = int(max(least, even)) // multiple * multiple
        for length in (below, below + multiple):
            if length >= least:
                fills[length] = fill(length)
        if max(fills.values()) >= GOOD_FILL:
            break
    return max(fills, key=fills.__getitem__)
