"""The infinite stream of training batches, a function of the configuration and the data.

The pairs of an epoch, in random order (`mixture`), are divided into blocks of about 65,000. A block
is built on demand as a function of (seed, epoch, block): its sources are tokenized again with
`data.subword_sampling`, its pairs are packed into rows, and the rows are shuffled. Therefore a
checkpoint only needs the position in the stream, and corpora of any size start without delay.
Batches take rows sequentially, across the boundaries of blocks and epochs, so that all batches have
the same size.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
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
    make_batch,
    packed_shape,
)
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.mixture import Mixture, generator, select_pairs
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs, plan_rows
from flaxformer_mt.data.stream.placement import own_shard, place_batch
from flaxformer_mt.data.stream.prefetch import Prefetched
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer

BLOCK_PAIRS = 65_536
"""Approximate number of pairs in a block. Larger blocks fill rows slightly better, but take longer
to build."""

GOOD_FILL = 0.955
"""Fraction of used positions at which a row length that is efficient on accelerators is chosen."""

_SAMPLE_PAIRS = 32_768
# Keys of random number generators; the mixture uses 0 and 1.
_BLOCK_KEY, _SAMPLE_KEY = 2, 3


class PlannedRow(NamedTuple):
    """A row of a future batch."""

    shape: BatchShape
    pairs: list[int]
    """Indices of the pairs in the row, within their block."""


class Fill(NamedTuple):
    """Fractions of the positions in training rows that hold a token."""

    source: float
    """0 for a language model."""
    target: float


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive pairs of an epoch, and the rows into which they are packed."""

    pairs: TokenPairs
    rows: list[PlannedRow]

    def followed_by(self, other: "Block") -> "Block":
        """Concatenates two blocks."""
        own = len(self.pairs.targets)
        moved = [PlannedRow(row.shape, [own + i for i in row.pairs]) for row in other.rows]
        return Block(TokenPairs.join([self.pairs, other.pairs]), self.rows + moved)

    @property
    def fill(self) -> Fill:
        """Fractions of used positions in the rows of this block."""
        sources, targets = self.pairs.lengths
        return Fill(
            int(sources.sum()) / sum(row.shape.source_length for row in self.rows),
            int(targets.sum()) / sum(row.shape.target_length for row in self.rows),
        )


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
        self._mixture = _mixture(corpora, kept, config)
        self.pairs = self._mixture.size(0)
        # Blocks are built ahead in a thread. The current one and the next are kept.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "blocks")
        self._future = functools.lru_cache(maxsize=2)(self._start_block)

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
        epoch, number, first, step = position
        block = self._block(epoch, number)
        shape = block.rows[first].shape
        last = first + shape.rows
        rows_before = 0
        while last > len(block.rows):
            rows_before = len(block.rows)
            epoch, number = self._after(epoch, number)
            block = block.followed_by(self._block(epoch, number))
        rows = [row.pairs for row in block.rows[first:last]]
        batch = make_batch(block.pairs, rows, shape, self.config.model, shard)
        if last == len(block.rows):
            return batch, DataPosition(*self._after(epoch, number), row=0, step=step + 1)
        return batch, DataPosition(epoch, number, last - rows_before, step + 1)

    @property
    def fill(self) -> Fill:
        """Fractions of used positions in the rows of the first block."""
        return self._block(0, 0).fill

    @property
    def batches_per_epoch(self) -> float:
        """Number of batches per epoch, extrapolated from the first block."""
        block = self._block(0, 0)
        batches = sum(1 / row.shape.rows for row in block.rows)
        return batches * self.pairs / len(block.pairs.targets)

    def _block(self, epoch: int, number: int) -> Block:
        """Returns a block, and starts building the next one."""
        future = self._future(epoch, number)
        self._future(*self._after(epoch, number))
        return future.result()

    def _start_block(self, epoch: int, number: int) -> concurrent.futures.Future[Block]:
        return self._thread.submit(self._make_block, epoch, number)

    def _make_block(self, epoch: int, number: int) -> Block:
        random = generator(self.config.train.seed, _BLOCK_KEY, epoch, number)
        draws, blocks = self._mixture.epoch(epoch), self._blocks(epoch)
        first, last = (len(draws) * boundary // blocks for boundary in (number, number + 1))
        pairs = self._reader.read(draws[first:last], random)
        plan = _pack_rows if self.config.data.batching == "packed" else _sort_into_buckets
        return Block(pairs, plan(*pairs.lengths, self.shapes, random))

    def _after(self, epoch: int, number: int) -> tuple[int, int]:
        return (epoch, number + 1) if number + 1 < self._blocks(epoch) else (epoch + 1, 0)

    def _blocks(self, epoch: int) -> int:
        return max(1, round(self._mixture.size(epoch) / BLOCK_PAIRS))


@dataclasses.dataclass(frozen=True)
class _PairReader:
    """Reads the tokens of kept pairs (int64 indices per corpus), truncated to the row lengths."""

    corpora: Sequence[EncodedCorpus]
    kept: Sequence[np.ndarray]
    row_lengths: Sequence[int]
    config: ExperimentConfig
    sampler: Tokenizer | None

    def read(self, draws: np.ndarray, random: np.random.Generator) -> TokenPairs:
        """Reads pairs, given by int64 [pairs] indices into the kept pairs of all corpora.

        They are read in ascending order, for sequential access to stores on disk. `random` is for
        subword sampling.
        """
        ends = np.cumsum([len(kept) for kept in self.kept])
        draws = np.sort(draws)
        parts = np.split(draws, np.searchsorted(draws, ends[:-1]))
        pairs = TokenPairs.join(
            [
                corpus.take(kept[part - (end - len(kept))])
                for corpus, kept, end, part in zip(
                    self.corpora, self.kept, ends, parts, strict=True
                )
            ]
        )
        source_length, target_length = self.row_lengths
        targets = pairs.targets.truncate(target_length, self.config.model.eos_id)
        if pairs.sources is None:
            return dataclasses.replace(pairs, targets=targets)
        sources = pairs.sources.truncate(source_length, self.config.model.eos_id)
        if self.config.data.subword_sampling:
            sources = self._resample(sources, pairs.texts, random)
        return dataclasses.replace(pairs, sources=sources, targets=targets, texts=None)

    def _resample(
        self, sources: Sentences, texts: Sentences | None, random: np.random.Generator
    ) -> Sentences:
        """Tokenizes sources with subword sampling, except where the result exceeds a row."""
        if self.sampler is None or texts is None:
            raise ValueError("data.subword_sampling needs a vocabulary to sample from")
        decoded = [texts[index].tobytes().decode() for index in range(len(texts))]
        amount = self.config.data.subword_sampling
        sampled = self.sampler.sample(decoded, int(random.integers(2**32)), amount)
        drawn = Sentences.from_lists([*map(self.sampler.with_source_end, sampled)])
        too_long = drawn.lengths > self.row_lengths[0]
        indices = np.arange(len(texts)) + len(texts) * too_long
        return Sentences.join([drawn, sources]).take(indices)


def _shapes(
    corpora: Sequence[EncodedCorpus], kept: Sequence[np.ndarray], config: ExperimentConfig
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
        longest = np.minimum(np.maximum(*corpus.lengths)[pairs], lengths[-1])
        used.update(lengths[np.unique(np.searchsorted(lengths, longest))].tolist())
    return tuple(
        BatchShape(config.rows_per_batch * (int(lengths[-1]) // length), length, length)
        for length in sorted(used)
    )


def _mixture(
    corpora: Sequence[EncodedCorpus], kept: Sequence[np.ndarray], config: ExperimentConfig
) -> Mixture:
    return Mixture(
        [len(pairs) for pairs in kept],
        [corpus.weight for corpus in corpora],
        config.data.mixture_temperature,
        config.train.seed,
    )


def _pack_rows(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    shapes: tuple[BatchShape, ...],
    random: np.random.Generator,
) -> list[PlannedRow]:
    (shape,) = shapes
    order = random.permutation(len(target_lengths))
    members, counts = plan_rows(
        source_lengths, target_lengths, shape.source_length, shape.target_length, order
    )
    rows = np.split(members, counts.cumsum())
    return [PlannedRow(shape, rows[i].tolist()) for i in random.permutation(len(counts))]


def _sort_into_buckets(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    shapes: tuple[BatchShape, ...],
    random: np.random.Generator,
) -> list[PlannedRow]:
    """Assigns each pair a row of its bucket, and shuffles the batches.

    The rows of a batch are contiguous. The last batch of each shape is padded with empty rows, so
    that no batch extends into the next block.
    """
    longest = np.maximum(source_lengths, target_lengths)
    buckets = np.searchsorted([shape.target_length for shape in shapes], longest)
    batches = []
    for bucket, shape in enumerate(shapes):
        pairs = random.permutation(np.flatnonzero(buckets == bucket)).tolist()
        for first in range(0, len(pairs), shape.rows):
            rows = [[pair] for pair in pairs[first : first + shape.rows]]
            rows += [[]] * (shape.rows - len(rows))
            batches.append([PlannedRow(shape, row) for row in rows])
    return [row for i in random.permutation(len(batches)) for row in batches[i]]


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
    pairs = [np.arange(len(corpus.targets)) for corpus in corpora]
    if config.data.long_sentences != "truncate":
        fitting = [np.flatnonzero(corpus.lengths[1] <= target_row_length) for corpus in corpora]
        if all(map(len, fitting)):  # Otherwise `select_pairs` raises an error.
            pairs = fitting
    longest = max(int(corpus.lengths[0].max()) for corpus in corpora)
    reader = _PairReader(corpora, pairs, (longest, target_row_length), config, sampler)
    random = generator(config.train.seed, _SAMPLE_KEY)
    draws = _mixture(corpora, pairs, config).epoch(0)[:_SAMPLE_PAIRS]
    sample = reader.read(draws, random)
    if sample.sources is None:
        return target_row_length
    order = random.permutation(len(draws))
    source_lengths, target_lengths = (lengths[order] for lengths in sample.lengths)

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
