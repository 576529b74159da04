"""The batch of a step: a pure function of (seed, step), with nothing to save and nothing to lose.

Pairs are planned into rows once. Each epoch lets pairs of equal lengths trade places and shuffles
the rows. The epochs, one after the other, are an endless stream of rows, of which batch k takes
number k*B to (k+1)*B - 1. So every pair comes exactly once an epoch, all batches have one shape,
and a run that starts again at any step goes on with the batch that it would have had.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

import flax.struct
import jax
import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.encoding import EncodedCorpus
from flaxformer_mt.data.packing import (
    PackedRows,
    RowPlan,
    decoder_inputs,
    pack,
    plan_rows,
    shuffle_plan,
)

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


def padding_fraction(batch: Batch) -> float:
    """Share of a batch's source and target positions that hold no token."""
    sides = [
        side for side in (batch.encoder_segment_ids, batch.decoder_segment_ids) if side is not None
    ]
    tokens = sum(np.count_nonzero(side) for side in sides)
    return 1 - tokens / sum(side.size for side in sides)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """What all batches of a run have in common."""

    rows: int
    """B."""
    source_row_length: int
    """S."""
    target_row_length: int
    """T."""
    pad_id: int
    """Token in padding."""
    bos_id: int
    """Decoder input before the first token; -1 stands for the zero vector."""

    @classmethod
    def from_config(cls, config: ExperimentConfig) -> "BatchLayout":
        """The layout of the training and validation batches of an experiment."""
        return cls(
            rows=config.rows_per_batch,
            source_row_length=config.data.source_row_length,
            target_row_length=config.data.target_row_length,
            pad_id=config.model.pad_id,
            bos_id=config.model.bos_id,
        )


def make_batch(corpus: EncodedCorpus, rows: Sequence[np.ndarray], layout: BatchLayout) -> Batch:
    """Packs the pairs whose indices `rows` lists, a row each; missing rows are left empty."""
    padded = [*rows, *[np.array([], np.int64)] * (layout.rows - len(rows))]
    targets = pack(corpus.targets, padded, layout.target_row_length, layout.pad_id)
    sources: PackedRows | None = None
    if corpus.sources is not None:
        sources = pack(corpus.sources, padded, layout.source_row_length, layout.pad_id)
    return Batch(
        encoder_input_tokens=None if sources is None else sources.tokens,
        decoder_input_tokens=decoder_inputs(targets, layout.bos_id, layout.pad_id),
        decoder_target_tokens=targets.tokens,
        decoder_loss_weights=(targets.segment_ids > 0).astype(np.float32),
        encoder_segment_ids=None if sources is None else sources.segment_ids,
        decoder_segment_ids=targets.segment_ids,
        encoder_positions=None if sources is None else sources.positions,
        decoder_positions=targets.positions,
    )


class TrainingBatches:
    """The endless stream of training batches.

    Args:
      corpus: the pairs, which all fit into rows.
      layout: the shape of a batch.
      seed: decides the order of everything.
    """

    def __init__(self, corpus: EncodedCorpus, layout: BatchLayout, seed: int):
        self._corpus = corpus
        self._layout = layout
        self._seed = seed
        order = np.random.default_rng(seed).permutation(len(corpus.targets))
        self._plan = _plan(corpus, layout, order)
        self._length_classes = _source_lengths(corpus) * (layout.target_row_length + 1)
        self._length_classes += corpus.targets.lengths
        # A batch reads one epoch, or two where they meet.
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)

    @property
    def rows_per_epoch(self) -> int:
        """Rows in which every pair stands once."""
        return len(self._plan)

    @property
    def fill(self) -> float:
        """Share of the target positions of an epoch that hold a token."""
        return len(self._corpus.targets.tokens) / (
            self.rows_per_epoch * self._layout.target_row_length
        )

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step `step`, counted from 0."""
        first = step * self._layout.rows
        rows = [self._row(number) for number in range(first, first + self._layout.rows)]
        return make_batch(self._corpus, rows, self._layout)

    def _row(self, number: int) -> np.ndarray:
        """Indices of the pairs in a row of the endless stream."""
        epoch, position = divmod(number, self.rows_per_epoch)
        plan, row_order = self._epoch(epoch)
        return plan[row_order[position]]

    def _shuffle(self, epoch: int) -> tuple[RowPlan, np.ndarray]:
        """The plan of an epoch, and the order in which its rows come."""
        # The plan itself was drawn from the bare seed.
        rng = np.random.default_rng([self._seed, epoch])
        plan = shuffle_plan(self._plan, self._length_classes, rng)
        return plan, rng.permutation(len(plan))


def evaluation_batches(corpus: EncodedCorpus, layout: BatchLayout) -> list[Batch]:
    """Batches that hold every pair exactly once; the last one is filled up with empty rows."""
    plan = _plan(corpus, layout, order=np.arange(len(corpus.targets)))
    rows = [plan[row] for row in range(len(plan))]
    return [
        make_batch(corpus, rows[first : first + layout.rows], layout)
        for first in range(0, len(rows), layout.rows)
    ]


def _plan(corpus: EncodedCorpus, layout: BatchLayout, order: np.ndarray) -> RowPlan:
    return plan_rows(
        _source_lengths(corpus),
        corpus.targets.lengths,
        layout.source_row_length,
        layout.target_row_length,
        order,
    )


def _source_lengths(corpus: EncodedCorpus) -> np.ndarray:
    """int64 [pairs]; zeros in a language model."""
    if corpus.sources is None:
        return np.zeros(len(corpus.targets), np.int64)
    return corpus.sources.lengths
