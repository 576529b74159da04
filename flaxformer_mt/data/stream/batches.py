"""What a training step computes with: batches of rows, in the few shapes that a run declares.

A batch is made of rows, and a row of pairs that stand in it one after the other. Which pairs stand
together is decided elsewhere: for training by `stream.py`, for validation here.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import flax.struct
import jax
import numpy as np

from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.packing import PackedRows, Sentences, decoder_inputs, pack, plan_rows

Array: TypeAlias = np.ndarray | jax.Array


@flax.struct.dataclass
class Batch:
    """Packed rows; int32 but for the weights. A language model has None on the encoder side.

    Attributes:
      encoder_input_tokens: [B, S], each segment its source tokens and the end token.
      decoder_input_tokens: [B, T], each segment the start token and its target tokens.
      decoder_target_tokens: [B, T], each segment its target tokens and the end token.
      decoder_loss_weights: float32 [B, T], 1 where there is a target token, 0 in padding.
      encoder_segment_ids: [B, S], 1, 2, ... in the segments of a row, 0 in padding.
      decoder_segment_ids: [B, T], likewise; in a row, equal numbers make a pair.
      encoder_positions: [B, S], 0, 1, ... in each segment, 0 in padding.
      decoder_positions: [B, T], likewise.
    """

    encoder_input_tokens: Array | None
    decoder_input_tokens: Array
    decoder_target_tokens: Array
    decoder_loss_weights: Array
    encoder_segment_ids: Array | None
    decoder_segment_ids: Array
    encoder_positions: Array | None
    decoder_positions: Array


class BatchShape(NamedTuple):
    """The sizes of a batch: all that a step is compiled for."""

    rows: int
    """B."""
    source_length: int
    """S; means nothing to a language model."""
    target_length: int
    """T."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of every batch that one process reads: B / count rows, from index * B / count on."""

    index: int = 0
    """Which part, from 0."""
    count: int = 1
    """Parts in all."""

    def part(self, rows: int) -> slice:
        """Which of the rows of a batch these are.

        Raises:
          ValueError: `rows` cannot be divided evenly.
        """
        if rows % self.count:
            raise ValueError(f"{rows} rows cannot be divided evenly among {self.count} processes")
        return slice(self.index * rows // self.count, (self.index + 1) * rows // self.count)


WHOLE_BATCH = Shard()
"""What a process reads that is alone."""


class DataPosition(NamedTuple):
    """Where a stream of batches stands: what a run saves to go on with the batch after the last."""

    epoch: int = 0
    """Epochs that were read."""
    block: int = 0
    """Blocks of this epoch that were read."""
    row: int = 0
    """Rows of this block that were read."""


def padding_fraction(batch: Batch) -> float:
    """Share of a batch's source and target positions that hold no token."""
    sides = [
        side for side in (batch.encoder_segment_ids, batch.decoder_segment_ids) if side is not None
    ]
    tokens = sum(np.count_nonzero(side) for side in sides)
    return 1 - tokens / sum(side.size for side in sides)


def make_batch(
    sources: Sentences | None,
    targets: Sentences,
    rows: Sequence[Sequence[int]],
    shape: BatchShape,
    model: TransformerConfig,
    shard: Shard = WHOLE_BATCH,
) -> Batch:
    """Packs pairs into rows.

    Args:
      sources: the source side; None in a language model.
      targets: the target side.
      rows: the indices of the pairs in each row; rows that are missing are left empty.
      shape: of the whole batch.
      model: says which tokens are padding and start.
      shard: the part of the batch that is made.
    """
    rows = [*rows, *[()] * (shape.rows - len(rows))][shard.part(shape.rows)]
    packed_targets = pack(targets, rows, shape.target_length, model.pad_id)
    packed_sources: PackedRows | None = None
    if sources is not None:
        packed_sources = pack(sources, rows, shape.source_length, model.pad_id)
    return Batch(
        encoder_input_tokens=None if packed_sources is None else packed_sources.tokens,
        decoder_input_tokens=decoder_inputs(packed_targets, model.bos_id, model.pad_id),
        decoder_target_tokens=packed_targets.tokens,
        decoder_loss_weights=(packed_targets.segment_ids > 0).astype(np.float32),
        encoder_segment_ids=None if packed_sources is None else packed_sources.segment_ids,
        decoder_segment_ids=packed_targets.segment_ids,
        encoder_positions=None if packed_sources is None else packed_sources.positions,
        decoder_positions=packed_targets.positions,
    )


def packed_shape(config: ExperimentConfig) -> BatchShape:
    """The shape of packed batches: those of validation, and of training unless it has buckets."""
    return BatchShape(config.rows_per_batch, *config.data.row_lengths)


def pair_lengths(corpus: EncodedCorpus) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths, int64 [pairs] each; a language model has sources of length 0."""
    target_lengths = corpus.targets.lengths
    if corpus.sources is None:
        return np.zeros_like(target_lengths), target_lengths
    return corpus.sources.lengths, target_lengths


def evaluation_batches(
    corpus: EncodedCorpus,
    config: ExperimentConfig,
    row_shards: int = 1,
    shard: Shard = WHOLE_BATCH,
) -> list[Batch]:
    """Batches that hold every pair exactly once and whole, however long it is.

    Pairs that fit are packed into rows as in training, one shape. A longer pair has a row of its
    own, as long as the next power of two; batches of such rows have fewer of them, so that
    attention needs no more memory. What is left of the last batch of a shape is empty rows.

    Args:
      corpus: the pairs.
      config: the experiment.
      row_shards: devices that share the rows of a batch; of long rows there are at least as many.
      shard: the part of each batch that is wanted.
    """
    packed = packed_shape(config)
    source_lengths, target_lengths = pair_lengths(corpus)
    fits = (source_lengths <= packed.source_length) & (target_lengths <= packed.target_length)
    fitting = np.flatnonzero(fits)
    plan = plan_rows(
        source_lengths[fitting],
        target_lengths[fitting],
        packed.source_length,
        packed.target_length,
    )
    rows_by_shape = {packed: [fitting[row].tolist() for row in plan]}
    longest_side = np.maximum(source_lengths, target_lengths)
    for pair in np.flatnonzero(~fits).tolist():
        shape = _shape_of_long_rows(int(longest_side[pair]), packed, row_shards)
        rows_by_shape.setdefault(shape, []).append([pair])
    return [
        make_batch(
            corpus.sources,
            corpus.targets,
            rows[first : first + shape.rows],
            shape,
            config.model,
            shard,
        )
        for shape, rows in rows_by_shape.items()
        for first in range(0, len(rows), shape.rows)
    ]


def _shape_of_long_rows(longest: int, packed: BatchShape, row_shards: int) -> BatchShape:
    """The shape for a pair that has no room in packed rows: as much attention, in fewer rows."""
    length = 1 << (longest - 1).bit_length()
    attention = packed.rows * packed.source_length * packed.target_length
    rows_of_a_device = max(1, attention // (length * length * row_shards))
    return BatchShape(rows_of_a_device * row_shards, length, length)
