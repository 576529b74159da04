"""The pairs of each epoch: those that fit into rows, sampled from a mixture of corpora."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.errors import UserError

STREAMS, SAMPLED_STREAMS = 256, 64
"""Number of virtual streams that large data are divided into; with subword sampling fewer, since
the first batch of a single process waits for the sampled sources of a block of each."""

BLOCK_PAIRS, SINGLE_BLOCK_PAIRS = 2048, 65_536
"""Approximate number of pairs in a block: of one of several streams, and of a single one. Larger
blocks fill rows no better, but in each of them the last batch of each bucket is padded."""

WINDOW_BLOCKS = 4
"""Number of consecutive blocks of a stream whose pairs are mixed."""

CHUNK_PAIRS, CHUNKED_PAIRS = 1024, 2**20
"""Number of neighboring pairs that stay in one window, and the size of a corpus from which on they
do: a large store is read in long runs. The pairs of smaller ones are shuffled individually."""

TOO_LONG = "longer than a row"
"""The reason of pairs that are dropped for their length."""

_PERMUTATION, _WINDOW = 0, 4  # Keys of random number generators.
_SMALL_PERMUTATION = 1024  # Size up to which the whole permutation is made.


def generator(seed: int, *key: int) -> np.random.Generator:
    """Returns a random number generator that is a function of the seed and the key."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def permuted(numbers: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Returns what a random permutation of `range(size)` makes of some numbers, int64 [any].

    No memory of that size is needed. A Feistel network of eight rounds permutes the numbers that
    have as many bits as `size - 1`; where its result is not below `size`, it is applied again.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3.
    """
    if size <= _SMALL_PERMUTATION:
        return random.permutation(size)[numbers]
    bits = (size - 1).bit_length()
    shift = np.uint64(bits // 2)
    high_mask, low_mask = np.uint64((1 << bits - bits // 2) - 1), np.uint64((1 << bits // 2) - 1)
    keys = random.integers(2**63, size=8, dtype=np.uint64)

    def hashed(half: np.ndarray, key: np.uint64) -> np.ndarray:
        half = (half + key) * np.uint64(0xFF51AFD7ED558CCD)
        half = (half ^ half >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
        return half ^ half >> np.uint64(33)

    result = numbers.astype(np.uint64)
    moving = np.arange(len(result))
    while len(moving):
        high, low = result[moving] >> shift, result[moving] & low_mask
        for of_high, of_low in zip(keys[::2], keys[1::2], strict=True):
            high ^= hashed(low, of_high) & high_mask
            low ^= hashed(high, of_low) & low_mask
        result[moving] = high << shift | low
        moving = moving[result[moving] >= size]
    return result.astype(np.int64)


class Mixture:
    """Infinite sequence of epochs that mix corpora in proportion to their rates.

    The rate of a corpus of n pairs is weight * n ** (1 / temperature). Each corpus is an infinite
    sequence of permutations of its pairs, from which each epoch takes the next ones, so that all
    pairs of a corpus are seen equally often. An epoch has as many draws as there are pairs in
    total: with equal weights and temperature 1, it contains every pair exactly once.

    An epoch is divided among virtual streams, and each of these into blocks. Every window of blocks
    has the same share of each corpus, and is a function of its number: nothing as large as a corpus
    is in memory.

    Attributes:
      streams: number of virtual streams.
      blocks: function from an epoch to the number of blocks in each stream.

    Args:
      sizes: numbers of pairs of the corpora, which are positive.
      weights: of the corpora.
      config: options of the data.
      seed: of the order.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], config: DataConfig, seed: int
    ) -> None:
        self._sizes = sizes
        self._seed = seed
        # Relative to the largest size: powers of large numbers may overflow.
        relative_sizes = np.array(sizes) / max(sizes)
        rates = np.array(weights) * relative_sizes ** (1 / config.mixture_temperature)
        self._draws_per_epoch = sum(sizes) * rates / rates.sum()
        self.streams = 1
        # All rows of a batch have the same bucket, so that buckets need a common plan.
        if config.batching == "packed":
            most = SAMPLED_STREAMS if config.subword_sampling else STREAMS
            of_each = WINDOW_BLOCKS * BLOCK_PAIRS
            while self.streams < most and sum(sizes) >= of_each * self.streams:
                self.streams *= 2
        self._block_pairs = SINGLE_BLOCK_PAIRS if self.streams == 1 else BLOCK_PAIRS
        # Two epochs: blocks of the next one are planned ahead.
        self.blocks = functools.lru_cache(maxsize=2)(self._blocks)
        self._window = functools.lru_cache(maxsize=self.streams)(self._mix_window)

    def size(self, epoch: int) -> int:
        """Returns the number of draws in an epoch."""
        return int((self._drawn(epoch + 1) - self._drawn(epoch)).sum())

    def _blocks(self, epoch: int) -> int:
        return max(1, round(self.size(epoch) / (self.streams * self._block_pairs)))

    def draws(self, epoch: int, stream: int, block: int) -> np.ndarray:
        """Returns the pairs of a block, int64 [pairs], as indices into all corpora in a row."""
        blocks = self.blocks(epoch)
        first = block - block % WINDOW_BLOCKS
        count = min(WINDOW_BLOCKS, blocks - first)
        return _part(self._window(epoch, stream, first, count), block - first, count)

    def sample(self, count: int) -> np.ndarray:
        """Returns the draws of the first blocks, at most `count`."""
        blocks = (
            (block, stream) for block in range(self.blocks(0)) for stream in range(self.streams)
        )
        draws: list[np.ndarray] = []
        while sum(map(len, draws)) < count and (block := next(blocks, None)):
            draws.append(self.draws(0, block[1], block[0]))
        return np.concatenate(draws)[:count]

    def streams_of_rows(self, rows: int, step: int) -> np.ndarray:
        """Returns the virtual stream that each row of a batch is read from, int64 [rows].

        Consecutive rows have the same or consecutive streams: part i of n of every batch takes part
        i of n of the streams, if n divides the number of both. Where there are more streams than
        rows, they take turns.
        """
        groups = math.gcd(rows, self.streams)
        group, row = np.divmod(np.arange(rows), rows // groups)
        turns = self.streams // groups
        return group * turns + (step * (rows // groups) + row) % turns

    def _mix_window(self, epoch: int, stream: int, first: int, count: int) -> np.ndarray:
        begin = first * self.streams + stream * count
        draws = self._part_of_epoch(epoch, begin, begin + count, self.blocks(epoch) * self.streams)
        return generator(self._seed, _WINDOW, epoch, stream, first).permutation(draws)

    def _part_of_epoch(self, epoch: int, begin: int, end: int, parts: int) -> np.ndarray:
        """Returns the draws of the parts from `begin` to `end` of an epoch, by corpus."""
        first, last = self._drawn(epoch), self._drawn(epoch + 1)
        bounds = (first + (last - first) * boundary // parts for boundary in (begin, end))
        first_pairs = np.cumsum([0, *self._sizes[:-1]])
        return np.concatenate(
            [
                first_pair + self._draw(corpus, *each)
                for corpus, (first_pair, *each) in enumerate(zip(first_pairs, *bounds, strict=True))
            ]
        )

    def _drawn(self, epochs: int) -> np.ndarray:
        return np.rint(epochs * self._draws_per_epoch).astype(np.int64)

    def _draw(self, corpus: int, first: int, last: int) -> np.ndarray:
        size = self._sizes[corpus]
        rounds = [
            self._shuffled(
                corpus,
                number,
                np.arange(max(first - number * size, 0), min(last - number * size, size)),
            )
            for number in range(first // size, -(-last // size))
        ]
        return np.concatenate([np.empty(0, np.int64), *rounds])

    def _shuffled(self, corpus: int, number: int, positions: np.ndarray) -> np.ndarray:
        """Returns the pairs at consecutive positions of a permutation, int64 [positions]."""
        size = self._sizes[corpus]
        random = generator(self._seed, _PERMUTATION, corpus, number)
        if not len(positions):
            return positions
        # Chunks begin elsewhere in each permutation. The pairs that fill none are the last.
        rotation = random.integers(size)
        length = CHUNK_PAIRS if size >= CHUNKED_PAIRS else 1
        chunks = np.arange(positions[0] // length, positions[-1] // length + 1)
        is_whole = chunks < size // length
        chunks[is_whole] = permuted(chunks[is_whole], size // length, random)
        starts = chunks[positions // length - positions[0] // length] * length
        return (starts + positions % length + rotation) % size


def _part(values: np.ndarray, index: int, count: int) -> np.ndarray:
    first, last = (len(values) * boundary // count for boundary in (index, index + 1))
    return values[first:last]


def select_pairs(corpus: EncodedCorpus, config: DataConfig) -> tuple[EncodedCorpus, np.ndarray]:
    """Selects the pairs to train on, according to `data.long_sentences`.

    Returns:
      The corpus, with a report that includes the pairs longer than a row, and the ascending indices
      of the pairs to leave out, int64 [dropped]. Truncation is left to the caller.
    """
    source_row_length, target_row_length = config.row_lengths
    chunks = [
        first + np.flatnonzero((sources > source_row_length) | (targets > target_row_length))
        for first, (sources, targets) in corpus.chunks_of_lengths()
    ]
    too_long = np.concatenate(chunks)
    if not len(too_long):
        return corpus, too_long

    count, first = len(corpus.targets), too_long[:1]
    (source_length,), (target_length,) = corpus.take(first).lengths
    example = (
        f"{corpus.location(int(first[0]))} ({source_length:,} source and {target_length:,} target "
        "tokens)"
    )
    problem = (
        f"{corpus.name}: {len(too_long):,} of {count:,} pairs are longer than a row "
        f"({_row_lengths(config)}), the first is {example}"
    )
    if config.long_sentences == "error":
        raise UserError(f"{problem}; raise it, or set data.long_sentences to drop or truncate")
    if config.long_sentences == "truncate":
        report = dataclasses.replace(corpus.report, truncated=len(too_long))
        return dataclasses.replace(corpus, report=report), too_long[:0]
    if len(too_long) == count:
        raise UserError(f"{problem}; raise it, or set data.long_sentences to truncate")
    return corpus.without(TOO_LONG, example, too_long), too_long


def _row_lengths(config: DataConfig) -> str:
    if config.batching == "buckets":
        return f"the last of data.bucket_lengths={config.bucket_lengths}"
    return (
        f"data.source_row_length={config.source_row_length}, "
        f"data.target_row_length={config.target_row_length}"
    )
