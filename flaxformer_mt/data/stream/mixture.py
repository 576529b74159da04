"""Sampling of epochs from a mixture of corpora."""

import functools
from collections.abc import Sequence

import numpy as np

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
        concatenation of all corpora.

    Args:
      sizes: number of pairs of each corpus, all positive.
      weights: weight of each corpus.
      temperature: see above.
      seed: seed of all permutations.
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
        """Returns the number of draws from each corpus in the first epochs, int64 [corpora]."""
        return np.rint(epochs * self._draws_per_epoch).astype(np.int64)

    def _draw(self, corpus: int, first: int, last: int) -> np.ndarray:
        """Returns draws `first` to `last` - 1 of a corpus, int64 [draws]."""
        size = self._sizes[corpus]
        first_round = first // size
        rounds = [
            generator(self._seed, _PERMUTATION, corpus, number).permutation(size)
            for number in range(first_round, -(-last // size))
        ]
        start = first_round * size
        return np.concatenate([np.empty(0, np.int64), *rounds])[first - start : last - start]
