"""Scores given translations by their log-probability."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args, overload

import jax
import numpy as np

from flaxformer_mt.config import DecodeConfig, ExperimentConfig, with_vocabulary_sizes
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.scoring.alignment import Links, align, align_words, without_ends
from flaxformer_mt.decoding.scoring.teacher_forcing import teacher_force
from flaxformer_mt.decoding.search.ranking import length_penalty
from flaxformer_mt.decoding.text_arguments import require_iterable, require_text, require_texts
from flaxformer_mt.errors import UserError

AlignmentUnit = Literal["words", "pieces"]
"""What an alignment links."""


def check_unit(unit: AlignmentUnit | None) -> None:
    """Checks the unit of an alignment.

    Raises:
      UserError: it is not one.
    """
    if unit is not None and unit not in get_args(AlignmentUnit):
        raise UserError(f"the unit {unit!r} is unknown: align words or pieces")


ScoreNormalization = Literal["none", "tokens", "search"]
"""The divisor of a log-probability: none; the number of tokens; or the length penalty of the
search, which results in the score by which the search would rank the translation."""

CHUNK_SIZE = 4096
"""Number of pairs that are read, sorted by length and scored together."""


@dataclasses.dataclass(frozen=True)
class PairScore:
    """The log-probabilities of one sentence pair."""

    tokens: tuple[int, ...]
    """Target tokens, the end token included."""
    token_log_probabilities: tuple[float, ...]
    """Of each token, given the source and the preceding tokens; natural logarithm."""
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
        length: Any = np.int32(len(self.tokens))
        penalty = length_penalty(length, decode.length_penalty, decode.length_penalty_kind)
        return self.log_probability / float(penalty)


class ScoredSentence(NamedTuple):
    """A source sentence and the scores of its translations."""

    source: str
    targets: Sequence[str]
    scores: list[PairScore]


class Scorer:
    """Scores given translations with a trained model.

    All scorers of one model configuration share their compiled programs.
    """

    def __init__(self, config: ExperimentConfig, params: Any, tokenizers: Tokenizers) -> None:
        """Creates a scorer.

        Args:
          config: the run's configuration, of which `model` and `decode` are used.
          params: the model's parameters.
          tokenizers: the run's tokenizers.

        Raises:
          UserError: the model has no encoder.
        """
        if not config.model.has_inputs:
            raise UserError("model.has_inputs=False: a language model has no translations to score")
        self.model = with_vocabulary_sizes(
            config.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size
        )
        self.decode = config.decode
        self.params = jax.device_put(params)
        self.tokenizers = tokenizers

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
          TypeError: an item is no pair of strings.
          UserError: a sentence is longer than a learned position table, or the decoder does not
            have the configured alignment layer or head.
        """
        check_unit(alignment)
        numbered = enumerate(require_iterable(pairs, "pairs", "pairs of strings"))
        remaining = (_as_pair(pair, f"pairs[{index}]") for index, pair in numbered)
        first = 1
        while chunk := list(itertools.islice(remaining, CHUNK_SIZE)):
            yield from self._score(chunk, alignment, first)
            first += len(chunk)

    def _score(
        self, pairs: Sequence[tuple[str, str]], alignment: AlignmentUnit | None, first: int
    ) -> Iterator[PairScore]:
        sources, targets = zip(*pairs, strict=True)
        source, target, eos_id = self.tokenizers.source, self.tokenizers.target, self.model.eos_id
        target_rows = [[*tokens, eos_id] for tokens in target.encode(targets)]
        results = teacher_force(
            self.params,
            self.model,
            self.decode,
            [[*tokens, eos_id] for tokens in source.encode(sources)],
            target_rows,
            attention=alignment is not None,
            first=first,
        )
        end = target.pieces([eos_id])
        source_pieces, target_pieces = source.split(sources), target.split(targets)
        for index, (tokens, result) in enumerate(zip(target_rows, results, strict=True)):
            links = None
            if result.attention is not None:
                attention = without_ends(result.attention, tokens, eos_id)
                if alignment == "words":
                    links = align_words(attention, source_pieces[index], target_pieces[index])
                else:
                    links = align(attention)
            yield PairScore(
                tuple(tokens),
                tuple(result.log_probabilities),
                (*target_pieces[index], *end),
                links,
            )

    def stream_candidates(
        self,
        candidates: Iterable[tuple[str, Sequence[str]]],
        alignment: AlignmentUnit | None = None,
    ) -> Iterator[ScoredSentence]:
        """Scores several translations of each sentence; otherwise like `stream`.

        Args:
          candidates: source sentences, each with its translations.
          alignment: see `stream`.
        """
        listed = require_iterable(candidates, "candidates", "sources with their translations")
        counted, paired = itertools.tee(
            _as_candidates(item, f"candidates[{index}]") for index, item in enumerate(listed)
        )
        pairs = ((source, target) for source, targets in paired for target in targets)
        scores = self.stream(pairs, alignment)
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


@overload
def score_pairs(
    config: ExperimentConfig, params: Any, tokenizers: Tokenizers, sources: str, targets: str
) -> PairScore: ...


@overload
def score_pairs(
    config: ExperimentConfig,
    params: Any,
    tokenizers: Tokenizers,
    sources: Iterable[str],
    targets: Iterable[str],
) -> list[PairScore]: ...


def score_pairs(
    config: ExperimentConfig,
    params: Any,
    tokenizers: Tokenizers,
    sources: str | Iterable[str],
    targets: str | Iterable[str],
) -> PairScore | list[PairScore]:
    """Scores a target as a translation of its source, or each target of a list; see `Scorer`.

    Raises:
      TypeError: `sources` and `targets` are neither two strings nor two iterables of strings.
      UserError: the numbers of sentences differ, or one of the errors of `Scorer`.
    """
    scorer = Scorer(config, params, tokenizers)
    if isinstance(sources, str) and isinstance(targets, str):
        return next(scorer.stream([(sources, targets)]))
    sources, targets = require_texts(sources, "sources"), require_texts(targets, "targets")
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} source sentences, but {len(targets)} target sentences")
    return list(scorer.stream(zip(sources, targets, strict=True)))
