"""Packing of several sentence pairs into one row, to reduce padding.

A row holds complete pairs, concatenated. Source and target rows may have different lengths; the two
sentences of a pair are in the same row of both sides and have the same segment id, to which
attention is restricted.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.data.machine_code import compiled, spans

_CHUNK = 1 << 16
"""Number of pairs in a chunk of lengths."""

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
        return cls.of_lengths(np.concatenate([part.tokens for part in parts]), lengths)

    @classmethod
    def join_spans(cls, spans: Sequence[tuple["Sentences", int, int]]) -> "Sentences":
        """Concatenates spans of ragged arrays, from the first sentence to before the last."""
        tokens = [each.tokens[each.offsets.item(a) : each.offsets.item(b)] for each, a, b in spans]
        offsets = [each.offsets[a : b + 1] for each, a, b in spans]
        # One call for all rows of a batch: the differences between spans are no lengths.
        seams = np.cumsum([len(each) for each in offsets])[:-1] - 1
        lengths = np.delete(np.diff(np.concatenate(offsets)), seams)
        return cls.of_lengths(np.concatenate(tokens), lengths)

    @classmethod
    def of_lengths(cls, tokens: np.ndarray, lengths: np.ndarray) -> "Sentences":
        """Divides concatenated sequences of these lengths."""
        return cls(tokens, _offsets(lengths))

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
        return Sentences(spans(self.tokens, starts, lengths), _offsets(lengths))

    def truncate(self, length: int, eos_id: int) -> "Sentences":
        """Truncates sentences to `length` tokens; an end token remains the last."""
        if self.lengths.max(initial=0) <= length:
            return self
        lengths = np.minimum(self.lengths, length)
        offsets = _offsets(lengths)
        tokens = spans(self.tokens, self.offsets[:-1], lengths)
        has_end = self.tokens[self.offsets[1:] - 1] == eos_id
        tokens[offsets[1:][has_end] - 1] = eos_id
        return Sentences(tokens, offsets)


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """Sentence pairs as ragged arrays, each of which has an entry per pair."""

    sources: Sentences | None
    """None for a language model."""
    targets: Sentences
    fields: Mapping[str, Sentences] = dataclasses.field(default_factory=dict)
    """What each pair has beside them, by name, see `pair_fields`."""

    @property
    def arrays(self) -> dict[str, Sentences]:
        """The ragged arrays by name: "sources" (unless None), "targets" and those of the fields."""
        sides = {"targets": self.targets, **self.fields}
        return sides if self.sources is None else {"sources": self.sources, **sides}

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target lengths, int64 [pairs] each; sources of language models have 0."""
        targets = self.targets.lengths
        return np.zeros_like(targets) if self.sources is None else self.sources.lengths, targets

    def chunks_of_lengths(self) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
        """Yields the number of a pair, and `lengths` from there on, of all pairs, in turn.

        The lengths of all pairs of a large corpus do not belong in memory.
        """
        for first in range(0, len(self.targets), _CHUNK):
            chunk = slice(first, first + _CHUNK + 1)
            pairs = _each(lambda side: Sentences(side.tokens, side.offsets[chunk]), self)  # noqa: B023
            yield first, pairs.lengths

    def take(self, indices: np.ndarray) -> "TokenPairs":
        """Copies the pairs with these indices, int [taken]."""
        return _each(lambda side: side.take(indices), self)

    @staticmethod
    def join(parts: Sequence["TokenPairs"]) -> "TokenPairs":
        """Concatenates pairs, of which there must be at least one part."""
        return _each(lambda *sides: Sentences.join(sides), *parts)

    @staticmethod
    def join_spans(spans: Sequence[tuple["TokenPairs", int, int]]) -> "TokenPairs":
        """Concatenates spans of pairs, from the first number to before the last."""
        parts, firsts, lasts = zip(*spans, strict=True)
        return _each(
            lambda *sides: Sentences.join_spans([*zip(sides, firsts, lasts, strict=True)]), *parts
        )


def _each(function: Callable[..., Sentences], *parts: TokenPairs) -> TokenPairs:
    """Applies a function to the sources of all parts, their targets, and so on."""
    sources = [part.sources for part in parts if part.sources is not None]
    return TokenPairs(
        function(*sources) if sources else None,
        function(*(part.targets for part in parts)),
        {name: function(*(part.fields[name] for part in parts)) for name in parts[0].fields},
    )


def _fill_rows(
    sizes: Any,
    width: int,
    source_row_length: int,
    target_row_length: int,
    newest: Any,
    earlier: Any,
    placed: Any,
    counts: Any,
) -> int:
    """Fills rows sequentially, see `plan_rows`, and returns their number.

    Written for lists and arrays alike: as it is, and compiled by numba.

    Args:
      sizes: source length * width + target length of each pair, in the order of placement.
      width: more than the longest target.
      source_row_length: S.
      target_row_length: T.
      newest: for each size -1; used for the last pair of this size that is not placed yet.
      earlier: for each pair 0; used for the one of the same size before it, or -1.
      placed: receives the pairs, row by row.
      counts: receives the number of pairs in each row.
    """
    count = len(sizes)
    longest_source = len(newest) // width - 1
    longest_target = width - 1
    for pair in range(count):
        earlier[pair] = newest[sizes[pair]]
        newest[sizes[pair]] = pair
    first, taken, rows = 0, 0, 0
    while taken < count:
        source_space, target_space = source_row_length, target_row_length
        while True:
            # Skips sizes whose pairs were all taken out of order.
            while first < count and newest[sizes[first]] < 0:
                first += 1
            fit, partner = -1, -1
            for pair in range(first, min(first + _CANDIDATES, count)):
                size = sizes[pair]
                if newest[size] < 0:
                    continue
                source_rest = source_space - size // width
                target_rest = target_space - size % width
                if source_rest < 0 or target_rest < 0:
                    continue
                if fit < 0:
                    fit = size
                if source_rest <= longest_source and target_rest <= longest_target:
                    rest = source_rest * width + target_rest
                    # Two of the same size are needed if both are equal.
                    if newest[rest] >= 0 and (rest != size or earlier[newest[size]] >= 0):
                        fit, partner = size, rest
                        break
            if fit < 0:
                # The size with the most tokens in total that fits.
                most = 0
                for target in range(min(target_space, longest_target), 0, -1):
                    source = min(source_space, longest_source)
                    if source_space + target <= most:
                        break
                    while source + target > most and source >= 0:
                        if newest[source * width + target] >= 0:
                            most, fit = source + target, source * width + target
                        source -= 1
            if fit < 0:
                break
            for size in (fit, partner):
                if size >= 0:
                    pair = newest[size]
                    newest[size] = earlier[pair]
                    placed[taken] = pair
                    taken += 1
                    counts[rows] += 1
                    source_space -= size // width
                    target_space -= size % width
        rows += 1
    return rows


def plan_rows(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    source_row_length: int,
    target_row_length: int,
    order: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns all pairs to rows.

    Rows are filled sequentially: with the next pairs, and finally, if possible, with two pairs that
    fill the row exactly on both sides. While many pairs are left, such a combination nearly always
    exists (one lookup per candidate finds it), so only the last of many hundred rows have gaps. If
    nothing of the next pairs fits, the largest pair that does is taken. A random order fills rows
    better than an order by length.

    With numba, which the extras for accelerators install, this takes a fortieth of the time.

    Args:
      source_lengths: int [pairs], at most S; zeros without a source side.
      target_lengths: int [pairs], from 1 to T.
      source_row_length: S.
      target_row_length: T.
      order: int [pairs], the permutation in which pairs are placed. Default: ascending.

    Returns:
      The indices of the pairs, int64 [pairs], row by row, and how many each row has, int64 [rows].
    """
    _check_lengths(source_lengths, source_row_length)
    _check_lengths(target_lengths, target_row_length)
    order = np.arange(len(target_lengths)) if order is None else order
    width = int(target_lengths.max(initial=0)) + 1
    sizes = source_lengths[order].astype(np.int64) * width + target_lengths[order]
    newest = np.full((int(source_lengths.max(initial=0)) + 1) * width, -1)
    arrays = [newest, *(np.zeros(len(order), np.int64) for _ in range(3))]
    arguments: list[Any] = [sizes, width, source_row_length, target_row_length, *arrays]
    fill_rows = compiled(_fill_rows)
    if fill_rows is None:
        # Elements of lists are faster to access in Python.
        arguments = [each.tolist() if isinstance(each, np.ndarray) else each for each in arguments]
        fill_rows = _fill_rows
    rows = fill_rows(*arguments)
    placed, counts = (np.array(each, np.int64) for each in arguments[-2:])
    return order[placed], counts[:rows]


def _check_lengths(lengths: np.ndarray, row_length: int) -> None:
    longest = lengths.max(initial=0)
    if longest > row_length:
        raise ValueError(f"a sentence of {longest} tokens does not fit into rows of {row_length}")


class BatchShape(NamedTuple):
    """The shape of a batch, for which a training step is compiled."""

    rows: int
    """B."""
    source_length: int
    """S; unused by language models."""
    target_length: int
    """T."""


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


def pack(sentences: Sentences, counts: np.ndarray, row_length: int, pad_id: int) -> PackedRows:
    """Packs sentences in the order of B rows, of which each has a number, int [B], and fits."""
    fill = np.diff(sentences.offsets[_offsets(counts)])
    used = np.arange(row_length) < fill[:, np.newaxis]
    packed = PackedRows(
        tokens=np.full(used.shape, pad_id, np.int32),
        segment_ids=np.zeros(used.shape, np.int32),
        positions=np.zeros(used.shape, np.int32),
    )
    lengths = sentences.lengths
    packed.tokens[used] = sentences.tokens
    packed.segment_ids[used] = np.repeat(1 + _count_up(counts), lengths)
    packed.positions[used] = _count_up(lengths)
    return packed


def _count_up(lengths: np.ndarray) -> np.ndarray:
    """Concatenates `arange(length)` for each length: [2, 3] gives [0, 1, 0, 1, 2]."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Returns the offsets of segments with these lengths: [2, 3] gives [0, 2, 5]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def decoder_inputs(targets: PackedRows, bos_id: int, pad_id: int) -> np.ndarray:
    """Shifts targets right to obtain the decoder inputs, int32 [B, T].

    Each segment starts with `bos_id` (-1 if decoding starts from the zero vector), followed by its
    own tokens except the last, so that no token crosses a segment boundary.
    """
    inputs = np.roll(targets.tokens, 1, axis=1)
    inputs[targets.positions == 0] = bos_id
    inputs[targets.segment_ids == 0] = pad_id
    return inputs
