"""Scores given translations by their log-probability."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.decoding.parameters import prepared_models
from flaxformer_mt.decoding.scoring.alignment import (
    AlignmentUnit,
    Links,
    align,
    align_words,
    check_unit,
    text_words,
    without_ends,
)
from flaxformer_mt.decoding.scoring.teacher_forcing import teacher_force
from flaxformer_mt.decoding.search.ranking import length_penalty
from flaxformer_mt.decoding.text_arguments import require_iterable, require_text, require_texts
from flaxformer_mt.errors import UserError
from flaxformer_mt.writing_systems import stripped

ScoreNormalization = Literal["none", "tokens", "search"]
"""The divisor of a log-probability: none; the number of tokens; or the length penalty of the
search, which results in the score by which the search would rank the translation, unless it has
further penalties, a shortlist, or renormalizes after excluding tokens."""

CHUNK_SIZE = 4096
"""Number of pairs that are read, sorted by length and scored together."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class PairScore:
    """The log-probabilities of one sentence pair; the end token is a token of the target."""

    tokens: tuple[int, ...]
    token_log_probabilities: tuple[float, ...]
    """Of each token, given the source and the preceding tokens; natural logarithm. That of a first
    token which the search does not choose, such as the language, is 0."""
    pieces: tuple[str, ...] = ()
    """The text of each token; the last is the end token's entry in the vocabulary."""
    alignment: Links | None = None

    @property
    def log_probability(self) -> float:
        """Log-probability of the target sentence, end token included, given the source."""
        return math.fsum(self.token_log_probabilities)

    def normalized(self, normalization: ScoreNormalization, decode: DecodeConfig) -> float:
        """Returns the log-probability, divided as described for `ScoreNormalization`."""
        if normalization == "none":
            return self.log_probability
        if normalization == "tokens":
            return self.log_probability / len(self.tokens)
        length: Any = np.array(len(self.tokens), np.int32)
        penalty = length_penalty(length, decode.length_penalty, decode.length_penalty_kind)
        return self.log_probability / float(penalty)


class TargetTokens(NamedTuple):
    """A target, tokenized, with its end token."""

    tokens: list[int]
    pieces: list[str]
    num_added: int
    """How many of the first tokens are not part of the text."""
    num_certain: int
    """How many of the first tokens the search does not choose."""


class ScoredSentence(NamedTuple):
    """A source sentence and the scores of its translations."""

    source: str
    targets: Sequence[str]
    scores: list[PairScore]


def certain_first_token(target: Tokenizer, decode: DecodeConfig) -> tuple[int, ...]:
    """Returns the token that translations begin with, with probability 1, if there is one.

    It is `decode.first_token`, or the language of the target vocabulary.
    """
    name = decode.first_token
    if not name:
        default = target.first_id
        return (default,) if default is not None and default in target.language_ids else ()
    tokens = target.encode_parts([name])[0]
    if len(tokens) != 1 or tokens[0] == target.unk_id:
        raise UserError(
            f"decode.first_token={name} is not a token of the target vocabulary: for a "
            "language, give its token, such as fra_Latn, __fr__ or fr_XX"
        )
    return (tokens[0],)


def tokenized_targets(
    texts: Sequence[str], target: Tokenizer, first: Sequence[int]
) -> Iterator[TargetTokens]:
    """Tokenizes translations; `first` precedes those that do not name a language themselves."""
    (end,) = target.pieces([target.eos_id])
    for own, pieces in zip(target.encode_parts(texts), target.split(texts), strict=True):
        names_language = bool(own) and own[0] in target.language_ids
        tokens = target.with_first(own)
        if first and not names_language:
            tokens = [*first, *own]
        num_added = len(tokens) - len(own)
        yield TargetTokens(
            [*tokens, target.eos_id],
            [*target.pieces(tokens[:num_added]), *pieces[len(pieces) - len(own) :], end],
            num_added,
            num_certain=int(names_language or len(first) > 0),
        )


class Scorer:
    """Scores given translations with a trained model.

    All scorers of one model configuration share their compiled programs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: Any,
        tokenizers: Tokenizers,
        decode: DecodeConfig | None = None,
    ) -> None:
        """Creates a scorer; arguments and errors are those of `Translator`."""
        self.decode = decode or DecodeConfig()
        models = prepared_models([(config, params)], tokenizers, self.decode, rounded=False)
        ((self.model, self.params),) = models
        self.tokenizers = tokenizers
        self._first = certain_first_token(tokenizers.target, self.decode)

    def stream(
        self, pairs: Iterable[tuple[str, str]], alignment: AlignmentUnit | None = None
    ) -> Iterator[PairScore]:
        """Scores each target as a translation of its source, in the given order, read lazily.

        Empty sentences are scored like all others: they consist of the end token. A score does not
        depend on the other pairs. `alignment` is the unit to align, if any.

        Raises:
          TypeError: an item is not a pair of strings.
          UserError: a sentence is longer than a learned position table, or the decoder does not
            have the configured alignment layer or head.
        """

        def checked() -> Iterator[tuple[str, list[str]]]:
            listed = require_iterable(pairs, "pairs", "pairs of strings")
            for index, pair in enumerate(listed):
                source, target = _two(pair, f"pairs[{index}]")
                yield source, [require_text(target, f"pairs[{index}][1]")]

        for scored in self._stream(checked(), alignment):
            yield from scored.scores

    def stream_candidates(
        self,
        candidates: Iterable[tuple[str, Sequence[str]]],
        alignment: AlignmentUnit | None = None,
    ) -> Iterator[ScoredSentence]:
        """Scores several translations of each source sentence; otherwise like `stream`."""

        def checked() -> Iterator[tuple[str, list[str]]]:
            listed = require_iterable(candidates, "candidates", "sources with their translations")
            for index, item in enumerate(listed):
                source, targets = _two(item, f"candidates[{index}]")
                yield source, require_texts(targets, f"candidates[{index}][1]")

        yield from self._stream(checked(), alignment)

    def _stream(
        self, candidates: Iterable[tuple[str, Sequence[str]]], alignment: AlignmentUnit | None
    ) -> Iterator[ScoredSentence]:
        check_unit(alignment)
        counted, paired = itertools.tee(candidates)
        pairs = (
            (number, source, target)
            for number, (source, targets) in enumerate(paired, start=1)
            for target in targets
        )
        chunks = (self._score(chunk, alignment) for chunk in chunked(pairs, CHUNK_SIZE))
        scores = itertools.chain.from_iterable(chunks)
        for source, targets in counted:
            yield ScoredSentence(source, targets, list(itertools.islice(scores, len(targets))))

    def _score(
        self, pairs: Sequence[tuple[int, str, str]], alignment: AlignmentUnit | None
    ) -> Iterator[PairScore]:
        numbers, *texts = zip(*pairs, strict=True)
        # As in translation, outer spaces are not part of a text.
        sources, targets = ([*map(stripped, side)] for side in texts)
        source = self.tokenizers.source
        source_texts = source.encode_parts(sources)
        source_rows = [source.with_first(tokens) for tokens in source_texts]
        target_rows = list(tokenized_targets(targets, self.tokenizers.target, self._first))
        results = teacher_force(
            self.params,
            self.model,
            self.decode,
            [*map(source.with_source_end, source_rows)],
            [row.tokens for row in target_rows],
            attention=alignment is not None,
            numbers=numbers,
        )
        for index, source_pieces in enumerate(source.split(sources)):
            row, result = target_rows[index], results[index]
            links = None
            if alignment is not None and result.attention is not None:
                # Tokens that are not part of the texts are in no alignment.
                num_added = len(source_rows[index]) - len(source_texts[index])
                attention = without_ends(
                    result.attention, source_rows[index], row.tokens, self.model.eos_id
                )
                attention = attention[row.num_added :, num_added:]
                links = align(attention)
                if alignment == "words":
                    links = align_words(
                        attention,
                        text_words(sources[index], source_pieces[num_added:], source),
                        text_words(
                            targets[index],
                            row.pieces[row.num_added : -1],
                            self.tokenizers.target,
                        ),
                    )
            yield PairScore(
                tuple(row.tokens),
                (*[0.0] * row.num_certain, *result.log_probabilities[row.num_certain :]),
                tuple(row.pieces),
                links,
            )


def _two(value: Any, name: str) -> tuple[str, Any]:
    """Checks a source with its translation or translations."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name} must be a tuple of two, not {type(value).__name__}")
    source, other = value
    return require_text(source, f"{name}[0]"), other


def chunked(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yields lists of `size` items; the last may be shorter."""
    remaining = iter(items)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk
