"""Which pairs of one or several corpora an epoch has, and in which order."""

import functools
from collections.abc import Sequence

import numpy as np

_PERMUTATION, _ORDER = range(2)


def generator(seed: int, *key: int) -> np.random.Generator:
    """Random numbers that depend on nothing but these; another key gives others."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


class Mixture:
    """An endless stream of pairs, drawn from all corpora in proportion to their rates.

    The rate of a corpus of n pairs is weight * n ** (1 / temperature). Each corpus is, for itself,
    an endless stream of permutations of its pairs, of which an epoch takes the next ones, so that
    all of its pairs come equally often. An epoch has as many draws as there are pairs: with equal
    weights and a temperature of 1 it has every pair exactly once.

    Attributes:
      epoch: from the number of an epoch to its pairs, int64 [draws], counted through from the first
        corpus on.

    Args:
      sizes: pairs of each corpus, all positive.
      weights: of each corpus.
      temperature: see above.
      seed: decides the order of everything.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], temperature: float, seed: int
    ) -> None:
        self._sizes = sizes
        self._seed = seed
        # Relative to the largest, for powers of large numbers may overflow.
        relative_sizes = np.array(sizes) / max(sizes)
        rates = np.array(weights) * relative_sizes ** (1 / temperature)
        self._draws_an_epoch = sum(sizes) * rates / rates.sum()
        # Two at a time, since blocks are made ahead.
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def size(self, epoch: int) -> int:
        """Draws in an epoch."""
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
        """How often each corpus has been drawn from in so many epochs, int64 [corpora]."""
        return np.rint(epochs * self._draws_an_epoch).astype(np.int64)

    def _draw(self, corpus: int, first: int, last: int) -> np.ndarray:
        """Draws number `first` to `last` - 1 of a corpus, int64 [draws]."""
        size = self._sizes[corpus]
        first_round = first // size
        rounds = [
            generator(self._seed, _PERMUTATION, corpus, number).permutation(size)
            for number in range(first_round, -(-last // size))
        ]
        start = first_round * size
        return np.concatenate([np.empty(0, np.int64), *rounds])[first - start : last - start]
