"""Packing of several sentence pairs into one row, to reduce padding.

A row holds complete pairs, concatenated. Source and target rows may have different lengths; the two
sentences of a pair are in the same row of both sides and have the same segment id, to which
attention is restricted.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_CANDIDATES = 16
"""Number of pairs considered for the next position. More of them fill rows better, but slower."""


@dataclasses.dataclass(frozen=True)
class Sentences:
    """A ragged array of token sequences, stored end to end.

    Attributes:
      tokens: int32 [all tokens].
      offsets: int64 [sentences + 1]; sentence i is `tokens[offsets[i]:offsets[i + 1]]`.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_lists(cls, sentences: Sequence[Sequence[int]]) -> "Sentences":
        """Concatenates sequences of tokens."""
        offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        tokens = itertools.chain.from_iterable(sentences)
        return cls(np.fromiter(tokens, np.int32, offsets[-1]), offsets)

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> "Sentences":
        """Makes an array of UTF-8 texts, whose tokens are bytes, in uint8."""
        encoded = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    @classmethod
    def join(cls, parts: Sequence["Sentences"]) -> "Sentences":
        """Concatenates ragged arrays, of which there must be at least one."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.tokens for part in parts]), _offsets(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each sentence, int64 [sentences]."""
        return np.diff(self.offsets)

    def take(self, indices: np.ndarray) -> "Sentences":
        """Copies the sentences with these indices, int [taken]."""
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        return Sentences(self.tokens[_ranges(starts, lengths)], _offsets(lengths))

    def truncate(self, length: int, eos_id: int) -> "Sentences":
        """Copies all sentences, truncated to `length` tokens; an end token remains the last."""
        lengths = np.minimum(self.lengths, length)
        offsets = _offsets(lengths)
        tokens = self.tokens[_ranges(self.offsets[:-1], lengths)]
        has_end = self.tokens[self.offsets[1:] - 1] == eos_id
        tokens[offsets[1:][has_end] - 1] = eos_id
        return Sentences(tokens, offsets)


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """Sentence pairs as ragged arrays, each of which has an entry per pair."""

    sources: Sentences | None
    """None for a language model."""
    targets: Sentences
    links: Sentences | None = None
    """The links of the tokens, from `LinkEncoder`; None without alignments."""
    texts: Sentences | None = None
    """The UTF-8 text of each source, for `data.subword_sampling`; otherwise None."""

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target lengths, int64 [pairs] each; sources of language models have 0."""
        targets = self.targets.lengths
        return np.zeros_like(targets) if self.sources is None else self.sources.lengths, targets

    def take(self, indices: np.ndarray) -> "TokenPairs":
        """Copies the pairs with these indices, int [taken]."""
        return _each(lambda side: side.take(indices), self)

    @staticmethod
    def join(parts: Sequence["TokenPairs"]) -> "TokenPairs":
        """Concatenates pairs, of which there must be at least one part."""
        return _each(lambda *sides: Sentences.join(sides), *parts)


def _each(function: Callable[..., Sentences], *parts: TokenPairs) -> TokenPairs:
    """Applies a function to the sources of all parts, their targets, and so on."""
    results: dict[str, Any] = {}
    for field in dataclasses.fields(TokenPairs):
        sides = [getattr(part, field.name) for part in parts]
        is_present = all(side is not None for side in sides)
        results[field.name] = function(*sides) if is_present else None
    return TokenPairs(**results)


class _Unplaced:
    """The pairs that are not yet assigned to a row, indexed by size, in the given order.

    A size encodes the two lengths of a pair as one number, `source * radix + target`; so does the
    free space of a row. The radix is large enough for differences: if a length would become
    negative, the difference is not a valid size.
    """

    def __init__(self, pairs: list[int], sizes: list[int], radix: int):
        self._radix = radix
        self._longest_target = radix // 2 - 1
        self._pairs: dict[int, list[int]] = {}
        for pair, size in zip(pairs, sizes, strict=True):
            self._pairs.setdefault(size, []).append(pair)
        # Bit s of entry t is set while there are pairs of s source and t target tokens.
        self._source_lengths = [0] * (self._longest_target + 1)
        for size in self._pairs:
            self._flip(size)
        self._queue = sizes
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def take(self, size: int) -> int:
        """Removes and returns a pair of this size, which must exist."""
        pairs = self._pairs[size]
        pair = pairs.pop()
        if not pairs:
            del self._pairs[size]
            self._flip(size)
        return pair

    def choose(self, space: int) -> tuple[int, ...]:
        """Returns the sizes of the next one or two pairs that fit into the free space of a row.

        Preferred are a candidate and another pair that together fill the space exactly on both
        sides; otherwise the first candidate that fits; otherwise the largest pair that fits.
        """
        pairs, queue = self._pairs, self._queue
        # Skips sizes whose pairs were all taken out of order.
        while self._next < len(queue) and queue[self._next] not in pairs:
            self._next += 1
        fit = None
        for size in queue[self._next : self._next + _CANDIDATES]:
            if size not in pairs:
                continue
            rest = space - size
            if rest in pairs and (rest != size or len(pairs[size]) > 1):
                return size, rest
            if fit is None and rest >= 0 and rest % self._radix <= self._longest_target:
                fit = size
        if fit is None:
            fit = self._largest(space)
        return () if fit is None else (fit,)

    def _largest(self, space: int) -> int | None:
        """Returns the size with the most tokens in total that fits into `space`."""
        source_space, target_space = divmod(space, self._radix)
        up_to_source_space = (2 << source_space) - 1
        most, largest = 0, None
        for target in range(target_space, 0, -1):
            if source_space + target <= most:
                break
            sources = self._source_lengths[target] & up_to_source_space
            source = sources.bit_length() - 1
            if sources and source + target > most:
                most, largest = source + target, source * self._radix + target
        return largest

    def _flip(self, size: int) -> None:
        source, target = divmod(size, self._radix)
        self._source_lengths[target] ^= 1 << source


def plan_rows(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    source_row_length: int,
    target_row_length: int,
    order: np.ndarray | None = None,
) -> list[list[int]]:
    """Assigns all pairs to rows, and returns the indices of the pairs in each row.

    Rows are filled sequentially: with the next pairs, and finally, if possible, with two pairs that
    fill the row exactly on both sides. While many pairs are left, such a combination nearly always
    exists (one dictionary lookup per candidate finds it), so only the last of many thousand rows
    have gaps. A random order fills rows better than an order by length.

    Args:
      source_lengths: int [pairs], at most S; zeros without a source side.
      target_lengths: int [pairs], from 1 to T.
      source_row_length: S.
      target_row_length: T.
      order: int [pairs], the permutation in which pairs are placed. Default: ascending.
    """
    _check_lengths(source_lengths, source_row_length)
    _check_lengths(target_lengths, target_row_length)
    order = np.arange(len(target_lengths)) if order is None else order
    radix = 2 * (target_row_length + 1)
    sizes = source_lengths[order].astype(np.int64) * radix + target_lengths[order]
    unplaced = _Unplaced(order.tolist(), sizes.tolist(), radix)
    rows: list[list[int]] = []
    while unplaced:
        row: list[int] = []
        space = source_row_length * radix + target_row_length
        while chosen := unplaced.choose(space):
            row += map(unplaced.take, chosen)
            space -= sum(chosen)
        rows.append(row)
    return rows


def _check_lengths(lengths: np.ndarray, row_length: int) -> None:
    longest = lengths.max(initial=0)
    if longest > row_length:
        raise ValueError(f"a sentence of {longest} tokens does not fit into rows of {row_length}")


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """One side of a batch; each array is int32 [B, row length].

    Attributes:
      tokens: the concatenated sentences of each row, followed by padding.
      segment_ids: 1, 2, ... for the first, second, ... sentence of a row; 0 in padding.
      positions: 0, 1, ... in each sentence; 0 in padding.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def pack(
    sentences: Sentences, rows: Sequence[Sequence[int]], row_length: int, pad_id: int
) -> PackedRows:
    """Packs sentences, given by the indices of each of B rows, which must fit into its length."""
    counts = np.array([len(members) for members in rows])
    members = np.fromiter(itertools.chain.from_iterable(rows), np.int64, counts.sum())
    taken = sentences.take(members)
    lengths = taken.lengths
    # From here on, one entry per token.
    row = np.repeat(np.repeat(np.arange(len(rows)), counts), lengths)
    column = _count_up(np.bincount(row, minlength=len(rows)))

    shape = (len(rows), row_length)
    packed = PackedRows(
        tokens=np.full(shape, pad_id, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
    )
    packed.tokens[row, column] = taken.tokens
    packed.segment_ids[row, column] = np.repeat(1 + _count_up(counts), lengths)
    packed.positions[row, column] = _count_up(lengths)
    return packed


def _count_up(lengths: np.ndarray) -> np.ndarray:
    """Concatenates `arange(length)` for each length: [2, 3] gives [0, 1, 0, 1, 2]."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates ranges: starts [7, 1] and lengths [2, 3] give [7, 8, 1, 2, 3]."""
    return np.repeat(starts, lengths) + _count_up(lengths)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Returns the offsets of segments with these lengths: [2, 3] gives [0, 2, 5]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def decoder_inputs(targets: PackedRows, bos_id: int, pad_id: int) -> np.ndarray:
    """Shifts targets right to obtain the decoder inputs, int32 [B, T].

    Each segment starts with `bos_id` (-1 if decoding starts from the zero vector), followed by its
    own tokens except the last, so that no token crosses a segment boundary.
    """
    shifted = np.roll(targets.tokens, 1, axis=1)
    inputs = np.where(targets.positions == 0, bos_id, shifted)
    return np.where(targets.segment_ids == 0, pad_id, inputs).astype(np.int32)
