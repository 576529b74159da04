"""What pairs have beside their two sentences: links, numbers of columns, the text of sources.

A field travels with its pairs, by its name: `Row.fields` has what was read, `TokenPairs.fields` one
sequence of values per pair, which filters, stores, mixtures and packing keep beside the tokens, and
`PairField.into` writes the values of a batch. A new field is a class here, and in `_FIELDS`.
"""

import abc
import collections
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora import alignments
from flaxformer_mt.data.corpora.corpus import Corpus, SentencePair
from flaxformer_mt.data.corpora.rows import COLUMN, WEIGHT, Dropped, Row
from flaxformer_mt.data.stream.packing import BatchShape, Sentences, TokenPairs
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, words_of_tokens
from flaxformer_mt.errors import UserError

TEXT = "text"
"""The field of the text of sources, for `data.subword_sampling`."""
_UNLINKED = "unlinked"
"""The reason of pairs without links: the vocabulary divides their text into other words."""

_Batch = TypeVar("_Batch", bound=Any)

_log = logging.getLogger(__name__)


class PairField(abc.ABC):
    """What pairs have under a name; a field has the same values wherever a pair is used."""

    dtype: np.dtype[Any]
    """The dtype of the values in a store."""

    @abc.abstractmethod
    def encode(
        self, pairs: Sequence[SentencePair], tokenizers: Tokenizers
    ) -> tuple[Sentences, dict[str, Dropped]]:
        """Returns the values of each pair, and notes about pairs that lack some."""

    def into(
        self, batch: _Batch, pairs: TokenPairs, values: Sentences, counts: np.ndarray,
        shape: BatchShape,
    ) -> _Batch:  # fmt: skip
        """Returns a `Batch` with the values of its pairs, packed as in `packing.pack`."""
        return batch

    def check(self, config: ExperimentConfig) -> None:  # noqa: B027
        """Raises `UserError` if options cannot be used with the field."""

    def tell(self, name: str, pairs: int, notes: Mapping[str, Dropped]) -> None:  # noqa: B027
        """Tells the notes about the pairs of a corpus; `UserError` if it cannot be used."""


class _Text(PairField):
    dtype = np.dtype(np.uint8)

    def encode(
        self, pairs: Sequence[SentencePair], tokenizers: Tokenizers
    ) -> tuple[Sentences, dict[str, Dropped]]:
        return Sentences.from_texts([source for source, _ in pairs]), {}


@dataclasses.dataclass(frozen=True)
class _Column(PairField):
    """A number per pair: the weight of its tokens in the loss, or one of `Batch.columns`."""

    name: str
    dtype = np.dtype(np.float32)

    def encode(
        self, pairs: Sequence[SentencePair], tokenizers: Tokenizers
    ) -> tuple[Sentences, dict[str, Dropped]]:
        numbers = [pair.fields[self.name] for pair in pairs if isinstance(pair, Row)]
        one_each = np.ones(len(pairs), np.int64)
        return Sentences.of_lengths(np.array(numbers, self.dtype), one_each), {}

    def into(
        self, batch: _Batch, pairs: TokenPairs, values: Sentences, counts: np.ndarray,
        shape: BatchShape,
    ) -> _Batch:  # fmt: skip
        # No row has more segments than target tokens.
        rows = np.zeros((len(counts), shape.target_length), self.dtype)
        rows[np.arange(shape.target_length) < counts[:, np.newaxis]] = values.tokens
        if self.name != WEIGHT:
            columns = {**batch.columns, self.name.removeprefix(COLUMN): rows}
            return dataclasses.replace(batch, columns=columns)
        # In padding, the segment 0 takes the last value.
        weights = np.take_along_axis(rows, batch.decoder_segment_ids - 1, axis=1)
        return dataclasses.replace(batch, decoder_loss_weights=batch.decoder_loss_weights * weights)


class _Links(PairField):
    """Links between tokens: for each pair the source and the target token of each, in turn.

    A link of two words becomes one of each of their tokens. A pair has none if the vocabulary
    divides its text into other words than its spaces do.
    """

    dtype = np.dtype(np.int32)

    def encode(
        self, pairs: Sequence[SentencePair], tokenizers: Tokenizers
    ) -> tuple[Sentences, dict[str, Dropped]]:
        sides = enumerate((tokenizers.source, tokenizers.target))
        words = [words_of_tokens([pair[side] for pair in pairs], t) for side, t in sides]
        links: list[list[int]] = []
        unlinked: list[str] = []
        beyond: list[alignments.BeyondWordsError] = []
        for pair, source, target in zip(pairs, *words, strict=True):
            assert isinstance(pair, Row)
            location, line = pair.fields[alignments.FIELD]
            tokens: list[int] = []
            links.append(tokens)
            try:
                found = alignments.links_of(pair, location, line)
            except alignments.BeyondWordsError as error:
                beyond.append(error)
                continue
            if source is None or target is None:
                unlinked.append(location)
                continue
            sides_of_words = [_indices(source), _indices(target)]
            for link in found:
                ends = (side[word] for side, word in zip(sides_of_words, link, strict=True))
                tokens += itertools.chain(*itertools.product(*ends))
        if beyond:
            seem = ", as if pieces of words were linked" if 2 * len(beyond) > len(pairs) else ""
            raise UserError(
                f"{beyond[0]}; {len(beyond):,} of {len(pairs):,} pairs have such links{seem}: "
                "align the words between spaces"
            )
        return Sentences.from_lists(links), Dropped.at(_UNLINKED, unlinked)

    def into(
        self, batch: _Batch, pairs: TokenPairs, values: Sentences, counts: np.ndarray,
        shape: BatchShape,
    ) -> _Batch:  # fmt: skip
        return dataclasses.replace(batch, alignment=pack_links(pairs, values, counts, shape))

    def check(self, config: ExperimentConfig) -> None:
        if config.data.subword_sampling:
            raise UserError(
                f"data.subword_sampling={config.data.subword_sampling} cannot be used with "
                "alignments, which link the tokens of one segmentation: set it to 0"
            )
        if not config.model.has_inputs:
            raise UserError("a language model has no sources to align: leave the alignments out")

    def tell(self, name: str, pairs: int, notes: Mapping[str, Dropped]) -> None:
        unlinked = notes.get(_UNLINKED)
        if unlinked is None:
            return
        reason = (
            f"{name}: {unlinked.count:,} of {pairs:,} pairs have no links, since the vocabulary "
            f"divides their text into other words than the spaces do; the first is that of "
            f"{unlinked.example}"
        )
        if unlinked.count == pairs:
            raise UserError(reason)
        _log.warning(reason)


def _indices(words: Iterable[int]) -> Mapping[int, list[int]]:
    """Returns the tokens of each word, by their indices."""
    tokens: dict[int, list[int]] = collections.defaultdict(list)
    for index, word in enumerate(words):
        tokens[word].append(index)
    return tokens


def pack_links(
    pairs: TokenPairs, links: Sentences, counts: np.ndarray, shape: BatchShape
) -> np.ndarray | None:
    """Returns `Batch.alignment`, float32 [B, T, S], of pairs as in `pack`; None without sources.

    Links of truncated tokens are left out.
    """
    sources, targets = pairs.sources, pairs.targets
    if sources is None:
        return None
    dense = np.zeros((len(counts), shape.target_length, shape.source_length), np.float32)
    rows = np.split(np.arange(len(targets)), counts.cumsum())[:-1]
    for row, members in zip(dense, rows, strict=True):
        starts = np.zeros(2, np.int64)
        for pair in members.tolist():
            ends = starts + np.array([len(sources[pair]), len(targets[pair])])
            tokens = starts + links[pair].reshape(-1, 2)
            # Targets end with the end token, also where they were truncated; sources may.
            has_end = sources[pair][-1] == targets[pair][-1]
            source, target = tokens[(tokens < ends - [has_end, 1]).all(axis=1)].T
            row[target, source] = 1
            starts = ends
    return dense / np.maximum(dense.sum(axis=-1, keepdims=True), 1)


_FIELDS: Mapping[str, PairField] = {alignments.FIELD: _Links(), TEXT: _Text()}


@functools.cache
def field_of(name: str) -> PairField:
    """Returns the field of a name."""
    return _Column(name) if name.startswith(COLUMN) else _FIELDS[name]


def fields_of(corpus: Corpus, config: ExperimentConfig) -> tuple[str, ...]:
    """Returns the fields that the pairs of a corpus have in a store."""
    has_text = config.data.subword_sampling and config.model.has_inputs
    return (*corpus.fields, *([TEXT] if has_text else []))


def check_fields(corpora: Sequence[Corpus], config: ExperimentConfig) -> None:
    """Raises `UserError` if mixed corpora have different fields, or options exclude a field."""
    fields = corpora[0].fields
    for corpus in corpora:
        for name in {*corpus.fields} ^ {*fields}:
            column = f"the column of {name.removeprefix(COLUMN)!r}"
            what = "alignments" if name == alignments.FIELD else column
            raise UserError(f"either all corpora that are mixed have {what}, or none")
    for name in fields:
        field_of(name).check(config)
