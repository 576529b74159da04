"""The infinite stream of training batches, a function of the configuration and the data.

The pairs of an epoch, in random order, are divided among up to 256 virtual streams, and each of
these into blocks (`mixture`). A block is planned on demand as a function of (seed, epoch, stream,
number): its sources are tokenized again with `data.subword_sampling`, its pairs are assigned to
rows, and the rows are shuffled (`blocks`), in a thread or in worker processes (`block_workers`).
Each row of a batch is read from one of the streams, sequentially, across the boundaries of blocks
and epochs, so that all batches have the same size.

Therefore a checkpoint only needs the position in each stream, corpora of any size start without
delay, and a process only plans the streams of its own rows. Which rows are read from which stream
depends neither on devices nor on processes.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
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
from flaxformer_mt.data.stream.block_workers import BlockWorkers, default_workers
from flaxformer_mt.data.stream.blocks import Block, BlockMaker, Curriculum
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.mixture import generator, select_pairs
from flaxformer_mt.data.stream.packing import TokenPairs, plan_rows
from flaxformer_mt.data.stream.placement import own_shard, place_batch
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.states import differences, listed

GOOD_FILL = 0.955
"""Fraction of used positions at which a row length that is efficient on accelerators is chosen."""

_SAMPLE_PAIRS, _SAMPLE_BLOCKS = 32_768, 32
_SAMPLE_KEY = 3  # Key of random number generators; others use 0, 1, 2 and 4.


_Item = TypeVar("_Item")


class Fill(NamedTuple):
    """Fractions of the positions in training rows that hold a token."""

    source: float
    """0 for a language model."""
    target: float


class Prefetched(Generic[_Item], Iterator[tuple[_Item, DataPosition]]):
    """Reads an infinite stream ahead of its consumer, in a background thread.

    An iterator over the results of `read`: each batch comes with the position after it, which a
    checkpoint must save once the batch has been used, however far the thread has read ahead.
    Leaving it as a context manager stops the thread.

    Attributes:
      seconds_waited: total time that `next` has waited for a batch.

    Args:
      read: called in the thread with a position, returns the batch there and the position after it.
      start: position of the first batch.
      depth: maximum number of batches that wait, besides the one that is being read.
      on_close: called once, after the thread has stopped.
    """

    def __init__(
        self,
        read: Callable[[DataPosition], tuple[_Item, DataPosition]],
        start: DataPosition,
        depth: int = 2,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.seconds_waited = 0.0
        self._read = read
        self._position = start
        self._closing = contextlib.ExitStack()
        self._closing.callback(on_close)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prefetch")
        self._batches = collections.deque(
            self._thread.submit(self._read_next) for _ in range(depth + 1)
        )

    def __next__(self) -> tuple[_Item, DataPosition]:
        if not self._batches:
            raise StopIteration
        start = time.perf_counter()
        try:
            item = self._batches.popleft().result()
        except BaseException:
            self.close()
            raise
        self.seconds_waited += time.perf_counter() - start
        self._batches.append(self._thread.submit(self._read_next))
        return item

    def close(self) -> None:
        """Stops the thread after its current batch, and discards prefetched batches."""
        self._batches.clear()
        self._thread.shutdown(cancel_futures=True)
        self._closing.close()

    def __enter__(self) -> "Prefetched[_Item]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_next(self) -> tuple[_Item, DataPosition]:
        batch, self._position = self._read(self._position)
        return batch, self._position


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
      identity: a JSON object of all that the batches depend on, which positions carry.
      curriculum: how often each pair is used in an epoch; by default once.
    """

    def __init__(
        self,
        corpora: Sequence[EncodedCorpus],
        config: ExperimentConfig,
        sampler: Tokenizer | None = None,
        identity: str = "",
        curriculum: Curriculum | None = None,
    ) -> None:
        self.start = DataPosition(stream=identity)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "blocks")
        # Machine code takes a second to load, here while the lengths of all pairs are read.
        self._thread.submit(plan_rows, np.ones(1, np.int64), np.ones(1, np.int64), 1, 1)
        if not config.data.source_row_length:
            length = choose_source_row_length(corpora, config, sampler)
            data = dataclasses.replace(config.data, source_row_length=length)
            config = dataclasses.replace(config, data=data)
        self.config = config
        selected = [select_pairs(corpus, config.data) for corpus in corpora]
        self.corpora = tuple(corpus for corpus, _ in selected)
        self.shapes = _shapes(self.corpora, config)
        dropped = [pairs for _, pairs in selected]
        self._arguments = (corpora, dropped, self.shapes, config, sampler, curriculum)
        self._maker = BlockMaker(*self._arguments)
        self._mixture = self._maker.mixture
        self.pairs = self._mixture.size(0)
        self._workers: BlockWorkers | None = None
        self._readers = 0
        self._make_ahead(1)
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

        Raises:
          UserError: the position is of a stream with other pairs, vocabularies or options.
        """
        position = position or self.start
        if position.stream and position.stream != self.start.stream:
            changes = differences(position.identity, self.start.identity)
            raise UserError(
                f"the position is one in another stream of batches ({listed(changes)}): begin with "
                "data.start, or give position.continued_in(data.start), which goes on with the "
                "next epoch of this one"
            )
        place = functools.partial(place_batch, mesh=mesh)
        return self.prefetched(own_shard(mesh), place, position)

    def prefetched(
        self, shard: Shard, place: Callable[[Batch], Batch], position: DataPosition
    ) -> Prefetched[Batch]:
        """Reads ahead as `batches`, which `place` transfers to the devices.

        Until the last of such iterators is closed, there are the processes of `data.workers`.
        """
        count = self.config.data.workers
        if count < 0 and self.config.data.curriculum:
            count = 0  # Workers would need your program.
        elif count < 0:
            is_sampled = self.config.data.subword_sampling > 0
            count = default_workers(self.pairs, is_sampled, jax.default_backend())
        if count and not self._readers:
            self._workers = BlockWorkers(count, *self._arguments)
            # A single stream has work for all of them, too.
            self._make_ahead(max(1, 2 * count // self._mixture.streams))
        self._readers += 1

        def read(position: DataPosition) -> tuple[Batch, DataPosition]:
            batch, after = self.read(position, shard)
            return place(batch), after

        return Prefetched(read, position, on_close=self._stop)

    def read(
        self, position: DataPosition, shard: Shard = WHOLE_BATCH
    ) -> tuple[Batch, DataPosition]:
        """Returns the part `shard` of the batch at a position, and the position after it."""
        positions = self._positions(position)
        shape = self.shapes[0]
        if len(self.shapes) > 1:
            ((epoch, number, row),) = positions
            shape = self._block(epoch, 0, number).shapes[row]
        own = shard.part(shape.rows)
        streams = self._mixture.streams_of_rows(shape.rows, position.step)
        # All that the first batch needs is started before it waits for any.
        for stream in {*streams[own].tolist()}.difference(self._current):
            epoch, number, _ = positions[stream]
            self._future(epoch, stream, number)
        rows = []
        for row in np.flatnonzero(np.isin(streams, streams[own])).tolist():
            stream = int(streams[row])
            epoch, number, first = positions[stream]
            block = self._block(epoch, stream, number)
            if own.start <= row < own.stop:
                rows.append((block, first))
            if first + 1 < len(block.shapes):
                positions[stream] = epoch, number, first + 1
            else:
                positions[stream] = *self._after(epoch, number), 0
        batch = self._make_batch(rows, shape)
        if len(positions) == 1:
            after = DataPosition(*positions[0])
        else:
            after = DataPosition(max(positions)[0], streams=tuple(positions))
        return batch, after._replace(step=position.step + 1, stream=position.stream)

    @property
    def fill(self) -> Fill:
        """Fractions of used positions in the rows of the first blocks."""
        blocks = self._first_blocks()
        lengths = [[side.sum() for side in block.pairs.lengths] for block in blocks]
        sources, targets = np.sum(lengths, axis=0).tolist()
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
        return batches * self._mixture.blocks(0) * self._mixture.streams / len(blocks)

    def _first_blocks(self) -> list[Block]:
        streams = range(min(self._mixture.streams, _SAMPLE_BLOCKS))
        return [self._block(0, stream, 0) for stream in streams]

    def _positions(self, position: DataPosition) -> list[tuple[int, int, int]]:
        """Returns epoch, block and row of each stream."""
        streams = self._mixture.streams
        positions = [*position.streams] or [
            (position.epoch, position.block, position.row)
        ] * streams
        is_whole = position.streams or streams == 1
        if len(positions) != streams or not (is_whole or position.block == position.row == 0):
            raise UserError(
                "the position is one in other data: give those that it was saved with, or begin "
                f"with DataPosition(epoch={position.epoch + 1})"
            )
        return positions

    def _make_batch(self, rows: Sequence[tuple[Block, int]], shape: BatchShape) -> Batch:
        """Packs rows, given by their blocks and their numbers there."""
        bounds = [(block.pairs, block.ends[row], block.ends[row + 1]) for block, row in rows]
        counts = np.array([last - first for _, first, last in bounds])
        return packed_batch(TokenPairs.join_spans(bounds), counts, shape, self.config.model)

    def _block(self, epoch: int, stream: int, number: int) -> Block:
        """Returns a block, and starts making the next ones."""
        made, block = self._current.get(stream, (None, None))
        if block is None or made != (epoch, number):
            future = self._future(epoch, stream, number)
            after = epoch, number
            for _ in range(self._ahead):
                after = self._after(*after)
                self._future(after[0], stream, after[1])
            block = future.result()
            self._current[stream] = (epoch, number), block
        return block

    def _make_ahead(self, blocks: int) -> None:
        """Makes so many blocks of each stream ahead, from now on by the workers, if there are."""
        self._ahead = blocks
        self._future = functools.lru_cache((1 + blocks) * self._mixture.streams)(self._start_block)

    def _start_block(
        self, epoch: int, stream: int, number: int
    ) -> concurrent.futures.Future[Block]:
        if self._workers is not None:
            return self._workers.submit(epoch, stream, number)
        return self._thread.submit(self._maker.make, epoch, stream, number)

    def _stop(self) -> None:
        """Ends the workers when the last iterator is closed."""
        self._readers -= 1
        if self._workers is not None and not self._readers:
            self._workers.close()
            self._workers = None
            self._make_ahead(1)

    def _after(self, epoch: int, number: int) -> tuple[int, int]:
        return (epoch, number + 1) if number + 1 < self._mixture.blocks(epoch) else (epoch + 1, 0)


def _shapes(corpora: Sequence[EncodedCorpus], config: ExperimentConfig) -> tuple[BatchShape, ...]:
    """Returns the shapes of training batches: one if packed, otherwise one per nonempty bucket.

    The number of rows of each bucket is a multiple of that of the longest, so that all of them are
    divisible by the numbers of devices and accumulation steps.
    """
    if config.data.batching == "packed":
        return (packed_shape(config),)
    lengths = np.array(config.data.bucket_lengths)
    used = set()
    for corpus in corpora:
        for _, sides in corpus.chunks_of_lengths():
            longest = np.maximum(*sides)
            if config.data.long_sentences == "truncate":
                longest = np.minimum(longest, lengths[-1])
            kept = longest[longest <= lengths[-1]]
            used.update(lengths[np.unique(np.searchsorted(lengths, kept))].tolist())
    return tuple(
        BatchShape(config.rows_per_batch * (int(lengths[-1]) // length), length, length)
        for length in sorted(used)
    )


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
    longest, dropped = 0, []
    for corpus in corpora:
        too_long = []
        for first, (sources, targets) in corpus.chunks_of_lengths():
            longest = max(longest, int(sources.max()))
            too_long.append(first + np.flatnonzero(targets > target_row_length))
        dropped.append(np.concatenate(too_long))
    # If nothing is left of a corpus, `select_pairs` raises an error.
    is_empty = any(len(p) == len(c.targets) for p, c in zip(dropped, corpora, strict=True))
    if config.data.long_sentences == "truncate" or is_empty:
        dropped = [pairs[:0] for pairs in dropped]
    shape = BatchShape(1, longest, target_row_length)
    maker = BlockMaker(corpora, dropped, [shape], config, sampler)
    random = generator(config.train.seed, _SAMPLE_KEY)
    draws = maker.mixture.sample(_SAMPLE_PAIRS)
    lengths = np.stack(maker.read(np.sort(draws), random).lengths)
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
