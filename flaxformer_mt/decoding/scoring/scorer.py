"""How probable given translations are."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import DecodeConfig, ExperimentConfig, with_vocabulary_sizes
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.scoring.alignment import Pairs, align, align_words, without_ends
from flaxformer_mt.decoding.scoring.teacher_forcing import teacher_force
from flaxformer_mt.decoding.search.search import length_penalty
from flaxformer_mt.errors import UserError

Unit = Literal["words", "pieces"]
"""What an alignment links."""

Normalization = Literal["none", "tokens", "search"]
"""What a log-probability is divided by: nothing; the number of tokens; or the length penalty of the
search, which gives the score that the search would give this translation."""

CHUNK = 4096
"""Pairs that are read before the first of them is scored: enough to sort them by length."""


@dataclasses.dataclass(frozen=True)
class PairScore:
    """What the model thinks of one sentence pair."""

    tokens: tuple[int, ...]
    """Target tokens, the end token included."""
    token_log_probabilities: tuple[float, ...]
    """Of each token, given the source and the tokens before it; natural logarithm."""
    pieces: tuple[str, ...] = ()
    """What each token was in the text; the last is the end token's entry in the vocabulary."""
    alignment: Pairs | None = None
    """Where each target word, or piece, comes from; None if not asked for."""

    @property
    def log_probability(self) -> float:
        """Of the target sentence, its end included, given the source."""
        return math.fsum(self.token_log_probabilities)

    def normalized(self, normalization: Normalization, decode: DecodeConfig) -> float:
        """The log-probability, divided as `Normalization` says."""
        if normalization == "none":
            return self.log_probability
        if normalization == "tokens":
            return self.log_probability / len(self.tokens)
        length: Any = np.int32(len(self.tokens))
        penalty = length_penalty(length, decode.length_penalty, decode.length_penalty_kind)
        return self.log_probability / float(penalty)


class Scored(NamedTuple):
    """A source sentence and what the model thinks of each of its translations."""

    source: str
    targets: Sequence[str]
    scores: list[PairScore]


class Scorer:
    """Scores given translations with a trained model.

    What is compiled is shared by all scorers of one model configuration.
    """

    def __init__(self, config: ExperimentConfig, params: Any, tokenizers: Tokenizers) -> None:
        """Makes a scorer.

        Args:
          config: of the run; `model` and `decode` are used.
          params: the model's parameters.
          tokenizers: of the run.

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
        self, pairs: Iterable[tuple[str, str]], alignment: Unit | None = None
    ) -> Iterator[PairScore]:
        """Scores each target as a translation of its source, in their order.

        Empty sentences are scored like all others: they consist of the end token. A score does not
        depend on the other pairs.

        Args:
          pairs: source and target sentences; they are read as far as they are needed.
          alignment: also align these.

        Raises:
          UserError: a sentence is longer than a learned position table, or there is no such layer
            or head to align by.
        """
        left = iter(pairs)
        first = 1
        while chunk := list(itertools.islice(left, CHUNK)):
            yield from self._score(chunk, alignment, first)
            first += len(chunk)

    def _score(
        self, pairs: Sequence[tuple[str, str]], alignment: Unit | None, first: int
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
        self, candidates: Iterable[tuple[str, Sequence[str]]], alignment: Unit | None = None
    ) -> Iterator[Scored]:
        """Scores several translations of each sentence; otherwise as `stream`.

        Args:
          candidates: each source sentence with its translations.
          alignment: see `stream`.
        """
        counted, paired = itertools.tee(candidates)
        pairs = ((source, target) for source, targets in paired for target in targets)
        scores = self.stream(pairs, alignment)
        for source, targets in counted:
            yield Scored(source, targets, list(itertools.islice(scores, len(targets))))


def score_pairs(
    config: ExperimentConfig,
    params: Any,
    tokenizers: Tokenizers,
    sources: Sequence[str],
    targets: Sequence[str],
) -> list[PairScore]:
    """Scores each target as a translation of its source; see `Scorer`.

    Raises:
      UserError: the numbers of sentences differ; or see `Scorer`.
    """
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} source sentences, but {len(targets)} target sentences")
    scorer = Scorer(config, params, tokenizers)
    return list(scorer.stream(zip(sources, targets, strict=True)))
