"""Random segmentation of words into subwords, as a regularizer.

SentencePiece offers the same, but its random numbers differ between processes with the same seed
(version 0.2.3), so runs could not be resumed exactly. Pieces never cross a word boundary, so it is
sufficient to segment words.
"""

import abc
import bisect
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

MOST_SPLITS = 64
"""Number of best segmentations from which a unigram model samples; others are far less likely."""

_CACHED_SPLITS = 500_000
_Key = TypeVar("_Key")


class _Splits(Generic[_Key]):
    """Segmentations by key, as a ragged array that grows: most text has few distinct words.

    Attributes:
      numbers: the number of the segmentation with each key.
      merges: how many merges are possible in each, int64, with room for more.
    """

    def __init__(self) -> None:
        self.numbers: dict[_Key, int] = {}
        self._tokens = np.empty(1 << 12, np.int32)
        self._ends = np.zeros(1 << 10, np.int64)
        self.merges = np.empty(1 << 10, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: _Key, ids: Sequence[int], merges: int = 0) -> int:
        """Adds a segmentation, with its number of possible merges, and returns its number."""
        number, start = self._count, int(self._ends[self._count])
        end = start + len(ids)
        while end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, self._tokens])
        if number + 2 > len(self._ends):
            self._ends = np.concatenate([self._ends, self._ends])
            self.merges = np.concatenate([self.merges, self.merges])
        self._tokens[start:end] = ids
        self._ends[number + 1], self.merges[number] = end, merges
        self.numbers[key] = number
        self._count += 1
        return number

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of segmentations, in a row, and their lengths, int64 [N]."""
        starts = self._ends[numbers]
        lengths = self._ends[numbers + 1] - starts
        firsts = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
        return self._tokens[places], lengths


class WordSampler(abc.ABC):
    """Draws segmentations of words at random."""

    @abc.abstractmethod
    def draw(self, words: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of all words, int32, in a row, and how many each has, int64 [N].

        `amount` is that of `Tokenizer.sample`.
        """

    def sample(self, words: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """Returns the token ids of each word."""
        return as_lists(*self.draw(words, seed, amount))


def as_lists(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Divides tokens that are in a row."""
    ends = lengths.cumsum().tolist()
    values = tokens.tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class BpeDropout(WordSampler):
    """BPE-dropout: byte pair encoding in which merges are dropped at random.

    As in SentencePiece, a dropped merge becomes possible again when a neighboring piece changes.
    `amount` is the probability of dropping one.

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
        self._splits: _Splits[str | tuple[str, tuple[int, ...]]] = _Splits()

    def draw(self, words: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """See `WordSampler`."""
        # One random number per word gives its first dropped merge; most words have none.
        first_dropped = np.random.default_rng(seed).geometric(amount, size=len(words))
        draw = random.Random(seed).random
        if len(self._splits) > _CACHED_SPLITS:
            self._splits = _Splits()
        numbers = self._best(words)
        possible = self._splits.merges[numbers]
        for index in np.flatnonzero(first_dropped <= possible).tolist():
            word, merge, merges = words[index], int(first_dropped[index]), int(possible[index])
            dropped: tuple[int, ...] = ()
            while merge <= merges:
                dropped = (*dropped, merge)
                number = self._splits.numbers.get((word, dropped))
                if number is None:
                    split = self._split_without(word, dropped)
                    number = self._splits.add((word, dropped), *split)
                merges = int(self._splits.merges[number])
                merge += 1
                while merge <= merges and draw() >= amount:
                    merge += 1
            numbers[index] = number
        return self._splits.take(numbers)

    def _best(self, words: Sequence[str]) -> np.ndarray:
        """Returns the numbers of the segmentations without dropped merges, int64 [N]."""
        numbers = self._splits.numbers
        for word in set(words).difference(numbers):
            self._splits.add(word, *self._split_best(word))
        return np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))

    def _split_best(self, word: str) -> tuple[list[int], int]:
        """Returns the ids of a word without dropped merges, and the number of merges."""
        is_whole = any(piece in word for piece in self._whole)
        if is_whole or not self._ids.keys() >= set(word):
            return self._encode(word), 0
        return self._split_without(word, ())

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


class UnigramSampling(WordSampler):
    r"""Subword regularization: samples segmentations x with probability ~ P(x)^amount.

    They are drawn from the `MOST_SPLITS` best ones of a word, by the log-probabilities of tokens:
    more uniformly with a lower `amount`.

    Source: Kudo 2018, section 3.2.
    """

    def __init__(
        self, best_splits: Callable[[str], list[list[int]]], log_probabilities: Sequence[float]
    ) -> None:
        self._best_splits = best_splits
        self._log_probabilities = log_probabilities
        self._splits: _Splits[tuple[str, int]] = _Splits()
        self._choices: dict[str, tuple[int, list[float]]] = {}
        self._amount = 0.0

    def draw(self, words: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """See `WordSampler`."""
        if amount != self._amount or len(self._splits) > _CACHED_SPLITS:
            self._splits, self._choices, self._amount = _Splits(), {}, amount
        for word in set(words).difference(self._choices):
            self._choices[word] = self._choices_of(word)
        numbers = []
        random_numbers = np.random.default_rng(seed).random(len(words)).tolist()
        for word, number in zip(words, random_numbers, strict=True):
            first, weights = self._choices[word]
            numbers.append(first + bisect.bisect_right(weights, number * weights[-1]))
        return self._splits.take(np.array(numbers, np.int64))

    def _choices_of(self, word: str) -> tuple[int, list[float]]:
        """Returns the number of the best segmentation, which others follow, and summed weights."""
        splits = self._best_splits(word)
        numbers = [self._splits.add((word, index), ids) for index, ids in enumerate(splits)]
        scores = np.array([sum(self._log_probabilities[id] for id in ids) for ids in splits])
        return numbers[0], np.exp(self._amount * (scores - scores[0])).cumsum().tolist()
