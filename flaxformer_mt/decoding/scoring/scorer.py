"""Scores given translations by their log-probability."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.decoding.parameters import prepared_model
from flaxformer_mt.decoding.scoring.alignment import Links, align, align_words, without_ends
from flaxformer_mt.decoding.scoring.teacher_forcing import teacher_force
from flaxformer_mt.decoding.search.ranking import length_penalty
from flaxformer_mt.decoding.text_arguments import require_iterable, require_text, require_texts
from flaxformer_mt.errors import UserError

AlignmentUnit = Literal["words", "pieces"]
"""What an alignment links."""


def check_unit(unit: AlignmentUnit | None) -> None:
    """Raises UserError if the unit of an alignment is unknown."""
    if unit is not None and unit not in get_args(AlignmentUnit):
        raise UserError(f"the unit {unit!r} is unknown: align words or pieces")


ScoreNormalization = Literal["none", "tokens", "search"]
"""The divisor of a log-probability: none; the number of tokens; or the length penalty of the
search, which results in the score by which the search would rank the translation, unless it has
further penalties, a shortlist, or renormalizes after excluding tokens."""

CHUNK_SIZE = 4096
"""Number of pairs that are read, sorted by length and scored together."""


@dataclasses.dataclass(frozen=True)
class PairScore:
    """The log-probabilities of one sentence pair."""

    tokens: tuple[int, ...]
    """Target tokens, the end token included."""
    token_log_probabilities: tuple[float, ...]
    """Of each token, given the source and the preceding tokens; natural logarithm. That of a first
    token which the search does not choose, such as the language, is 0."""
    pieces: tuple[str, ...] = ()
    """The text of each token; the last is the end token's entry in the vocabulary."""
    alignment: Links | None = None
    """Links from source to target words, or pieces; None if not requested."""

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
    """A target, tokenized."""

    tokens: list[int]
    """Without the end token."""
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

    Raises:
      UserError: `decode.first_token` is not one token of the vocabulary.
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


def with_certain_first(
    tokens: Sequence[int], target: Tokenizer, first: Sequence[int]
) -> TargetTokens:
    """Adds `first` to the tokens of a text, unless it names a language itself."""
    if tokens and tokens[0] in target.language_ids:
        return TargetTokens([*tokens], num_added=0, num_certain=1)
    if first:
        return TargetTokens([*first, *tokens], num_added=1, num_certain=1)
    added = target.with_first(tokens)
    return TargetTokens(added, num_added=len(added) - len(tokens), num_certain=0)


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
        """Creates a scorer; the arguments, and the errors, are those of `Translator`."""
        self.model, self.params = prepared_model(config, params, tokenizers, rounded=False)
        self.decode = decode or DecodeConfig()
        self.tokenizers = tokenizers
        self._first = certain_first_token(tokenizers.target, self.decode)

    def stream(
        self, pairs: Iterable[tuple[str, str]], alignment: AlignmentUnit | None = None
    ) -> Iterator[PairScore]:
        """Scores each target as a translation of its source, in the given order.

        Empty sentences are scored like all others: they consist of the end token. A score does not
        depend on the other pairs.

        Args:
          pairs: source and target sentences, read lazily.
          alignment: the unit to align; None = no alignment.

        Raises:
          TypeError: an item is not a pair of strings. UserError: a sentence is longer than a
          learned position table, or the decoder does not have the
            configured alignment layer or head.
        """
        numbered = enumerate(require_iterable(pairs, "pairs", "pairs of strings"))
        yield from self._stream(
            ((index + 1, _as_pair(pair, f"pairs[{index}]")) for index, pair in numbered), alignment
        )

    def _stream(
        self,
        numbered: Iterable[tuple[int, tuple[str, str]]],
        alignment: AlignmentUnit | None,
    ) -> Iterator[PairScore]:
        check_unit(alignment)
        remaining = iter(numbered)
        while chunk := list(itertools.islice(remaining, CHUNK_SIZE)):
            numbers, pairs = zip(*chunk, strict=True)
            yield from self._score(pairs, alignment, numbers)

    def _score(
        self,
        pairs: Sequence[tuple[str, str]],
        alignment: AlignmentUnit | None,
        numbers: Sequence[int],
    ) -> Iterator[PairScore]:
        # As in translation, outer spaces are not part of a text.
        sources, targets = ([text.strip() for text in side] for side in zip(*pairs, strict=True))
        source, target, eos_id = self.tokenizers.source, self.tokenizers.target, self.model.eos_id
        source_texts = source.encode_parts(sources)
        source_rows = [source.with_first(tokens) for tokens in source_texts]
        target_rows = [
            with_certain_first(tokens, target, self._first)
            for tokens in target.encode_parts(targets)
        ]
        results = teacher_force(
            self.params,
            self.model,
            self.decode,
            [[*tokens, eos_id] for tokens in source_rows],
            [[*row.tokens, eos_id] for row in target_rows],
            attention=alignment is not None,
            numbers=numbers,
        )
        split = zip(source.split(sources), target.split(targets), strict=True)
        for index, (source_pieces, target_pieces) in enumerate(split):
            row, result = target_rows[index], results[index]
            first, num_own = row.tokens[: row.num_added], len(row.tokens) - row.num_added
            own_pieces = target_pieces[len(target_pieces) - num_own :]
            tokens = (*row.tokens, eos_id)
            links = None
            if result.attention is not None:
                # Tokens that are not part of the texts are in no alignment.
                num_added = len(source_rows[index]) - len(source_texts[index])
                attention = without_ends(result.attention, tokens, eos_id)
                attention = attention[row.num_added :, num_added:]
                if alignment == "words":
                    links = align_words(attention, source_pieces[num_added:], own_pieces)
                else:
                    links = align(attention)
            yield PairScore(
                tokens,
                (*[0.0] * row.num_certain, *result.log_probabilities[row.num_certain :]),
                (*target.pieces(first), *own_pieces, *target.pieces([eos_id])),
                links,
            )

    def stream_candidates(
        self,
        candidates: Iterable[tuple[str, Sequence[str]]],
        alignment: AlignmentUnit | None = None,
    ) -> Iterator[ScoredSentence]:
        """Scores several translations of each source sentence; otherwise like `stream`."""
        listed = require_iterable(candidates, "candidates", "sources with their translations")
        counted, paired = itertools.tee(
            _as_candidates(item, f"candidates[{index}]") for index, item in enumerate(listed)
        )
        pairs = (
            (number, (source, target))
            for number, (source, targets) in enumerate(paired, start=1)
            for target in targets
        )
        scores = self._stream(pairs, alignment)
        for source, targets in counted:
            yield ScoredSentence(source, targets, list(itertools.islice(scores, len(targets))))


def _as_pair(pair: Any, name: str) -> tuple[str, str]:
    source, target = _two(pair, name)
    return require_text(source, f"{name}[0]"), require_text(target, f"{name}[1]")


def _as_candidates(item: Any, name: str) -> tuple[str, list[str]]:
    source, targets = _two(item, name)
    return require_text(source, f"{name}[0]"), require_texts(targets, f"{name}[1]")


def _two(value: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name} must be a tuple of two, not {type(value).__name__}")
    first, second = value
    return first, second
