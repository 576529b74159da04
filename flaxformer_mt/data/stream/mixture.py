"""The pairs of each epoch: those that fit into rows, sampled from a mixture of corpora."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.errors import UserError

_PERMUTATION, _ORDER = range(2)


def generator(seed: int, *key: int) -> np.random.Generator:
    """Returns a random number generator that is a function of the seed and the key."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


class Mixture:
    """Infinite sequence of epochs that mix corpora in proportion to their rates.

    The rate of a corpus of n pairs is weight * n ** (1 / temperature). Each corpus is an infinite
    sequence of permutations of its pairs, from which each epoch takes the next ones, so that all
    pairs of a corpus are seen equally often. An epoch has as many draws as there are pairs in
    total: with equal weights and temperature 1, it contains every pair exactly once.

    Attributes:
      epoch: function from the number of an epoch to its pairs, int64 [draws], as indices into the
        concatenation of all corpora, whose sizes are positive.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], temperature: float, seed: int
    ) -> None:
        self._sizes = sizes
        self._seed = seed
        # Relative to the largest size: powers of large numbers may overflow.
        relative_sizes = np.array(sizes) / max(sizes)
        rates = np.array(weights) * relative_sizes ** (1 / temperature)
        self._draws_per_epoch = sum(sizes) * rates / rates.sum()
        # Two epochs: blocks of the next one are built ahead.
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def size(self, epoch: int) -> int:
        """Returns the number of draws in an epoch."""
        return int((self._drawn(epoch + 1) - self._drawn(epoch)).sum())

    def _epoch(self, epoch: int) -> np.ndarray:
        first_pairs = np.cumsum([0, *self._sizes[:-1]])
        draws = [
            first_pair + self._draw(corpus, first, last)
            for corpus, (first_pair, first, last) in enumerate(
                zip(first_pairs, self._drawn(epoch), self._drawn(epoch + 1), strict=True)
            )
        ]
        return generator(self._seed, _ORDER, epoch).permutation(np.concatenate(draws))

    def _drawn(self, epochs: int) -> np.ndarray:
        return np.rint(epochs * self._draws_per_epoch).astype(np.int64)

    def _draw(self, corpus: int, first: int, last: int) -> np.ndarray:
        size = self._sizes[corpus]
        first_round = first // size
        rounds = [
            generator(self._seed, _PERMUTATION, corpus, number).permutation(size)
            for number in range(first_round, -(-last // size))
        ]
        start = first_round * size
        return np.concatenate([np.empty(0, np.int64), *rounds])[first - start : last - start]


def select_pairs(corpus: EncodedCorpus, config: DataConfig) -> tuple[EncodedCorpus, np.ndarray]:
    """Selects the pairs to train on, according to `data.long_sentences`.

    Returns:
      The corpus, with a report that includes the pairs longer than a row, and the ascending indices
      of the pairs to train on, int64 [kept]. Truncation is left to the caller.
    """
    source_row_length, target_row_length = config.row_lengths
    source_lengths, target_lengths = corpus.lengths
    fits = (source_lengths <= source_row_length) & (target_lengths <= target_row_length)
    too_long = np.flatnonzero(~fits)
    if not len(too_long):
        return corpus, np.arange(len(fits))

    first = int(too_long[0])
    example = (
        f"{corpus.place(first)} ({source_lengths[first]:,} source and {target_lengths[first]:,} "
        "target tokens)"
    )
    problem = (
        f"{corpus.name}: {len(too_long):,} of {len(fits):,} pairs are longer than a row "
        f"({_row_lengths(config)}), the first is {example}"
    )
    if config.long_sentences == "error":
        raise UserError(f"{problem}; raise it, or set data.long_sentences to drop or truncate")
    if config.long_sentences == "truncate":
        report = dataclasses.replace(corpus.report, truncated=len(too_long))
        return dataclasses.replace(corpus, report=report), np.arange(len(fits))
    if len(too_long) == len(fits):
        raise UserError(f"{problem}; raise it, or set data.long_sentences to truncate")
    return corpus.without("longer than a row", example, too_long), np.flatnonzero(fits)


def _row_lengths(config: DataConfig) -> str:
    if config.batching == "buckets":
        return f"the last of data.bucket_lengths={config.bucket_lengths}"
    return (
        f"data.source_row_length={config.source_row_length}, "
        f"data.target_row_length={config.target_row_length}"
    )
