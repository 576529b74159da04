"""Random segmentation of words into subwords, as a regularizer.

SentencePiece offers the same, but its random numbers differ between processes with the same seed
(version 0.2.3), so runs could not be resumed exactly. Pieces never cross a word boundary, so it is
sufficient to segment words.
"""

import abc
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flaxformer_mt.data.machine_code import compiled, spans

SPACE = "\u2581"
"""SentencePiece's symbol for a space, including the one that it prepends to a text."""

MOST_SPLITS = 64
"""Number of best segmentations from which a unigram model samples; others are far less likely."""

_CACHED = 2**21
"""Number of segmentations that are remembered; most text has few distinct words."""

_NONE = 2**62
"""More than any rank of a merge."""


class _Ragged:
    """Sequences as a ragged array that grows.

    Attributes:
      values: those of all sequences, in a row, with room for more.
      ends: sequence i has the values from `ends[i]` to `ends[i + 1]`, int64, with room for more.
      count: number of sequences.
    """

    def __init__(self, dtype: type) -> None:
        self.values: np.ndarray = np.zeros(1, dtype)
        self.ends, self.count = np.zeros(1, np.int64), 0

    def make_room(self, values: int, sequences: int) -> None:
        """Prepares for so many more."""
        self.values = _with_room(self.values, int(self.ends[self.count]) + values)
        self.ends = _with_room(self.ends, self.count + sequences + 1)

    def extend(self, values: np.ndarray, lengths: np.ndarray) -> None:
        """Adds sequences of these lengths."""
        self.make_room(len(values), len(lengths))
        start, first = int(self.ends[self.count]), self.count + 1
        self.values[start : start + len(values)] = values
        self.ends[first : first + len(lengths)] = start + np.cumsum(lengths)
        self.count += len(lengths)

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values of sequences, in a row, and their lengths, int64 [N]."""
        starts = self.ends[numbers]
        lengths = self.ends[numbers + 1] - starts
        return spans(self.values, starts, lengths), lengths


def _with_room(values: np.ndarray, size: int) -> np.ndarray:
    missing = size - len(values)
    return values if missing <= 0 else np.append(values, np.empty(missing + size, values.dtype))


class _Words:
    """Numbers the distinct words of texts."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        # For machine code: the UTF-8 words with their spaces, and a hash table of their numbers.
        self._spelled = _Ragged(np.uint8)
        self._slots = np.full(2, -1)

    def number(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Divides texts into words; each begins with a space.

        Returns:
          The numbers of the words, int64, in a row; how many each text has, int64 [texts]; and the
          words that are new, without spaces, by ascending number.
        """
        if compiled(_number_words) is None:
            words = [text.split(SPACE)[1:] for text in texts]
            known, numbers = len(self._numbers), self._numbers
            each = [numbers.setdefault(word, len(numbers)) for word in itertools.chain(*words)]
            new = [*itertools.islice(numbers, known, None)]
            return np.array(each, np.int64), np.array([*map(len, words)], np.int64), new
        encoded = [text.encode() for text in texts]
        known = self._spelled.count
        found, counts = self._number(b"".join(encoded), np.cumsum([0, *map(len, encoded)])[1:])
        ends = self._spelled.ends[known : self._spelled.count + 1].tolist()
        spelled = self._spelled.values[ends[0] : ends[-1]].tobytes()
        new = [spelled[a - ends[0] : b - ends[0]].decode() for a, b in itertools.pairwise(ends)]
        return found, counts, [word[1:] for word in new]

    def _number(self, text: bytes, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        spelled, most = self._spelled, len(text) // len(SPACE.encode())
        if 2 * (spelled.count + most) > len(self._slots):
            # The known words are a text whose words have the same numbers in a larger table.
            known = spelled.values[: spelled.ends[spelled.count]].tobytes()
            self._slots = np.full(1 << (4 * (spelled.count + most)).bit_length(), -1)
            self._insert(known, np.array([len(known)]), 0, spelled.count)
        spelled.make_room(len(text), most)
        return self._insert(text, ends, spelled.count, most)

    def _insert(
        self, text: bytes, ends: np.ndarray, known: int, most: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers at most so many words, of which those below `known` are in the table."""
        numbers, counts = np.empty(most, np.int64), np.zeros(len(ends), np.int64)
        number_words: Any = compiled(_number_words)
        table = self._slots, self._spelled.values, self._spelled.ends
        values = np.frombuffer(text, np.uint8)
        self._spelled.count = number_words(values, ends, *table, known, numbers, counts)
        return numbers[: counts.sum()], counts


def _number_words(
    text: Any,
    ends: Any,
    slots: Any,
    spelled: Any,
    bounds: Any,
    count: int,
    numbers: Any,
    counts: Any,
) -> int:
    """Numbers words, see `_Words`. Written for numba.

    Args:
      text: of all texts, in UTF-8.
      ends: of each text.
      slots: hash table of the numbers of known words, or -1; at least half of it remains empty.
      spelled: receives new words after those that are known.
      bounds: of known words in `spelled`, with room for more.
      count: how many are known.
      numbers: receives the number of each word.
      counts: receives the number of words in each text.

    Returns:
      How many words are known now.
    """
    found, position = 0, 0
    for index in range(len(ends)):
        start, hashed, end = -1, 0, ends[index]
        while position <= end:
            is_space = (
                position + 2 < end
                and text[position] == 0xE2
                and text[position + 1] == 0x96
                and text[position + 2] == 0x81
            )
            if start >= 0 and (is_space or position == end):
                slot = (hashed ^ hashed >> 29) & len(slots) - 1
                while slots[slot] >= 0:
                    first, same = bounds[slots[slot]], start
                    if bounds[slots[slot] + 1] - first == position - start:
                        while same < position and spelled[first + same - start] == text[same]:
                            same += 1
                        if same == position:
                            break
                    slot = slot + 1 & len(slots) - 1
                if slots[slot] < 0:
                    slots[slot] = count
                    first, count = bounds[count], count + 1
                    bounds[count] = first + position - start
                    for character in range(start, position):
                        spelled[first + character - start] = text[character]
                numbers[found] = slots[slot]
                counts[index] += 1
                found += 1
            if position == end:
                break
            if is_space:
                start, hashed = position, 0
                position += 3
            else:
                hashed = (hashed ^ text[position]) * 1_099_511_628_211  # FNV-1a.
                position += 1
    return count


class WordSampler(abc.ABC):
    """Draws segmentations of the words of texts at random."""

    def __init__(self) -> None:
        self._words = _Words()
        self._splits = _Ragged(np.int32)

    def draw(self, texts: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of all texts, int32, in a row, and how many each has, int64 [N].

        Each word of a text begins with a space. `amount` is that of `Tokenizer.sample`.
        """
        if self._splits.count > _CACHED:
            self._forget()
        numbers, counts, new = self._words.number(texts)
        if new:
            self._learn(new, amount)
        tokens, lengths = self._draw(numbers, seed, amount)
        ends = np.concatenate([[0], lengths.cumsum()])[np.cumsum([0, *counts])]
        return tokens, np.diff(ends)

    def sample(self, words: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """Returns the token ids of each word."""
        return as_lists(*self.draw([SPACE + word for word in words], seed, amount))

    def _forget(self) -> None:
        """Forgets all words."""
        self._words, self._splits = _Words(), _Ragged(np.int32)

    @abc.abstractmethod
    def _learn(self, words: Sequence[str], amount: float) -> None:
        """Prepares for words that have the next numbers."""

    @abc.abstractmethod
    def _draw(self, numbers: np.ndarray, seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of all words, in a row, and how many each has, int64 [N]."""


def as_lists(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Divides tokens that are in a row."""
    ends = lengths.cumsum().tolist()
    values = tokens.tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _in_a_row(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Inverts `as_lists`."""
    lengths = np.array([*map(len, sequences)], np.int64)
    values = itertools.chain.from_iterable(sequences)
    return np.fromiter(values, np.int32, lengths.sum()), lengths


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
      prefix: text before every word in place of its space.
    """

    def __init__(
        self,
        ranks: Mapping[str, float],
        ids: Mapping[str, int],
        encode: Callable[[str], list[int]],
        whole: Sequence[str] = (),
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self._ids = ids
        self._encode = encode
        self._whole = tuple(whole)
        self._prefix = prefix

    def _learn(self, words: Sequence[str], amount: float) -> None:
        # Splits 2i and 2i + 1 of word i are the best one and the characters.
        texts = [self._prefix + word for word in words]
        are_sampled = [
            self._ids.keys() >= set(text) and not any(piece in text for piece in self._whole)
            for text in texts
        ]
        characters = [
            [self._ids[each] for each in text] if is_sampled else self._encode(word)
            for word, text, is_sampled in zip(words, texts, are_sampled, strict=True)
        ]
        none = np.full(len(words), _NONE), np.zeros(0, bool)
        *best, _ = self._split(*_in_a_row(characters), np.array(are_sampled), *none)
        splits = zip(as_lists(*best), characters, strict=True)
        self._splits.extend(*_in_a_row([*itertools.chain(*splits)]))

    def _draw(self, numbers: np.ndarray, seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        # One random number per word gives its first dropped merge; most words have none.
        first_dropped = np.random.default_rng(seed).geometric(amount, size=len(numbers))
        best, characters, end = (self._splits.ends[2 * numbers + i] for i in range(3))
        # Each merge leaves one piece less.
        further_merges = end - characters - (characters - best) - first_dropped
        is_split = further_merges >= 0
        words = *self._splits.take(2 * numbers + is_split), is_split, first_dropped
        draws, used = int(further_merges[is_split].sum()), -1
        while used < 0:
            draws = 2 * draws + 1
            # The numbers of `random.Random`.
            chances = np.random.RandomState([seed]).random_sample(draws) < amount
            tokens, lengths, used = self._split(*words, chances)
        return tokens, lengths

    def _split(
        self, tokens: np.ndarray, lengths: np.ndarray, *others: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the pieces of words, how many each has, and what `_split_words` returns."""
        agenda = np.zeros((2, lengths.max(initial=0) + 1), np.int64)
        arguments: list[Any] = [tokens.copy(), lengths.copy(), *others, *agenda, *self._merges]
        split_words = compiled(_split_words)
        if split_words is None:
            # Elements of lists are faster to access in Python.
            arguments = [each.tolist() for each in arguments]
            split_words = _split_words
        used = split_words(*arguments)
        lengths = np.array(arguments[1], np.int64)
        return np.array(arguments[0][: lengths.sum()], np.int32), lengths, used

    @functools.cached_property
    def _merges(self) -> tuple[np.ndarray, ...]:
        """The merges of two pieces: four arrays.

        The merges of a left piece begin at its place in the first array; the others have the right
        pieces, in ascending order, the ranks, from 0 on, and the merged pieces.
        """
        names = sorted(self._ranks)
        _, ranks = np.unique([self._ranks[name] for name in names], return_inverse=True)
        merges = [
            (self._ids[name[:end]], self._ids[name[end:]], rank, self._ids[name])
            for name, rank in zip(names, ranks.tolist(), strict=True)
            for end in range(1, len(name))
            if name[:end] in self._ids and name[end:] in self._ids
        ]
        lefts, *others = np.array(sorted(merges), np.int64).reshape(-1, 4).T.copy()
        return np.searchsorted(lefts, np.arange(max(self._ids.values()) + 2)), *others


def _split_words(
    tokens: Any,
    lengths: Any,
    is_split: Any,
    first_dropped: Any,
    chances: Any,
    ranks: Any,
    merged: Any,
    firsts: Any,
    rights: Any,
    all_ranks: Any,
    all_merged: Any,
) -> int:
    """Merges the characters of words, with dropped merges.

    Written for lists and arrays alike: as it is, and compiled by numba.

    Args:
      tokens: of all words, in a row; those of the segmentations replace them.
      lengths: the number of tokens of each word; is changed.
      is_split: whether the tokens of a word are characters.
      first_dropped: the first merge of each word that is dropped.
      chances: whether further merges are dropped, in turn, bool.
      ranks: for the merges of a word, whose longest has one element less than this.
      merged: the same, for their pieces.
      firsts: see `BpeDropout._merges`, as for the others.
      rights: see there.
      all_ranks: see there.
      all_merged: see there.

    Returns:
      How many chances were used, or -1 if more are needed.
    """

    def propose(left: int, right: int, index: int, ranks: Any, merged: Any) -> None:
        """Notes the merge of two pieces at an index of a word, if there is one."""
        low, high = firsts[left], firsts[left + 1]
        while low < high:
            middle = (low + high) // 2
            if rights[middle] < right:
                low = middle + 1
            else:
                high = middle
        is_found = low < firsts[left + 1] and rights[low] == right
        ranks[index] = all_ranks[low] if is_found else _NONE
        merged[index] = all_merged[low] if is_found else 0

    used, start, end = 0, 0, 0
    for word in range(len(lengths)):
        count = lengths[word]
        for index in range(count):
            tokens[start + index] = tokens[end + index]
        end += count
        possible = 0
        if is_split[word]:
            for index in range(count - 1):
                propose(tokens[start + index], tokens[start + index + 1], index, ranks, merged)
        while is_split[word] and count > 1:
            # Words are short: a search among all merges takes less time than a heap.
            best = 0
            for index in range(1, count - 1):
                if ranks[index] < ranks[best]:
                    best = index
            if ranks[best] == _NONE:
                break
            possible += 1
            is_dropped = possible == first_dropped[word]
            if possible > first_dropped[word]:
                if used == len(chances):
                    return -1
                is_dropped = chances[used]
                used += 1
            if is_dropped:
                ranks[best] = _NONE
                continue
            count -= 1
            tokens[start + best] = merged[best]
            for index in range(best + 1, count):
                tokens[start + index] = tokens[start + index + 1]
                ranks[index], merged[index] = ranks[index + 1], merged[index + 1]
            for index in range(max(best - 1, 0), min(best + 1, count - 1)):
                propose(tokens[start + index], tokens[start + index + 1], index, ranks, merged)
        lengths[word] = count
        start += count
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
        self._log_probabilities = np.array(log_probabilities)
        self._amount = 0.0
        super().__init__()

    def _forget(self) -> None:
        super()._forget()
        self._weights = _Ragged(np.float64)  # Of the splits of each word, summed.

    def draw(self, texts: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """See `WordSampler`."""
        if amount != self._amount:
            self._forget()
            self._amount = amount
        return super().draw(texts, seed, amount)

    def _learn(self, words: Sequence[str], amount: float) -> None:
        of_words = [self._best_splits(word) for word in words]
        counts = np.array([*map(len, of_words)], np.int64)
        tokens, lengths = _in_a_row([*itertools.chain.from_iterable(of_words)])
        self._splits.extend(tokens, lengths)
        # Adds in turn, as `np.add.reduceat` does not.
        scores = np.bincount(
            np.repeat(np.arange(len(lengths)), lengths),
            self._log_probabilities[tokens],
            minlength=len(lengths),
        )
        firsts = np.cumsum(counts) - counts
        weights = np.exp(amount * (scores - np.repeat(scores[firsts], counts)))
        summed = [each.cumsum() for each in np.split(weights, firsts[1:])]
        self._weights.extend(np.concatenate(summed), counts)

    def _draw(self, numbers: np.ndarray, seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.random.default_rng(seed).random(len(numbers))
        choose: Any = compiled(_choose) or _choose
        splits = np.empty(len(numbers), np.int64)
        choose(numbers, chosen, self._weights.values, self._weights.ends, splits)
        return self._splits.take(splits)


def _choose(numbers: Any, chosen: Any, weights: Any, ends: Any, splits: Any) -> None:
    """Finds the splits of words whose random numbers were chosen. Written for numba.

    Arguments:
      numbers: of the words.
      chosen: a number from 0 to 1 for each.
      weights: those of the splits of each word, summed.
      ends: the ends of these, by the number of the word.
      splits: receives the numbers of the splits.
    """
    for index in range(len(numbers)):
        low, high = ends[numbers[index]], ends[numbers[index] + 1]
        wanted = chosen[index] * weights[high - 1]
        while low < high:
            middle = (low + high) // 2
            if weights[middle] <= wanted:
                low = middle + 1
            else:
                high = middle
        splits[index] = low
