"""Random segmentation of words into subwords, as a regularizer.

SentencePiece offers the same, but its random numbers differ between processes with the same seed
(version 0.2.3), so runs could not be resumed exactly. Pieces never cross a word boundary, so it is
sufficient to segment words.
"""

import functools
import heapq
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

MOST_SPLITS = 64
"""Number of best segmentations from which a unigram model samples; others are far less likely."""

_CACHED_WORDS = 100_000  # Most text consists of few distinct words.
_CACHED_SPLITS = 400_000  # Of words with dropped merges, mostly one or two.


class BpeDropout:
    """BPE-dropout: byte pair encoding in which merges are dropped at random.

    As in SentencePiece, a dropped merge becomes possible again when a neighboring piece changes.

    Source: Provilkov et al. 2020.

    Args:
      ranks: rank of each merged piece; merges with lower ranks come first.
      ids: token ids of all pieces.
      encode: encodes words that contain a character that is not a piece; they are not sampled.
      whole: parts of words that are not sampled either.
    """

    def __init__(
        self,
        ranks: Mapping[str, float],
        ids: Mapping[str, int],
        encode: Callable[[str], list[int]],
        whole: Sequence[str] = (),
    ) -> None:
        self._ranks = ranks
        self._ids = ids
        self._encode = encode
        self._whole = tuple(whole)
        self._best = functools.lru_cache(_CACHED_WORDS)(self._split_best)
        self._split = functools.lru_cache(_CACHED_SPLITS)(self._split_without)

    def sample(self, words: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """Returns the token ids of each word; `amount` is the probability of dropping a merge."""
        # One random number per word gives its first dropped merge; most words have none.
        first_dropped = np.random.default_rng(seed).geometric(amount, size=len(words))
        draw = random.Random(seed).random
        sampled = []
        for word, merge in zip(words, first_dropped.tolist(), strict=True):
            ids, merges = self._best(word)
            dropped: tuple[int, ...] = ()
            while merge <= merges:
                dropped = (*dropped, merge)
                ids, merges = self._split(word, dropped)
                merge += 1
                while merge <= merges and draw() >= amount:
                    merge += 1
            sampled.append(ids)
        return sampled

    def _split_best(self, word: str) -> tuple[list[int], int]:
        """Returns the ids of a word without dropped merges, and the number of merges."""
        is_whole = any(piece in word for piece in self._whole)
        if is_whole or not self._ids.keys() >= set(word):
            return self._encode(word), 0
        return self._split(word, ())

    def _split_without(self, word: str, dropped: tuple[int, ...]) -> tuple[list[int], int]:
        """Returns the ids and the number of possible merges, without those of some numbers."""
        pieces = list(word)
        # Neighbors of the piece that starts at a character; merged pieces are set to "".
        left = list(range(-1, len(word) - 1))
        right = [*range(1, len(word)), -1]
        agenda: list[tuple[float, int, str]] = []

        def propose(start: int) -> None:
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
                continue  # One of the two has since been merged with another piece.
            possible += 1
            if possible in dropped:
                continue
            pieces[start], pieces[end] = merged, ""
            right[start] = right[end]
            if right[end] >= 0:
                left[right[end]] = start
            propose(left[start])
            propose(start)
        return [self._ids[piece] for piece in pieces if piece], possible


class UnigramSampling:
    r"""Subword regularization: samples segmentations x with probability ~ P(x)^amount.

    They are drawn from the `MOST_SPLITS` best ones of a word, by the log-probabilities of tokens.

    Source: Kudo 2018, section 3.2.
    """

    def __init__(
        self, best_splits: Callable[[str], list[list[int]]], log_probabilities: Sequence[float]
    ) -> None:
        self._best_splits = best_splits
        self._log_probabilities = log_probabilities
        self._splits = functools.lru_cache(_CACHED_WORDS)(self._split)

    def sample(self, words: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """Returns the token ids of each word, more uniformly with a lower `amount`."""
        numbers = np.random.default_rng(seed).random(len(words))
        sampled = []
        for word, number in zip(words, numbers.tolist(), strict=True):
            splits, scores = self._splits(word)
            weights = np.exp(amount * (scores - scores[0])).cumsum()
            sampled.append(splits[int(np.searchsorted(weights, number * weights[-1], "right"))])
        return sampled

    def _split(self, word: str) -> tuple[list[list[int]], np.ndarray]:
        splits = self._best_splits(word)
        scores = [sum(self._log_probabilities[token] for token in split) for split in splits]
        return splits, np.array(scores)
