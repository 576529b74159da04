"""From text to tokens to hypotheses, for one set of options."""

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.decoding import minimum_bayes_risk, sentence_splitting
from flaxformer_mt.decoding.bad_phrases import bad_phrases
from flaxformer_mt.decoding.batching.continuous_batching import (
    ContinuousBatcher,
    Request,
    TokenHypotheses,
)
from flaxformer_mt.decoding.batching.length_buckets import longest_position
from flaxformer_mt.decoding.scoring import alignment
from flaxformer_mt.decoding.scoring.alignment import AlignmentUnit, Links
from flaxformer_mt.decoding.scoring.scorer import certain_first_token, chunked
from flaxformer_mt.decoding.scoring.teacher_forcing import check_alignment_options, teacher_force
from flaxformer_mt.decoding.sentence_splitting import Segment
from flaxformer_mt.decoding.shortlist import Shortlist
from flaxformer_mt.errors import UserError
from flaxformer_mt.memory_limits import explained_exhaustion, host_memory, require_memory
from flaxformer_mt.writing_systems import is_unsegmented, spaced_words, stripped

ALIGNMENT_CHUNK_SIZE = 64
"""Number of segments whose translations are aligned together."""


class Sentence(NamedTuple):
    """A source text, its translation's beginning, and phrases that must appear in it."""

    text: str
    prefix: str = ""
    phrases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence.

    For input that was split, numbers are sums over its segments, and sequences are concatenated.
    """

    text: str
    """Detokenized, on one line."""
    score: float = 0.0
    """Ranking score of the search: log-probability / length penalty, plus coverage penalty. NaN,
    like the log-probability, if not requested."""
    tokens: tuple[int, ...] = ()
    """Target tokens; the end token is the last one, unless the maximum length was reached."""
    log_probability: float = 0.0
    """Natural logarithm, summed over the tokens."""
    source_pieces: tuple[str, ...] = ()
    """Text of the source tokens, without end token and a language that the sentence does not name
    itself; empty, like the pieces, unless attention is needed."""
    pieces: tuple[str, ...] = ()
    """Text of the target tokens, without end token and language."""
    alignment: Links = dataclasses.field(default_factory=list)
    """(source, target) links of words or pieces, counted from 0; empty if not requested."""
    attention: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """[target pieces, source pieces], the cross-attention; None if not requested, and for input
    that was split."""


class _TokenizedSegment(NamedTuple):
    """A segment of the input that fits the model, mostly a whole sentence."""

    segment: Segment
    tokens: list[int]
    """Source tokens, without end token."""
    repeated: int = 0
    """How many of its first tokens repeat the tags of the text, and are not part of the segment."""
    prefix: Sequence[int] = ()
    """As `certain` and `phrases`, what is required of its translation; see `Request`."""
    certain: int = 0
    phrases: Sequence[Sequence[int]] = ()


_TAG = re.compile(r">>\S+<<|<\S+>")
_LANGUAGE = re.compile(r">>\S+<<|<2\S+>")
_WORD = re.compile(r"\S+")
# The language code of an OPUS-MT model, which may be followed by the text without a space.
_CODE = re.compile(r">>\S+?<<")


class SentenceDecoder:
    """Translates sentences with one set of options."""

    def __init__(
        self,
        models: Sequence[tuple[TransformerConfig, Any]],
        decode: DecodeConfig,
        tokenizers: Tokenizers,
        unit: AlignmentUnit | None = None,
        attention: bool = False,
        scores: bool = True,
    ) -> None:
        """Creates a decoder; the arguments are those of `Translator` and `translate_n_best`.

        Raises:
          UserError: an option does not fit the models, or names a file that cannot be read.
        """
        alignment.check_unit(unit)
        self.model, self.params = models[0]
        self._all_params = [params for _, params in models]
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
        configs = [model for model, _ in models]
        self.limit = longest_position(configs)
        """Maximum number of tokens of a source or target that all models support; None = any."""
        self.longest_source = longest_source(decode, configs)
        width = (decode.mbr_samples or decode.n_best) if decode.samples else decode.beam_size
        require_memory(
            4 * width * self.model.target_vocab_size,
            host_memory(),
            f"the scores of {width:,} hypotheses of one sentence (decode.beam_size, "
            "decode.n_best, decode.mbr_samples) take",
        )
        self.first = certain_first_token(tokenizers.target, decode)
        """The token that translations begin with, unless a sentence names another language."""
        self.batcher = ContinuousBatcher(
            models,
            decode,
            bad_phrases(decode, tokenizers.target, self.model.target_vocab_size),
            scores,
        )

    def translate(self, sentences: Sequence[Sentence]) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields the index and the translations, best first, of each sentence as it finishes."""
        decode = self.decode
        width = "beam_size"
        if decode.samples:
            width = "mbr_samples" if decode.mbr_samples else "n_best"
        with explained_exhaustion(
            "translation", f"lower decode.batch_tokens, decode.{width} or decode.max_source_length"
        ):
            yield from self._translate(sentences)

    def _translate(self, sentences: Sequence[Sentence]) -> Iterator[tuple[int, list[Hypothesis]]]:
        divided = self._divide(sentences)
        translated: list[list[list[Hypothesis]]] = [
            [[] if segment.tokens else [Hypothesis("")] for segment in segments]
            for segments in divided
        ]
        for index, done in enumerate(translated):
            if all(done):
                yield index, self._join_n_best(done, divided[index])
        indices = [
            (index, position)
            for index, segments in enumerate(divided)
            for position, segment in enumerate(segments)
            if segment.tokens
        ]
        segments = [divided[index][position] for index, position in indices]
        for number, hypotheses in self._translate_segments(segments):
            index, position = indices[number]
            translated[index][position] = hypotheses
            if all(translated[index]):
                yield index, self._join_n_best(translated[index], divided[index])
                translated[index].clear()

    def _divide(self, sentences: Sequence[Sentence]) -> list[list[_TokenizedSegment]]:
        """Returns each sentence's segments: one, without tokens if it is empty, or several."""
        target = self.tokenizers.target
        texts = [stripped(sentence.text) for sentence in sentences]
        encoded = self.tokenizers.source.encode(texts)
        limit = self.longest_source - 1  # One position is needed for the end token.
        divided = []
        for sentence, text, tokens in zip(sentences, texts, encoded, strict=True):
            if sentence.phrases and self.decode.samples:
                raise UserError(
                    "required phrases are not supported with sampling: remove decode.sampling and "
                    "decode.mbr_samples"
                )
            segments = [_TokenizedSegment(Segment(text), tokens if text else [])]
            if len(tokens) > limit:
                segments = self._split(text, limit)
            if len(segments) > 1 and sentence.phrases:
                raise UserError(
                    f'"{text[:30]}...": required phrases are not supported for input of more than '
                    f"{self.longest_source} tokens, which is split: pass its sentences separately, "
                    "or increase decode.max_source_length"
                )
            first = self.first
            prefix: list[int] = []
            phrases: list[list[int]] = []
            if text and (sentence.prefix or sentence.phrases):
                prefix, *phrases = _known(target, [sentence.prefix, *sentence.phrases])
            if prefix and prefix[0] in target.language_ids:
                first, prefix = (prefix[0],), prefix[1:]
            segments = [segment._replace(prefix=first, certain=len(first)) for segment in segments]
            segments[0] = segments[0]._replace(
                prefix=[*first, *prefix], phrases=[phrase for phrase in phrases if phrase]
            )
            divided.append(segments)
        return divided

    def _split(self, text: str, limit: int) -> list[_TokenizedSegment]:
        """Splits a text that has too many tokens; its tags, if any, precede every segment."""
        source = self.tokenizers.source
        tag, tag_tokens = self._tags(text)
        # A language takes the place of the vocabulary's own, other tags need room.
        is_language = not source.language_ids.isdisjoint(tag_tokens)
        replaced = int(is_language and source.first_id is not None)
        repeated = len(tag_tokens) - replaced
        segments = sentence_splitting.split(
            text.removeprefix(tag), max(1, limit - repeated), self._source_lengths
        )
        if tag:
            space = " " * text.removeprefix(tag)[0].isspace()
            segments[0] = segments[0]._replace(text=f"{tag}{space}{segments[0].text}")
        first, *others = source.encode([segment.text for segment in segments])
        encoded = [first, *([*tag_tokens, *tokens[replaced:]] for tokens in others)]
        return [
            _TokenizedSegment(segment, tokens, repeated=repeated if number else 0)
            for number, (segment, tokens) in enumerate(zip(segments, encoded, strict=True))
        ]

    def _tags(self, text: str) -> tuple[str, list[int]]:
        """Returns the tags that a text begins with, such as ">>fra<<", and their tokens."""
        words = itertools.takewhile(lambda word: self._is_tag(word[0]), _WORD.finditer(text))
        end = max((word.end() for word in words), default=0)
        code = _CODE.match(text)
        if not end and code is not None and self._is_tag(code[0]):
            end = code.end()
        if end in (0, len(text)):
            return "", []
        tokens, whole = self.tokenizers.source.encode([text[:end], text])
        return (text[:end], tokens) if whole[: len(tokens)] == tokens else ("", [])

    def _is_tag(self, word: str) -> bool:
        """Returns whether a word is one token that names a language, or a tag of the vocabulary.

        Tags are one token only at the beginning of words; placeholders (`data.keep_whole`) are so
        anywhere.
        """
        source = self.tokenizers.source
        (tokens,) = source.encode([word])
        names = (piece.removeprefix(SPACE) for piece in source.pieces(tokens))
        ids = dict(zip(names, tokens, strict=True))
        if word not in ids or not (_TAG.fullmatch(word) or ids[word] in source.language_ids):
            return False
        is_language = ids[word] in source.language_ids or bool(_LANGUAGE.fullmatch(word))
        (within,) = source.encode_parts([f"x{word}"])
        return is_language or word not in source.pieces(within)

    def _source_lengths(self, texts: Sequence[str]) -> list[int]:
        return list(map(len, self.tokenizers.source.encode(texts)))

    def _translate_segments(
        self, segments: Sequence[_TokenizedSegment]
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        hypotheses = (
            (number, self._hypotheses(found, segments[number].segment.text))
            for number, found in self.batcher.decode(list(map(self._request, segments)))
        )
        if not self.needs_attention:
            yield from hypotheses
            return
        for group in chunked(hypotheses, ALIGNMENT_CHUNK_SIZE):
            yield from self._align(segments, group)

    def _request(self, segment: _TokenizedSegment) -> Request:
        decode, num_tokens = self.decode, len(segment.tokens)
        min_length = max(decode.min_length, int(decode.min_length_factor * num_tokens))
        max_length = decode.max_length or max(longest_target(num_tokens, decode), min_length + 1)
        # Required tokens take precedence over the maximum length.
        required = [*segment.prefix, *itertools.chain(*segment.phrases)]
        max_length = max(max_length, len(required) + 1)
        if self.limit is not None:
            if len(required) + 1 > self.limit:
                raise UserError(
                    f'"{segment.segment.text[:30]}": its prefix and phrases have {len(required)} '
                    "tokens, but the position table holds only "
                    f"model.max_length={self.limit}"
                )
            max_length = min(max_length, self.limit)
        allowed = None
        source = self.tokenizers.source.with_source_end(segment.tokens)
        if self.shortlist is not None:
            allowed = self.shortlist.allowed(source, required)
        return Request(
            source=source,
            min_length=min(min_length, max_length - 1),
            max_length=max_length,
            prefix=segment.prefix,
            certain=segment.certain,
            phrases=segment.phrases,
            seed=sampling_seed(decode.seed, segment.tokens),
            allowed=allowed,
        )

    def _hypotheses(self, found: TokenHypotheses, text: str) -> list[Hypothesis]:
        if not found.tokens:
            if all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(self._all_params)):
                raise UserError(
                    f'"{text[:30]}": no translation fulfils the options that exclude tokens, such '
                    "as decode.no_repeat_ngram_size, decode.bad_words, decode.min_length and "
                    "decode.shortlist"
                )
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
        chosen = minimum_bayes_risk.choose(samples, self.decode.n_best)
        return [hypotheses[index] for index in chosen]

    def _align(
        self,
        segments: Sequence[_TokenizedSegment],
        group: Sequence[tuple[int, list[Hypothesis]]],
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        pairs = [(segments[number], h) for number, hypotheses in group for h in hypotheses]
        results = teacher_force(
            self.params,
            self.model,
            self.decode,
            [self.tokenizers.source.with_source_end(segment.tokens) for segment, _ in pairs],
            [hypothesis.tokens for _, hypothesis in pairs],
            attention=True,
        )
        aligned = (
            self._with_attention(segment, hypothesis, result.attention)
            for (segment, hypothesis), result in zip(pairs, results, strict=True)
        )
        for number, hypotheses in group:
            yield number, list(itertools.islice(aligned, len(hypotheses)))

    def _with_attention(
        self, segment: _TokenizedSegment, hypothesis: Hypothesis, attention: np.ndarray | None
    ) -> Hypothesis:
        """Adds what is computed from the attention [T, S], end tokens included.

        Languages, and other first tokens of the vocabulary, that neither the input nor the
        translation contains as text are left out.
        """
        assert attention is not None
        source, target = self.tokenizers.source, self.tokenizers.target
        attention = alignment.without_ends(
            attention, segment.tokens, hypothesis.tokens, self.model.eos_id
        )
        tokens = hypothesis.tokens[: len(attention)]
        (own,) = source.encode_parts([segment.segment.text])
        num_added = len(source.with_first(own)) - len(own)
        source_pieces = source.split([segment.segment.text])[0][num_added:]
        first_ids = {*target.language_ids, target.first_id}
        num_first = int(bool(tokens) and tokens[0] in first_ids)
        tokens = tokens[num_first:]
        attention = attention[num_first:, segment.repeated + num_added :]
        pieces = target.pieces(tokens)
        tag, _ = self._tags(segment.segment.text)
        num_tags = len(source.encode_parts([tag])[0])  # Tags are not copied.
        copies = self.decode.copy_unknown and target.unk_id in tokens

        def text_of(count: int) -> str:
            """Returns the text of the first tokens."""
            if not copies:
                return on_one_line(target.decode([tokens[:count]])[0])
            weights = attention[:count, num_tags:]
            return on_one_line(
                alignment.copy_unknown(tokens[:count], weights, source_pieces[num_tags:], target)
            )

        text = text_of(len(tokens)) if copies else hypothesis.text
        links: Links = []
        if self.unit == "pieces":
            links = alignment.align(attention)
        elif self.unit == "words":
            words = alignment.text_words(segment.segment.text, source_pieces, source)
            printed = alignment.aligned_words(pieces)
            if not is_unsegmented(text):
                prefixes = [text_of(count) for count in range(1, len(tokens) + 1)]
                printed = alignment.printed_words(prefixes, text)
            links = alignment.align_words(attention, words, printed)
        return dataclasses.replace(
            hypothesis,
            text=text,
            source_pieces=tuple(source_pieces),
            pieces=tuple(pieces),
            alignment=links,
            attention=attention if self.attention else None,
        )

    def _join_n_best(
        self,
        translations: Sequence[Sequence[Hypothesis]],
        segments: Sequence[_TokenizedSegment],
    ) -> list[Hypothesis]:
        """Joins the best translations of a text's segments, the second best ones, and so on."""
        if len(segments) == 1:
            return list(translations[0])
        ranks = range(max(map(len, translations)))
        return [
            self._join([n_best[min(rank, len(n_best) - 1)] for n_best in translations], segments)
            for rank in ranks
        ]

    def _join(
        self, hypotheses: Sequence[Hypothesis], segments: Sequence[_TokenizedSegment]
    ) -> Hypothesis:
        links: Links = []
        num_source = num_target = 0
        texts, parts = [h.text for h in hypotheses], [segment.segment for segment in segments]
        separators = sentence_splitting.separators(texts, parts)
        for hypothesis, part, separator in zip(hypotheses, parts, separators, strict=True):
            if self.unit == "words":
                # The last word of the segments before continues in this one.
                num_source -= bool(num_source) and not part.after_space
                num_target -= bool(num_target and hypothesis.pieces) and not separator
            links += [(num_source + s, num_target + t) for s, t in hypothesis.alignment]
            num_source += self._num_units(part.text, hypothesis.source_pieces)
            num_target += self._num_units(hypothesis.text, hypothesis.pieces)
        return Hypothesis(
            text="".join(itertools.chain(*zip(separators, texts, strict=True))),
            score=math.fsum(h.score for h in hypotheses),
            tokens=tuple(itertools.chain(*(h.tokens for h in hypotheses))),
            log_probability=math.fsum(h.log_probability for h in hypotheses),
            source_pieces=tuple(itertools.chain(*(h.source_pieces for h in hypotheses))),
            pieces=tuple(itertools.chain(*(h.pieces for h in hypotheses))),
            alignment=links,
        )

    def _num_units(self, text: str, pieces: Sequence[str]) -> int:
        if self.unit == "pieces":
            return len(pieces)
        if is_unsegmented(text):
            return max(alignment.aligned_words(pieces), default=-1) + 1
        return len(spaced_words(text))


def _known(target: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Returns the tokens of texts that a translation must contain."""
    encoded = target.encode_parts(texts)
    for text, tokens in zip(texts, encoded, strict=True):
        if target.unk_id in tokens:
            raise UserError(
                f'a translation cannot contain "{text}", which is partly unknown in the target '
                "vocabulary: leave it out of prefix or phrases"
            )
    return encoded


def longest_source(decode: DecodeConfig, models: Sequence[TransformerConfig]) -> int:
    """Returns the maximum number of source tokens, with end token, that are not split."""
    limit = longest_position(models)
    return decode.longest_source if limit is None else min(decode.longest_source, limit)


def longest_target(num_source_tokens: int, decode: DecodeConfig) -> int:
    """Returns the maximum number of target tokens, given that of source tokens without end."""
    return int(decode.max_length_factor * num_source_tokens) + decode.max_length_extra


def sampling_seed(seed: int, tokens: Sequence[int]) -> int:
    """Returns a 32-bit hash of the seed and the sentence's tokens, equal on every machine."""
    text = f"{seed}: {' '.join(map(str, tokens))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def on_one_line(text: str) -> str:
    """Replaces everything that some program treats as a line end, such as U+2028, by spaces.

    Byte-fallback pieces can produce such characters.
    """
    return " ".join(text.splitlines())
