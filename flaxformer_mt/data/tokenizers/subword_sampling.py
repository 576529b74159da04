"""Splitting words at random, so that a model meets each of them in several spellings.

SentencePiece can do it, but its random numbers differ from one process to the next, whatever their
seed (version 0.2.3), and with them no run could be continued exactly. Its pieces never cross the
border of a word, so it is enough to split words.
"""

import functools
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

Encode: TypeAlias = Callable[[str], list[int]]
"""The token ids of a word, split in the best way."""

MOST_SPLITS = 64
"""Ways to split a word that a unigram model chooses from; the others are far less likely."""

_CACHED_WORDS = 100_000  # Most text consists of few words.


class WordSampler(Protocol):
    """Splits words at random."""

    def sample(self, words: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """The token ids of each word; a function of the arguments."""


class BpeDropout:
    """Byte pair encoding in which some merges are left out.

    As in SentencePiece, a merge that was left out is possible again once a neighbour has changed.

    Source: Provilkov et al. 2020.

    Args:
      ranks: of each piece that a merge can make; of two possible merges the lower comes first.
      ids: token ids of all pieces.
      encode: for words that cannot be split at random, as a character of theirs is no piece.
      whole: words that begin with one of these are not split at random either.
    """

    def __init__(
        self,
        ranks: Mapping[str, float],
        ids: Mapping[str, int],
        encode: Encode,
        whole: Sequence[str] = (),
    ) -> None:
        self._ranks = ranks
        self._ids = ids
        self._encode = encode
        self._whole = tuple(whole)
        self._best = functools.lru_cache(_CACHED_WORDS)(self._split_best)

    def sample(self, words: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """See `WordSampler`; `amount` is the probability with which a merge is left out."""
        # Most words lose no merge, which one number a word tells: the first merge to leave out.
        first_left_out = np.random.default_rng(seed).geometric(amount, size=len(words))
        draw = random.Random(seed).random
        sampled = []
        for word, first in zip(words, first_left_out.tolist(), strict=True):
            ids, merges = self._best(word)
            if first <= merges:
                ids, _ = self._split(word, _left_out(first, amount, draw))
            sampled.append(ids)
        return sampled

    def _split_best(self, word: str) -> tuple[list[int], int]:
        """The ids of a word if no merge is left out, and how many merges that takes."""
        if word.startswith(self._whole) or not self._ids.keys() >= set(word):
            return self._encode(word), 0
        return self._split(word, lambda number: False)

    def _split(self, word: str, leave_out: Callable[[int], bool]) -> tuple[list[int], int]:
        """Merges characters to pieces.

        Args:
          word: consists of characters that are pieces.
          leave_out: whether the first, second, ... merge that is possible is left out.

        Returns:
          The ids of the pieces, and how many merges were possible.
        """
        pieces = list(word)
        # Neighbours of the piece that begins at a character; merged pieces leave "" behind.
        left = list(range(-1, len(word) - 1))
        right = [*range(1, len(word)), -1]
        agenda: list[tuple[float, int, str]] = []

        def propose(start: int) -> None:
            """Puts the merge of a piece with the one after it on the agenda, if there is one."""
            if start >= 0 and right[start] >= 0:
                merged = pieces[start] + pieces[right[start]]
                if merged in self._ranks:
                    heapq.heappush(agenda, (self._ranks[merged], start, merged))

        for start in range(len(word)):
            propose(start)
        possible = 0
        while agenda:
            _, start, merged = heapq.heappop(agenda)
            end = right[start]
            if not pieces[start] or end < 0 or pieces[start] + pieces[end] != merged:
                continue  # One of the two has been merged with another piece since.
            possible += 1
            if leave_out(possible):
                continue
            pieces[start], pieces[end] = merged, ""
            right[start] = right[end]
            if right[end] >= 0:
                left[right[end]] = start
            propose(left[start])
            propose(start)
        return [self._ids[piece] for piece in pieces if piece], possible


def _left_out(first: int, amount: float, draw: Callable[[], float]) -> Callable[[int], bool]:
    """Whether a merge is left out, by its number: the first that is, and later ones by chance."""
    return lambda number: number == first or (number > first and draw() < amount)


class UnigramSampling:
    r"""Subword regularisation: a split x of a word is drawn with probability ~ P(x)^amount.

    Source: Kudo 2018, section 3.2.

    Args:
      best_splits: the token ids of the `MOST_SPLITS` best ways to split a word.
      log_probabilities: of each token id.
    """

    def __init__(
        self, best_splits: Callable[[str], list[list[int]]], log_probabilities: Sequence[float]
    ) -> None:
        self._best_splits = best_splits
        self._log_probabilities = log_probabilities
        self._splits = functools.lru_cache(_CACHED_WORDS)(self._split)

    def sample(self, words: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """See `WordSampler`; the lower `amount`, the more even are the probabilities."""
        numbers = np.random.default_rng(seed).random(len(words))
        sampled = []
        for word, number in zip(words, numbers.tolist(), strict=True):
            splits, scores = self._splits(word)
            weights = np.exp(amount * (scores - scores[0])).cumsum()
            sampled.append(splits[int(np.searchsorted(weights, number * weights[-1], "right"))])
        return sampled

    def _split(self, word: str) -> tuple[list[list[int]], np.ndarray]:
        """The splits of a word, the best first, and the log-probability of each."""
        splits = self._best_splits(word)
        scores = [sum(self._log_probabilities[token] for token in split) for split in splits]
        return splits, np.array(scores)
