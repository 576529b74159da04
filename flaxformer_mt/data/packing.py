"""Several sentence pairs in one row, so that few positions are padding.

A row holds whole pairs one after the other. Source and target have rows of their own lengths; the
two sentences of a pair stand in the same row of both and have the same segment number, which is
how attention is kept inside a pair.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

_ROWS_TRIED = 8
"""Open rows of equal target space that are tried for a pair before one with more space is."""


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Token sequences of different lengths, stored end to end.

    Attributes:
      tokens: int32 [all tokens].
      offsets: int64 [sentences + 1]; sentence i is `tokens[offsets[i]:offsets[i + 1]]`.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_lists(cls, sentences: Sequence[Sequence[int]]) -> "Sentences":
        """Stores `sentences` in their order."""
        offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        tokens = (token for sentence in sentences for token in sentence)
        return cls(np.fromiter(tokens, np.int32, offsets[-1]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each sentence, int64 [sentences]."""
        return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Which pairs stand in which row.

    Attributes:
      pairs: int64 [pairs]; indices of pairs, row after row, in the order in which they stand.
      offsets: int64 [rows + 1]; row r holds `pairs[offsets[r]:offsets[r + 1]]`.
    """

    pairs: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.pairs[self.offsets[row] : self.offsets[row + 1]]


class _OpenRows:
    """Rows with space left, found by their target space without a search over rows."""

    def __init__(self, target_row_length: int):
        # _by_space[k]: (row, source space) of the rows with k free target positions.
        self._by_space: list[list[tuple[int, int]]] = [[] for _ in range(target_row_length + 1)]
        # Bit k is set if _by_space[k] has any: its lowest set bit from a length on is the best fit.
        self._available = 0

    def add(self, row: int, source_space: int, target_space: int) -> None:
        self._by_space[target_space].append((row, source_space))
        self._available |= 1 << target_space

    def take(self, source_length: int, target_length: int) -> tuple[int, int, int] | None:
        """Removes the best fit, if there is any: its row, source space and target space."""
        sufficient = self._available >> target_length << target_length
        while sufficient:
            lowest_bit = sufficient & -sufficient
            target_space = lowest_bit.bit_length() - 1
            rows = self._by_space[target_space]
            for index in range(len(rows) - 1, max(len(rows) - 1 - _ROWS_TRIED, -1), -1):
                row, source_space = rows[index]
                if source_space >= source_length:
                    del rows[index]
                    if not rows:
                        self._available ^= lowest_bit
                    return row, source_space, target_space
            sufficient ^= lowest_bit
        return None


def plan_rows(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    source_row_length: int,
    target_row_length: int,
    order: np.ndarray | None = None,
) -> RowPlan:
    """Finds a row for every pair: the one with the least target space that the pair fits into.

    This is online best fit (Johnson 1973) over all rows begun so far, in two dimensions: target
    space ranks the rows, source space only has to suffice. A random order fills rows better than
    an order by length.

    Args:
      source_lengths: int [pairs], at most `source_row_length`; zeros if there is no source.
      target_lengths: int [pairs], from 1 to `target_row_length`.
      source_row_length: S.
      target_row_length: T.
      order: int [pairs], the permutation in which pairs are placed; as they come, if None.

    Raises:
      ValueError: a sentence is longer than its row.
    """
    _check_lengths(source_lengths, source_row_length)
    _check_lengths(target_lengths, target_row_length)
    order = np.arange(len(target_lengths)) if order is None else order
    rows: list[list[int]] = []
    open_rows = _OpenRows(target_row_length)
    for pair, source_length, target_length in zip(
        order.tolist(), source_lengths[order].tolist(), target_lengths[order].tolist(), strict=True
    ):
        fit = open_rows.take(source_length, target_length)
        if fit is None:
            fit = len(rows), source_row_length, target_row_length
            rows.append([])
        row, source_space, target_space = fit
        rows[row].append(pair)
        if target_space > target_length:
            open_rows.add(row, source_space - source_length, target_space - target_length)
    pairs = np.array([pair for row in rows for pair in row], np.int64)
    return RowPlan(pairs, np.cumsum([0, *map(len, rows)], dtype=np.int64))


def _check_lengths(lengths: np.ndarray, row_length: int) -> None:
    longest = lengths.max(initial=0)
    if longest > row_length:
        raise ValueError(f"a sentence of {longest} tokens does not fit into rows of {row_length}")


def shuffle_plan(plan: RowPlan, length_classes: np.ndarray, rng: np.random.Generator) -> RowPlan:
    """Lets pairs of equal lengths trade places at random: another plan with the same rows filled.

    So each epoch gets new neighbours in a row at the price of a sort, and all epochs have equally
    many rows.

    Args:
      plan: how the pairs were planned.
      length_classes: int [pairs]; pairs with equal numbers have equal source and target lengths.
      rng: decides who goes where.
    """
    shuffled = rng.permutation(len(plan.pairs))
    pairs = np.empty_like(plan.pairs)
    places_by_class = np.argsort(length_classes[plan.pairs], kind="stable")
    pairs[places_by_class] = shuffled[np.argsort(length_classes[shuffled], kind="stable")]
    return RowPlan(pairs, plan.offsets)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """One side of a batch; each array is int32 [B, row length].

    Attributes:
      tokens: the sentences of a row end to end, then padding.
      segment_ids: 1, 2, ... in the first, second, ... sentence of a row; 0 in padding.
      positions: 0, 1, ... in each sentence; 0 in padding.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def pack(
    sentences: Sentences, rows: Sequence[np.ndarray], row_length: int, pad_id: int
) -> PackedRows:
    """Writes the sentences whose indices `rows[b]` lists into row b, end to end.

    Args:
      sentences: where the tokens are.
      rows: B arrays of indices, int [sentences in the row]; an empty array gives an empty row.
      row_length: positions in a row; the sentences of a row must fit.
      pad_id: token of the positions that stay free.
    """
    counts = np.array([len(members) for members in rows])
    members = np.concatenate(rows)
    starts = sentences.offsets[members]
    lengths = sentences.offsets[members + 1] - starts
    # From here on one entry a token.
    row = np.repeat(np.repeat(np.arange(len(rows)), counts), lengths)
    column = _count_up(np.bincount(row, minlength=len(rows)))
    position = _count_up(lengths)

    shape = (len(rows), row_length)
    packed = PackedRows(
        tokens=np.full(shape, pad_id, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
    )
    packed.tokens[row, column] = sentences.tokens[np.repeat(starts, lengths) + position]
    packed.segment_ids[row, column] = np.repeat(1 + _count_up(counts), lengths)
    packed.positions[row, column] = position
    return packed


def _count_up(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... anew for each length: [2, 3] gives [0, 1, 0, 1, 2]."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def decoder_inputs(targets: PackedRows, bos_id: int, pad_id: int) -> np.ndarray:
    """What the decoder has read before each target token, int32 [B, T].

    Each segment starts with `bos_id` and goes on with its own tokens but the last, so that no
    token crosses a segment border.

    Args:
      targets: the target side, end tokens included.
      bos_id: start token; -1 if decoding starts from the zero vector.
      pad_id: token in padding.
    """
    shifted = np.roll(targets.tokens, 1, axis=1)
    inputs = np.where(targets.positions == 0, bos_id, shifted)
    return np.where(targets.segment_ids == 0, pad_id, inputs).astype(np.int32)
