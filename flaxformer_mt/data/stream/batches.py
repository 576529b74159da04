"""Batches of packed token rows, in the few shapes that a run declares.

A batch consists of rows, and each row of one or more concatenated pairs. The rows of training
batches are planned in `training_stream`, those of evaluation batches here.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import flax.struct
import jax
import numpy as np

from flaxformer_mt import distributed
from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.config.relations import ROWS
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.packing import (
    BatchShape,
    TokenPairs,
    decoder_inputs,
    pack,
    plan_rows,
)
from flaxformer_mt.data.stream.pair_fields import field_of
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import checked

Array: TypeAlias = np.ndarray | jax.Array

MAX_LOGITS = 2**27
"""Logits of an evaluation batch on each device, 0.5 GiB in float32, unless a single row has more.
"""


@flax.struct.dataclass
class Batch:
    """A batch of packed token rows.

    Arrays are int32 unless stated otherwise. The encoder fields are None for a language model.

    Attributes:
      encoder_input_tokens: [B, S], the source tokens and end token of each segment.
      decoder_input_tokens: [B, T], the start token and target tokens of each segment.
      decoder_target_tokens: [B, T], the target tokens and end token of each segment.
      decoder_loss_weights: float32 [B, T], 1 for target tokens, or the weight of their pair; 0 in
        padding.
      encoder_segment_ids: [B, S], 1, 2, ... for the segments of a row, 0 in padding.
      decoder_segment_ids: [B, T], the same; equal ids in a row belong to the same pair.
      encoder_positions: [B, S], 0, 1, ... in each segment, 0 in padding.
      decoder_positions: [B, T], the same.
      alignment: float32 [B, T, S], for each target token with links a uniform distribution over the
        source tokens that it is linked to, 0 elsewhere; None if the corpus has no links.
      columns: float32 [B, T] by name, see `read_pairs(columns=)`: row b has the number of segment s
        at [b, s - 1], 0 beyond the last segment.
    """

    encoder_input_tokens: Array | None
    decoder_input_tokens: Array
    decoder_target_tokens: Array
    decoder_loss_weights: Array
    encoder_segment_ids: Array | None
    decoder_segment_ids: Array
    encoder_positions: Array | None
    decoder_positions: Array
    alignment: Array | None = None
    columns: Mapping[str, Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of each batch that one process reads: B / count rows, from index * B / count on."""

    index: int = 0
    """0-based index of the part."""
    count: int = 1

    def part(self, rows: int) -> slice:
        """Returns the rows of a batch that belong to this part."""
        if rows % self.count:
            raise ValueError(f"{rows} rows cannot be divided evenly among {self.count} processes")
        return slice(self.index * rows // self.count, (self.index + 1) * rows // self.count)


WHOLE_BATCH = Shard()
"""The shard of a single process."""


class DataPosition(NamedTuple):
    """A position in the training stream, saved in checkpoints to resume with the next batch."""

    epoch: int = 0
    """Completed epochs; of several virtual streams, of the one that is the furthest."""
    block: int = 0
    """Completed blocks of this epoch; 0 if there are `streams`."""
    row: int = 0
    """Rows of this block that were read; 0 if there are `streams`."""
    step: int = 0
    """Batches that were read since the start."""
    streams: tuple[tuple[int, int, int], ...] = ()
    """Epoch, block and row of each virtual stream, if there are several, and not all are at the
    beginning of `epoch`. A process only knows those of its own rows; see `to_json`."""
    stream: str = ""
    """All that the batches of the stream depend on, a JSON object; "" = unknown."""

    @property
    def identity(self) -> dict[str, Any]:
        """The values of `stream` by name."""
        return json.loads(self.stream or "{}")

    def continued_in(self, other: "DataPosition") -> "DataPosition":
        """Returns the position at which the stream of another one continues: its next epoch.

        If only the model differs, whose options begin with "model.", it is the same position.
        """
        theirs, ours = self.identity, other.identity
        changed = {name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)}
        if all(name.startswith("model.") for name in changed):
            return self._replace(stream=other.stream)
        return DataPosition(self.epoch + 1, step=self.step, stream=other.stream)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values with the streams of all processes, each of which has to call this."""
        values = {name: value for name, value in self._asdict().items() if name != "streams"}
        if self.streams:
            texts = distributed.gather_texts([json.dumps(self.streams)])
            # Those of other processes are where they were when this one began.
            streams = [max(each) for each in zip(*map(json.loads, texts), strict=True)]
            values |= {"epoch": max(streams)[0], "streams": streams}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DataPosition":
        """Returns the inverse of `to_json`."""
        given = {**cls._field_defaults, **values}
        return checked([given[name] for name in cls._fields], "the position in the data is", cls)


def make_batch(
    pairs: TokenPairs,
    rows: Sequence[Sequence[int]],
    shape: BatchShape,
    model: TransformerConfig,
    shard: Shard = WHOLE_BATCH,
) -> Batch:
    """Packs pairs into the rows of a batch.

    Args:
      pairs: as tokens.
      rows: the indices of the pairs in each row; missing rows are empty.
      shape: shape of the whole batch.
      model: gives the padding and start tokens.
      shard: the part of the batch to build.
    """
    rows = [*rows, *[()] * (shape.rows - len(rows))][shard.part(shape.rows)]
    counts = np.array([len(row) for row in rows])
    members = np.fromiter(itertools.chain.from_iterable(rows), np.int64, counts.sum())
    return packed_batch(pairs.take(members), counts, shape, model)


def packed_batch(
    pairs: TokenPairs, counts: np.ndarray, shape: BatchShape, model: TransformerConfig
) -> Batch:
    """Packs pairs in the order of B rows, of which each has a number, int [B]."""
    targets = pack(pairs.targets, counts, shape.target_length, model.pad_id)
    batch = Batch(
        encoder_input_tokens=None,
        decoder_input_tokens=decoder_inputs(targets, model.bos_id, model.pad_id),
        decoder_target_tokens=targets.tokens,
        decoder_loss_weights=(targets.segment_ids > 0).astype(np.float32),
        encoder_segment_ids=None,
        decoder_segment_ids=targets.segment_ids,
        encoder_positions=None,
        decoder_positions=targets.positions,
    )
    if pairs.sources is not None:
        sources = pack(pairs.sources, counts, shape.source_length, model.pad_id)
        batch = dataclasses.replace(
            batch,
            encoder_input_tokens=sources.tokens,
            encoder_segment_ids=sources.segment_ids,
            encoder_positions=sources.positions,
        )
    for name, values in pairs.fields.items():
        batch = field_of(name).into(batch, pairs, values, counts, shape)
    return batch


def packed_shape(config: ExperimentConfig) -> BatchShape:
    """Returns the shape of packed batches: in evaluation, and in training without buckets."""
    config.require(ROWS)
    return BatchShape(config.rows_per_batch, *config.data.row_lengths)


def whole_batches(
    corpus: EncodedCorpus,
    config: ExperimentConfig,
    row_shards: int = 1,
    shard: Shard = WHOLE_BATCH,
) -> list[Batch]:
    """Returns batches that contain every pair exactly once, without truncation.

    Pairs that fit are packed into rows of the training shape, as many as a microbatch has, or fewer
    if the vocabulary is large (`MAX_LOGITS`). A longer pair gets its own row, whose length is the
    next power of two; batches of such rows have fewer rows, so that attention needs no more memory.
    The last batch of each shape is padded with empty rows. The number of rows of every batch is a
    multiple of `row_shards`, the number of devices that share it.

    Raises:
      UserError: the rows, or a pair, are longer than the model's table of learned positions.
    """
    shape_of_steps = packed_shape(config)
    # No more than a forward pass of training has. That computes its logits in chunks.
    of_row = shape_of_steps.target_length * max(config.model.target_vocab_size, 1)
    rows = min(
        shape_of_steps.rows // config.train.accumulation_steps,
        row_shards * max(MAX_LOGITS // of_row, 1),
    )
    packed = shape_of_steps._replace(rows=rows)
    limit = config.model.longest_sentence
    source_lengths, target_lengths = corpus.lengths
    fits = (source_lengths <= packed.source_length) & (target_lengths <= packed.target_length)
    fitting = np.flatnonzero(fits)
    members, counts = plan_rows(
        source_lengths[fitting],
        target_lengths[fitting],
        packed.source_length,
        packed.target_length,
    )
    rows_by_shape: dict[BatchShape, list[Sequence[int]]]
    rows_by_shape = {packed: np.split(fitting[members], counts.cumsum())[:-1]}
    longest_side = np.maximum(source_lengths, target_lengths)
    for pair in np.flatnonzero(~fits).tolist():
        longest = int(longest_side[pair])
        if limit is not None and longest > limit:
            raise UserError(
                f"{corpus.name}: pair {pair + 1:,} has {longest:,} tokens on one side, more than "
                f"the learned positions of the model (model.max_length={limit}): shorten it"
            )
        shape = _shape_of_long_rows(longest, packed, row_shards, limit)
        rows_by_shape.setdefault(shape, []).append([pair])
    return [
        make_batch(corpus, rows[first : first + shape.rows], shape, config.model, shard)
        for shape, rows in rows_by_shape.items()
        for first in range(0, len(rows), shape.rows)
    ]


def _shape_of_long_rows(
    longest: int, packed: BatchShape, row_shards: int, limit: int | None
) -> BatchShape:
    """Returns the shape for pairs that exceed the packed rows, with no more attention weights."""
    length = 1 << (longest - 1).bit_length()
    if limit is not None:
        length = min(length, limit)
    attention = packed.rows * packed.source_length * packed.target_length
    rows_per_device = max(1, attention // (length * length * row_shards))
    return BatchShape(rows_per_device * row_shards, length, length)
