"""Random segmentation of words into subwords, as a regularizer.

SentencePiece offers the same, but its random numbers differ between processes with the same seed
(version 0.2.3), so runs could not be resumed exactly. Pieces never cross a word boundary, so it is
sufficient to segment words.
"""

import abc
import array
import bisect
import functools
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from flaxformer_mt.data.machine_code import compiled

MOST_SPLITS = 64
"""Number of best segmentations from which a unigram model samples; others are far less likely."""

_CACHED_SPLITS = 500_000
# Bits of the priority of a merge, below its rank: more characters than a row has tokens.
_NAME_BITS, _PLACE_BITS = 20, 23
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

    def add(self, key: _Key | None, ids: Sequence[int], merges: int = 0) -> int:
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
        if key is not None:
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
      prefix: text before every word, which is left out of words that are given.
    """

    def __init__(
        self,
        ranks: Mapping[str, float],
        ids: Mapping[str, int],
        encode: Callable[[str], list[int]],
        whole: Sequence[str] = (),
        prefix: str = "",
    ) -> None:
        self._ranks = ranks
        self._ids = ids
        self._encode = encode
        self._whole = tuple(whole)
        self._prefix = prefix
        fits = len(ranks) < 1 << _NAME_BITS
        self._resplit: Any = compiled(_resplit) if fits else None
        self._splits: _Splits[str | tuple[str, tuple[int, ...]]] = _Splits()

    def draw(self, words: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """See `WordSampler`."""
        # One random number per word gives its first dropped merge; most words have none.
        first_dropped = np.random.default_rng(seed).geometric(amount, size=len(words))
        if len(self._splits) > _CACHED_SPLITS:
            self._splits = _Splits()
        numbers = self._best(words)
        possible = self._splits.merges[numbers]
        dropping = np.flatnonzero(first_dropped <= possible)
        if self._resplit is not None:
            numbers[dropping] += 1
            characters, lengths = self._splits.take(numbers)
            first_dropped, ends = first_dropped[dropping], lengths.cumsum()
            draws, used = int(possible[dropping].sum()), -1
            while used < 0:
                draws = 2 * draws + 1
                # The numbers of `random.Random`.
                chances = np.random.RandomState([seed]).random_sample(draws) < amount
                pieces, counts = characters.copy(), lengths.copy()
                words_in = dropping, first_dropped, ends[dropping]
                used = self._resplit(pieces, counts, words_in, chances, self._merges)
            places = np.arange(len(pieces)) - np.repeat(ends - lengths, lengths)
            return pieces[places < np.repeat(counts, lengths)], counts
        draw = random.Random(seed).random
        for index in dropping.tolist():
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
        try:
            return np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))
        except KeyError:
            for word in dict.fromkeys(word for word in words if word not in numbers):
                number = self._splits.add(word, *self._split_best(word))
                # The characters have the next number.
                text = self._prefix + word if self._splits.merges[number] else ""
                self._splits.add(None, [self._ids[each] for each in text])
            return self._best(words)

    @functools.cached_property
    def _merges(self) -> tuple[np.ndarray, ...]:
        """The merges of two pieces: four arrays.

        The merges of a left piece begin at its place in the first array; the second one has the
        right pieces, in ascending order, and the third one the priorities: lower ones come first,
        and of equal ones, that of the first place. Their lower bits are an index of the last array,
        the ids of merged pieces.
        """
        names = sorted(self._ranks)
        _, ranks = np.unique([self._ranks[name] for name in names], return_inverse=True)
        merges = [
            (
                self._ids[name[:end]],
                self._ids[name[end:]],
                int(rank) << _PLACE_BITS + _NAME_BITS | number,
            )
            for number, (name, rank) in enumerate(zip(names, ranks, strict=True))
            for end in range(1, len(name))
            if name[:end] in self._ids and name[end:] in self._ids
        ]
        lefts, rights, priorities = np.array(sorted(merges), np.int64).reshape(-1, 3).T.copy()
        firsts = np.searchsorted(lefts, np.arange(max(self._ids.values()) + 2))
        return firsts, rights, priorities, np.array([self._ids[name] for name in names], np.int32)

    def _split_best(self, word: str) -> tuple[list[int], int]:
        """Returns the ids of a word without dropped merges, and the number of merges."""
        text = self._prefix + word
        is_whole = any(piece in text for piece in self._whole)
        if is_whole or not self._ids.keys() >= set(text):
            return self._encode(word), 0
        return self._split_without(word, ())

    def _split_without(self, word: str, dropped: tuple[int, ...]) -> tuple[list[int], int]:
        """Returns the ids and the number of possible merges, without those of some numbers."""
        pieces = list(self._prefix + word)
        # Neighbors of the piece that starts at a character; merged pieces are set to "".
        left = list(range(-1, len(pieces) - 1))
        right = [*range(1, len(pieces)), -1]
        agenda: list[tuple[float, int, str]] = []

        def propose(start: int) -> None:
            if start >= 0 and right[start] >= 0:
                merged = pieces[start] + pieces[right[start]]
                if merged in self._ranks:
                    heapq.heappush(agenda, (self._ranks[merged], start, merged))

        for start in range(len(pieces)):
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


def _resplit(pieces: Any, counts: Any, dropping: Any, chances: Any, merges: Any) -> int:
    """Merges the characters of words, with dropped merges. Written for numba.

    Args:
      pieces: ids of the characters, int32; those of the segmentations take their places.
      counts: numbers of the pieces of all words; those of some words are changed.
      dropping: which words, the first dropped merge of each, and the end of its characters.
      chances: whether further merges are dropped, in turn, bool.
      merges: from `BpeDropout._merges`.

    Returns:
      How many chances were used, or -1 if more are needed.
    """
    firsts, rights, priorities, ids = merges

    def key(left: int, right: int, place: int) -> int:
        """Returns the priority of a merge at a place, or -1 if there is none."""
        first, last = firsts[left], firsts[left + 1]
        found = first + np.searchsorted(rights[first:last], right)
        if found == last or rights[found] != right:
            return -1
        return priorities[found] | place << _NAME_BITS

    before, after = np.empty(len(pieces), np.int64), np.empty(len(pieces), np.int64)
    agenda = [0]
    used = 0
    for word, first, stop in zip(*dropping):  # noqa: B905
        own = pieces[stop - counts[word] : stop]
        count = len(own)
        agenda.clear()
        for place in range(count):
            before[place], after[place] = place - 1, place + 1
            if place + 1 < count:
                heapq.heappush(agenda, key(own[place], own[place + 1], place))
        possible = 0
        while agenda:
            merge = heapq.heappop(agenda)
            if merge < 0:
                continue
            place = merge >> _NAME_BITS & (1 << _PLACE_BITS) - 1
            end = after[place]
            if own[place] < 0 or end == count or key(own[place], own[end], place) != merge:
                continue  # One of the two has since been merged with another piece.
            possible += 1
            if possible == first:
                continue
            if possible > first:
                if used == len(chances):
                    return -1
                used += 1
                if chances[used - 1]:
                    continue
            own[place], own[end] = ids[merge & (1 << _NAME_BITS) - 1], -1
            after[place] = after[end]
            if after[place] < count:
                before[after[place]] = place
                heapq.heappush(agenda, key(own[place], own[after[place]], place))
            if before[place] >= 0:
                heapq.heappush(agenda, key(own[before[place]], own[place], before[place]))
        counts[word] = 0
        for piece in own:
            if piece >= 0:
                own[counts[word]] = piece
                counts[word] += 1
    return used


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
        self._splits: _Splits[str] = _Splits()
        self._choices: dict[str, tuple[int, array.array[float]]] = {}
        self._amount = 0.0

    def draw(self, words: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """See `WordSampler`."""
        if amount != self._amount or len(self._splits) > 4 * _CACHED_SPLITS:
            self._splits, self._choices, self._amount = _Splits(), {}, amount
        for word in set(words).difference(self._choices):
            self._choices[word] = self._choices_of(word)
        numbers = []
        random_numbers = np.random.default_rng(seed).random(len(words)).tolist()
        for word, number in zip(words, random_numbers, strict=True):
            first, weights = self._choices[word]
            numbers.append(first + bisect.bisect_right(weights, number * weights[-1]))
        return self._splits.take(np.array(numbers, np.int64))

    def _choices_of(self, word: str) -> tuple[int, "array.array[float]"]:
        """Returns the number of the best segmentation, which others follow, and summed weights."""
        splits = self._best_splits(word)
        numbers = [self._splits.add(None, ids) for ids in splits]
        scores = np.array([sum(self._log_probabilities[id] for id in ids) for ids in splits])
        weights = np.exp(self._amount * (scores - scores[0])).cumsum()
        return numbers[0], array.array("d", weights)
