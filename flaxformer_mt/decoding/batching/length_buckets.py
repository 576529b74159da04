"""Sentences into batches of few shapes.

A sentence's shape follows from its own length alone, never from what else is translated, so that
neither its result nor the number of compilations depends on the company that it is in.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError

SHORTEST_BUCKET = 16


class Bucket(NamedTuple):
    """Sentences that are computed together."""

    length: int
    """Tokens in a row."""
    num_rows: int
    """B, the same for every bucket of this length; rows without sentence are padding."""
    indices: list[int]
    """Which sentences."""


def plan_buckets(
    lengths: Sequence[int], batch_tokens: int, model: TransformerConfig, first: int = 1
) -> list[Bucket]:
    """Groups sentences of similar length, the longest first.

    Row lengths are 16, 32, 64, ... tokens, as far as needed; the last is what a learned position
    table holds.

    Args:
      lengths: tokens of each sentence, end token included. Those of length 0 are left out.
      batch_tokens: tokens in a bucket, padding included; a longer sentence gets one of its own.
      model: which positions it knows.
      first: number of the first sentence, for messages.

    Raises:
      UserError: a sentence is longer than the position table.
    """
    limit = longest_sentence(model)
    groups: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if limit is not None and lengths[index] > limit:
            raise UserError(
                f"sentence {index + first} has {lengths[index]} tokens, but the model knows only "
                f"model.max_length={limit} positions: split it"
            )
        if lengths[index] > 0:
            groups.setdefault(row_length(lengths[index], limit), []).append(index)
    buckets = []
    for length, indices in groups.items():
        num_rows = max(1, batch_tokens // length)
        for start in range(0, len(indices), num_rows):
            buckets.append(Bucket(length, num_rows, indices[start : start + num_rows]))
    return buckets


def longest_sentence(model: TransformerConfig) -> int | None:
    """Tokens of the longest sentence that the model can represent; None = any."""
    return model.max_length if model.position_kind == "learned" else None


def fill_rows(sequences: Sequence[Sequence[int]], bucket: Bucket, pad_id: int) -> np.ndarray:
    """A bucket's token sequences as int32 [B, length]; what is left over is padding."""
    rows = np.full((bucket.num_rows, bucket.length), pad_id, np.int32)
    for row, index in zip(rows, bucket.indices, strict=False):
        row[: len(sequences[index])] = sequences[index]
    return rows


def row_length(length: int, limit: int | None, shortest: int = SHORTEST_BUCKET) -> int:
    """Tokens of the row that a sentence of `length` tokens, at most `limit`, gets."""
    row = shortest
    while row < length:
        row *= 2
    return row if limit is None else min(row, limit)
