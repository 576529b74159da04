"""Length buckets: sentences grouped into batches of few shapes.

The shape for a sentence is a function of its own length, never of the other sentences, so that
neither its result nor the number of compilations depends on what else is in the batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError

MIN_ROW_LENGTH = 16


class Bucket(NamedTuple):
    """Sentences that are computed together."""

    length: int
    """Tokens per row."""
    num_rows: int
    """B, the same for every bucket of this length; rows without a sentence are padding."""
    indices: list[int]
    """Indices of the sentences."""


def plan_buckets(
    lengths: Sequence[int],
    batch_tokens: int,
    model: TransformerConfig,
    numbers: Sequence[int] | None = None,
) -> list[Bucket]:
    """Groups sentences of similar length, the longest first.

    Row lengths are 16, 32, 64, ... tokens, up to the size of a learned position table. Sentences of
    length 0 are skipped. A bucket has `batch_tokens`, padding included; a longer sentence gets its
    own. `numbers` are those of the sentences in error messages; None = from 1.

    Raises:
      UserError: a sentence is longer than the position table.
    """
    limit = model.longest_sentence
    groups: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if limit is not None and lengths[index] > limit:
            number = index + 1 if numbers is None else numbers[index]
            raise UserError(
                f"sentence {number} has {lengths[index]} tokens, but the position table "
                f"holds only model.max_length={limit}: split the sentence"
            )
        if lengths[index] > 0:
            groups.setdefault(row_length(lengths[index], limit), []).append(index)
    buckets = []
    for length, indices in groups.items():
        num_rows = max(1, batch_tokens // length)
        for start in range(0, len(indices), num_rows):
            buckets.append(Bucket(length, num_rows, indices[start : start + num_rows]))
    return buckets


def padded(sequences: Sequence[Sequence[int]], shape: tuple[int, int], fill: int) -> np.ndarray:
    """Returns token sequences as int32 of the given shape; `fill` follows each, and all of them."""
    rows = np.full(shape, fill, np.int32)
    for row, sequence in zip(rows, sequences, strict=False):
        row[: len(sequence)] = sequence
    return rows


def fill_rows(sequences: Sequence[Sequence[int]], bucket: Bucket, pad_id: int) -> np.ndarray:
    """Returns a bucket's token sequences as int32 [B, length], padded."""
    chosen = [sequences[index] for index in bucket.indices]
    return padded(chosen, (bucket.num_rows, bucket.length), pad_id)


def row_length(length: int, limit: int | None, shortest: int = MIN_ROW_LENGTH) -> int:
    """Returns the length of the row for a sentence of `length` tokens, at most `limit`."""
    row = shortest
    while row < length:
        row *= 2
    return row if limit is None else min(row, limit)


def longest_position(models: Sequence[TransformerConfig]) -> int | None:
    """Returns the maximum number of tokens that all models support; None = any."""
    limits = [limit for model in models if (limit := model.longest_sentence) is not None]
    return min(limits, default=None)
