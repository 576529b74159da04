"""Blocks of planned rows: functions of (seed, epoch, stream, number), in any process.

Imported by worker processes (`block_workers`): without JAX, they start in a fraction of the time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora.rows import COLUMN
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.data.stream.mixture import Mixture, generator
from flaxformer_mt.data.stream.packing import BatchShape, Sentences, TokenPairs, plan_rows
from flaxformer_mt.data.stream.pair_fields import TEXT
from flaxformer_mt.data.tokenizers.base import Tokenizer
from flaxformer_mt.errors import UserError

Curriculum: TypeAlias = Callable[[int, np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
"""Returns how often pairs are used in an epoch, float [N], from the number of the epoch, source and
target lengths in tokens, int [N, 2], and the columns of `Batch.columns`, float32 [N] each."""

_BLOCK_KEY = 2  # Key of random number generators; the mixture uses 0, 1 and 4.


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive pairs of a virtual stream, in the order of the rows that they are packed into."""

    pairs: TokenPairs
    """Their tokens, truncated to a row."""
    ends: Sequence[int]
    """Row i has the pairs from `ends[i]` to `ends[i + 1]`."""
    shapes: Sequence[BatchShape]
    """The shape of the batch of each row."""


class BlockMaker:
    """Makes blocks of the kept pairs of several corpora.

    Pairs are given as int64 [pairs] indices into those that are kept of all corpora, in a row.

    Attributes:
      mixture: the order of these pairs.

    Args:
      corpora: the training corpora.
      dropped: the ascending indices of the pairs of each that are left out, int64 [dropped].
      shapes: all batch shapes, in ascending order; pairs are truncated to the last.
      config: the experiment.
      sampler: the vocabulary of the sources, for `data.subword_sampling`.
      curriculum: how often each pair is used in an epoch; by default once.
    """

    def __init__(
        self,
        corpora: Sequence[EncodedCorpus],
        dropped: Sequence[np.ndarray],
        shapes: Sequence[BatchShape],
        config: ExperimentConfig,
        sampler: Tokenizer | None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._corpora = corpora
        # How many pairs are kept before each that is not.
        self._kept_before = [pairs - np.arange(len(pairs)) for pairs in dropped]
        self._shapes = shapes
        _, *self._row_lengths = shapes[-1]
        self._config = config
        self._sampler = sampler
        self._curriculum = curriculum
        sizes = [
            len(corpus.targets) - len(pairs) for corpus, pairs in zip(corpora, dropped, strict=True)
        ]
        self._ends = np.cumsum(sizes)
        weights = [corpus.weight for corpus in corpora]
        self.mixture = Mixture(sizes, weights, config.data, config.train.seed)

    def make(self, epoch: int, stream: int, number: int) -> Block:
        """Plans the rows of a block, and reads its tokens."""
        key = (epoch, number, stream) if self.mixture.streams > 1 else (epoch, number)
        random = generator(self._config.train.seed, _BLOCK_KEY, *key)
        # Ascending, for sequential access to stores on disk.
        pairs = self.read(np.sort(self.mixture.draws(epoch, stream, number)), random)
        if self._curriculum is not None:
            pairs = pairs.take(self._sampled(self._curriculum, epoch, pairs, random))
        plan = _pack_rows if self._config.data.batching == "packed" else _sort_into_buckets
        rows, shapes = plan(np.stack(pairs.lengths), self._shapes, random)
        return Block(pairs.take(rows.tokens), rows.offsets.tolist(), shapes)

    def _sampled(
        self, curriculum: Curriculum, epoch: int, pairs: TokenPairs, random: np.random.Generator
    ) -> np.ndarray:
        """Draws the indices of pairs by their rates, each in ascending order, at least one."""
        lengths = np.stack(pairs.lengths, axis=1)
        columns = {
            name.removeprefix(COLUMN): values.tokens
            for name, values in pairs.fields.items()
            if name.startswith(COLUMN)
        }
        rates = np.asarray(curriculum(epoch, lengths, columns), float)
        if rates.shape != (len(lengths),) or not np.all((rates >= 0) & (rates < np.inf)):
            raise UserError(
                f"curriculum must return a rate from 0 on for each of {len(lengths)} pairs, not "
                f"{rates.dtype}{list(rates.shape)} from {rates.min(initial=0)} to "
                f"{rates.max(initial=0)}"
            )
        if not rates.any():
            raise UserError(
                f"curriculum leaves none of {len(lengths):,} pairs in epoch {epoch}: give some of "
                "them a rate above 0"
            )
        counts = np.floor(rates + random.random(len(rates))).astype(np.int64)
        if not counts.any():  # A block has a row at least.
            counts[rates.argmax()] = 1
        return np.repeat(np.arange(len(counts)), counts)

    def read(self, draws: np.ndarray, random: np.random.Generator) -> TokenPairs:
        """Reads the tokens of pairs, truncated to a row; `random` is for subword sampling."""
        pairs = self._take(draws)
        sources, targets = (
            side and side.truncate(length, self._config.model.eos_id)
            for side, length in zip((pairs.sources, pairs.targets), self._row_lengths, strict=True)
        )
        assert targets is not None
        if self._config.data.subword_sampling and sources is not None:
            sources = self._resample(pairs.fields.get(TEXT), sources, random)
        fields = {name: values for name, values in pairs.fields.items() if name != TEXT}
        return TokenPairs(sources, targets, fields)

    def _located(self, draws: np.ndarray) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """Yields for each corpus which of the pairs it has, its number, and its own indices."""
        corpora = np.searchsorted(self._ends, draws, side="right")
        firsts = [0, *self._ends[:-1]]
        for number, (kept, first) in enumerate(zip(self._kept_before, firsts, strict=True)):
            where = np.flatnonzero(corpora == number)
            indices = draws[where] - first
            yield where, number, indices + np.searchsorted(kept, indices, side="right")

    def _take(self, draws: np.ndarray) -> TokenPairs:
        located = list(self._located(draws))
        parts = [self._corpora[number].take(indices) for _, number, indices in located]
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([where for where, _, _ in located]))
        return TokenPairs.join(parts).take(order)

    def _resample(
        self, texts: Sentences | None, sources: Sentences, random: np.random.Generator
    ) -> Sentences:
        """Tokenizes sources with subword sampling, except where the result exceeds a row."""
        if self._sampler is None or texts is None:
            raise ValueError("data.subword_sampling needs a vocabulary to sample from")
        encoded, offsets = texts.tokens.tobytes(), texts.offsets.tolist()
        decoded = [encoded[start:end].decode() for start, end in itertools.pairwise(offsets)]
        amount = self._config.data.subword_sampling
        seed = int(random.integers(2**32))
        drawn = Sentences.of_lengths(*self._sampler.sample_sources(decoded, seed, amount))
        indices = np.arange(len(texts)) + len(texts) * (drawn.lengths > self._row_lengths[0])
        return Sentences.join([drawn, sources]).take(indices)


def _pack_rows(
    lengths: np.ndarray,
    shapes: Sequence[BatchShape],
    random: np.random.Generator,
) -> tuple[Sentences, list[BatchShape]]:
    """Plans rows for pairs of source and target lengths, int [2, pairs].

    Returns:
      The indices of the pairs in each row, and the shape of the batch of each row.
    """
    (shape,) = shapes
    order = random.permutation(lengths.shape[1])
    row_lengths = shape.source_length, shape.target_length
    pairs, counts = plan_rows(lengths[0], lengths[1], *row_lengths, order)
    rows = Sentences.of_lengths(pairs, counts).take(random.permutation(len(counts)))
    return rows, [shape] * len(rows)


def _sort_into_buckets(
    lengths: np.ndarray,
    shapes: Sequence[BatchShape],
    random: np.random.Generator,
) -> tuple[Sentences, list[BatchShape]]:
    """Assigns each pair a row of its bucket, and shuffles the batches; returns as `_pack_rows`.

    The rows of a batch are contiguous. The last batch of each shape is padded with empty rows, so
    that no batch extends into the next block.
    """
    buckets = np.searchsorted([shape.target_length for shape in shapes], lengths.max(axis=0))
    batches = []
    for bucket, shape in enumerate(shapes):
        pairs = random.permutation(np.flatnonzero(buckets == bucket))
        batches += [
            (shape, pairs[first : first + shape.rows]) for first in range(0, len(pairs), shape.rows)
        ]
    batches = [batches[i] for i in random.permutation(len(batches))]
    counts = [np.arange(shape.rows) < len(pairs) for shape, pairs in batches]
    rows = Sentences.of_lengths(
        np.concatenate([pairs for _, pairs in batches]), np.concatenate(counts)
    )
    return rows, [shape for shape, _ in batches for _ in range(shape.rows)]
