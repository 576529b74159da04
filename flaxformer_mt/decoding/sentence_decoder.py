"""Sentences in, hypotheses out, for one set of options: from text to token requests and back."""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding import minimum_bayes_risk, sentence_splitting
from flaxformer_mt.decoding.batching.continuous_batching import ContinuousBatcher, Found, Request
from flaxformer_mt.decoding.batching.length_buckets import longest_sentence
from flaxformer_mt.decoding.scoring import alignment
from flaxformer_mt.decoding.scoring.alignment import Pairs
from flaxformer_mt.decoding.scoring.scorer import Unit
from flaxformer_mt.decoding.scoring.teacher_forcing import check_alignment_options, teacher_force
from flaxformer_mt.decoding.sentence_splitting import Piece
from flaxformer_mt.decoding.shortlists.shortlist import Shortlist
from flaxformer_mt.errors import UserError

LONGEST_SOURCE = 512
"""Tokens of the longest input that is not split, unless `decode.max_source_length` says another."""

ALIGNED_TOGETHER = 64
"""Parts whose translations are aligned in one go."""

_T = TypeVar("_T")


class Sentence(NamedTuple):
    """What is to be translated, and what its translation must have."""

    text: str
    """A sentence, or a longer text. An empty one has one translation, the empty one."""
    prefix: str = ""
    """What the translation begins with."""
    phrases: tuple[str, ...] = ()
    """What it must have somewhere."""


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence.

    Of input that was split, numbers are sums over its parts, and sequences are joined.
    """

    text: str
    """Detokenised, on one line."""
    score: float = 0.0
    """As the search ranks it: log-probability / length penalty, plus coverage penalty. It is NaN,
    as is the log-probability, where they were not asked for."""
    tokens: tuple[int, ...] = ()
    """Target tokens; the end token is the last, if the model came to an end."""
    log_probability: float = 0.0
    """Natural logarithm, sum over the tokens."""
    source_pieces: tuple[str, ...] = ()
    """What the tokens of the source are in its text, and ..."""
    pieces: tuple[str, ...] = ()
    """... those of the target, without end tokens; both only where attention was asked for."""
    alignment: Pairs = dataclasses.field(default_factory=list)
    """(source, target) pairs of words, or of pieces, counted from 0; empty if not asked for."""
    attention: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """[target pieces, source pieces], how much was attended to each; None if not asked for, and of
    input that was split."""


class _Part(NamedTuple):
    """A part of the input that fits the model: nearly always a whole sentence."""

    piece: Piece
    tokens: list[int]
    """Of the source, without end token."""
    prefix: Sequence[int] = ()
    """What its translation begins with."""
    phrases: Sequence[Sequence[int]] = ()
    """What its translation must have."""


class SentenceDecoder:
    """Translates sentences with one set of options."""

    def __init__(
        self,
        models: Sequence[tuple[TransformerConfig, Any]],
        decode: DecodeConfig,
        tokenizers: Tokenizers,
        unit: Unit | None = None,
        attention: bool = False,
        scores: bool = True,
    ) -> None:
        """Makes a decoder.

        Args:
          models: configuration and parameters of each model of an ensemble. Alignments are those
            of the first.
          decode: the options.
          tokenizers: of all models.
          unit: what to align; None = nothing.
          attention: also give the attention itself.
          scores: give scores and log-probabilities; a greedy search is faster without.

        Raises:
          UserError: an option does not fit the models, or names a file that cannot be read.
        """
        self.model, self.params = models[0]
        self.decode = decode
        self.tokenizers = tokenizers
        self.unit = unit
        self.attention = attention
        self.scores = scores
        self.needs_attention = attention or unit is not None or decode.copy_unknown
        if self.needs_attention:
            check_alignment_options(self.model, decode)
        self.shortlist: Shortlist | None = None
        if decode.shortlist:
            self.shortlist = Shortlist.read(
                decode.shortlist, tokenizers, decode.shortlist_first, decode.shortlist_best
            )
        limits = [limit for model, _ in models if (limit := longest_sentence(model)) is not None]
        self.limit = min(limits, default=None)
        """Tokens of the longest sentence, or translation, that all models know positions for."""
        self.longest_source = min([decode.max_source_length or LONGEST_SOURCE, *limits])
        self.engine = ContinuousBatcher(models, decode, self._bad_phrases(), scores)

    def translate(self, sentences: Sequence[Sentence]) -> Iterator[tuple[int, list[Hypothesis]]]:
        """The translations of each sentence, best first, with its index, as they finish.

        Raises:
          UserError: a sentence cannot have what is asked of it, or parameters are not finite.
        """
        divided = self._divide(sentences)
        for index, own in enumerate(divided):
            if not own:
                yield index, [Hypothesis("")]
        places = [(index, place) for index, own in enumerate(divided) for place in range(len(own))]
        translated: list[dict[int, list[Hypothesis]]] = [{} for _ in sentences]
        for number, hypotheses in self._translate_parts(list(itertools.chain(*divided))):
            index, place = places[number]
            done = translated[index]
            done[place] = hypotheses
            if len(done) == len(divided[index]):
                yield index, self._joined([done[p] for p in sorted(done)], divided[index])
                done.clear()

    def _divide(self, sentences: Sequence[Sentence]) -> list[list[_Part]]:
        """Each sentence's parts: one, or none of an empty one, or several of a long text."""
        source, target = self.tokenizers.source, self.tokenizers.target
        texts = [sentence.text.strip() for sentence in sentences]
        limit = self.longest_source - 1  # The end token needs a place, too.
        divided = []
        for sentence, text, tokens in zip(sentences, texts, source.encode(texts), strict=True):
            if sentence.phrases and self.decode.samples:
                raise UserError(
                    "phrases that must appear can be searched for, but not sampled: leave out "
                    "decode.sampling and decode.mbr_samples"
                )
            pieces, encoded = [Piece(text)] * bool(text), [tokens]
            if len(tokens) > limit:
                pieces = sentence_splitting.split(text, limit, self._source_lengths)
                encoded = source.encode([piece.text for piece in pieces])
            if len(pieces) > 1 and sentence.phrases:
                raise UserError(
                    f'"{text[:30]}...": phrases that must appear cannot be given for input of more '
                    f"than {self.longest_source} tokens, which is split: give its sentences one by "
                    "one, or a larger decode.max_source_length"
                )
            parts = [_Part(*part) for part in zip(pieces, encoded, strict=False)]
            if parts and (sentence.prefix or sentence.phrases):
                prefix, *phrases = target.encode([sentence.prefix, *sentence.phrases])
                parts[0] = parts[0]._replace(prefix=prefix, phrases=[p for p in phrases if p])
            divided.append(parts)
        return divided

    def _source_lengths(self, texts: Sequence[str]) -> list[int]:
        return list(map(len, self.tokenizers.source.encode(texts)))

    def _translate_parts(self, parts: Sequence[_Part]) -> Iterator[tuple[int, list[Hypothesis]]]:
        """The translations of each part, with its number, as they finish."""
        with_text = [number for number, part in enumerate(parts) if part.tokens]
        for number, part in enumerate(parts):
            if not part.tokens:
                yield number, [Hypothesis("")]
        found = self.engine.decode([self._request(parts[number]) for number in with_text])
        hypotheses = ((with_text[place], self._hypotheses(found)) for place, found in found)
        if not self.needs_attention:
            yield from hypotheses
            return
        for group in grouped(hypotheses, ALIGNED_TOGETHER):
            yield from self._aligned(parts, group)

    def _request(self, part: _Part) -> Request:
        """What is asked of a part's translation."""
        decode, num_tokens = self.decode, len(part.tokens)
        max_length = decode.max_length or longest_target(num_tokens, decode)
        # What must be there is there, however short the translation should be.
        must = [*part.prefix, *itertools.chain(*part.phrases)]
        max_length = max(max_length, len(must) + 1)
        if self.limit is not None:
            if len(must) + 1 > self.limit:
                raise UserError(
                    f'"{part.piece.text[:30]}": its translation shall have {len(must)} given '
                    f"tokens, but the model knows only model.max_length={self.limit} positions"
                )
            max_length = min(max_length, self.limit)
        min_length = max(decode.min_length, int(decode.min_length_factor * num_tokens))
        allowed = None
        if self.shortlist is not None:
            allowed = self.shortlist.allowed([*part.tokens, self.model.eos_id], must)
        return Request(
            source=[*part.tokens, self.model.eos_id],
            min_length=min(min_length, max_length - 1),
            max_length=max_length,
            prefix=part.prefix,
            phrases=part.phrases,
            seed=sampling_seed(decode.seed, part.tokens),
            allowed=allowed,
        )

    def _hypotheses(self, found: Found) -> list[Hypothesis]:
        """The hypotheses of a part as text; of samples those that minimise the Bayes risk."""
        if not found.tokens:
            raise UserError("the model's parameters are not finite: training has diverged")
        texts = map(on_one_line, self.tokenizers.target.decode(found.tokens))
        unknown = [math.nan] * len(found.tokens)
        scores, log_probabilities = (
            (found.scores, found.log_probabilities) if self.scores else (unknown, unknown)
        )
        hypotheses = [
            Hypothesis(*values)
            for values in zip(texts, scores, found.tokens, log_probabilities, strict=True)
        ]
        if not self.decode.mbr_samples:
            return hypotheses
        samples = [hypothesis.text for hypothesis in hypotheses]
        return [
            hypotheses[index] for index in minimum_bayes_risk.choose(samples, self.decode.n_best)
        ]

    def _aligned(
        self, parts: Sequence[_Part], group: Sequence[tuple[int, list[Hypothesis]]]
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """The same hypotheses with what their attention tells."""
        pairs = [(parts[number], h) for number, hypotheses in group for h in hypotheses]
        eos_id = self.model.eos_id
        results = teacher_force(
            self.params,
            self.model,
            self.decode,
            [[*part.tokens, eos_id] for part, _ in pairs],
            [hypothesis.tokens for _, hypothesis in pairs],
            attention=True,
        )
        aligned = (
            self._with_attention(part, hypothesis, result.attention)
            for (part, hypothesis), result in zip(pairs, results, strict=True)
        )
        for number, hypotheses in group:
            yield number, list(itertools.islice(aligned, len(hypotheses)))

    def _with_attention(
        self, part: _Part, hypothesis: Hypothesis, attention: np.ndarray | None
    ) -> Hypothesis:
        """A hypothesis with what its attention [T, S], that of the ends included, tells."""
        assert attention is not None
        target = self.tokenizers.target
        attention = alignment.without_ends(attention, hypothesis.tokens, self.model.eos_id)
        tokens = hypothesis.tokens[: len(attention)]
        source_pieces = self.tokenizers.source.split([part.piece.text])[0]
        pieces = target.pieces(tokens)
        pairs: Pairs = []
        if self.unit == "words":
            pairs = alignment.align_words(attention, source_pieces, pieces)
        elif self.unit == "pieces":
            pairs = alignment.align(attention)
        text = hypothesis.text
        if self.decode.copy_unknown and target.unk_id in tokens:
            text = on_one_line(alignment.copy_unknown(tokens, attention, source_pieces, target))
        return dataclasses.replace(
            hypothesis,
            text=text,
            source_pieces=tuple(source_pieces),
            pieces=tuple(pieces),
            alignment=pairs,
            attention=attention if self.attention else None,
        )

    def _joined(
        self, translations: Sequence[Sequence[Hypothesis]], parts: Sequence[_Part]
    ) -> list[Hypothesis]:
        """The translations of a text from those of its parts: the best with the best, and so on."""
        if len(parts) == 1:
            return list(translations[0])
        ranks = range(max(map(len, translations)))
        return [
            self._join([own[min(rank, len(own) - 1)] for own in translations], parts)
            for rank in ranks
        ]

    def _join(self, hypotheses: Sequence[Hypothesis], parts: Sequence[_Part]) -> Hypothesis:
        pairs: Pairs = []
        num_source = num_target = 0
        for hypothesis in hypotheses:
            pairs += [(num_source + s, num_target + t) for s, t in hypothesis.alignment]
            num_source += self._num_units(hypothesis.source_pieces)
            num_target += self._num_units(hypothesis.pieces)
        return Hypothesis(
            text=sentence_splitting.join(
                [h.text for h in hypotheses], [part.piece for part in parts]
            ),
            score=math.fsum(h.score for h in hypotheses),
            tokens=tuple(itertools.chain(*(h.tokens for h in hypotheses))),
            log_probability=math.fsum(h.log_probability for h in hypotheses),
            source_pieces=tuple(itertools.chain(*(h.source_pieces for h in hypotheses))),
            pieces=tuple(itertools.chain(*(h.pieces for h in hypotheses))),
            alignment=pairs,
        )

    def _num_units(self, pieces: Sequence[str]) -> int:
        """How many words, or pieces, an alignment counts."""
        if self.unit == "pieces":
            return len(pieces)
        return max(alignment.words(pieces), default=-1) + 1

    def _bad_phrases(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences that must not appear."""
        words = self.tokenizers.target.encode([word.strip() for word in self.decode.bad_words])
        ids = [[int(token) for token in phrase.split(",")] for phrase in self.decode.bad_word_ids]
        for phrase in ids:
            if max(phrase) >= self.model.target_vocab_size:
                raise UserError(
                    f"decode.bad_word_ids: {max(phrase)} is no token; the vocabulary has "
                    f"{self.model.target_vocab_size}, from 0"
                )
        return tuple(tuple(phrase) for phrase in (*words, *ids) if phrase)


def longest_target(num_source_tokens: int, decode: DecodeConfig) -> int:
    """The most tokens that a translation of so many source tokens (end not counted) may have."""
    return int(decode.max_length_factor * num_source_tokens) + decode.max_length_extra


def sampling_seed(seed: int, tokens: Sequence[int]) -> int:
    """32 bits that follow from the seed and the sentence's tokens, on any machine."""
    text = f"{seed}: {' '.join(map(str, tokens))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def on_one_line(text: str) -> str:
    """The text without what some program takes for the end of a line, such as U+2028.

    Pieces for single bytes can spell it.
    """
    return " ".join(text.splitlines())


def grouped(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Lists of `size` items; the last may be shorter."""
    left = iter(items)
    while group := list(itertools.islice(left, size)):
        yield group
