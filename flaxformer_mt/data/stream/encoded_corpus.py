"""Corpora as token sequences, with statistics.

Training corpora are encoded once and stored on disk (`token_store`); development and test sets are
encoded in memory, here. Sequences are not truncated: long pairs are handled in `mixture`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, SentencePair
from flaxformer_mt.data.corpora.rows import Dropped, location, merged
from flaxformer_mt.data.corpora.shared_text import Shared
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.data.stream.pair_fields import field_of
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError


@dataclasses.dataclass(frozen=True)
class SideReport:
    """Token statistics of one side of a corpus, after filtering; end tokens are counted.

    Lengths are numbers of tokens per sentence.
    """

    tokens: int
    mean_length: float
    percentile_95: int
    longest: int
    unknown_tokens: int
    unknown_example: str = ""
    """The first character that is not in the vocabulary."""
    unknown_id: int = dataclasses.field(default=-1, compare=False)
    """The id of unknown tokens."""

    @classmethod
    def of(cls, sentences: Sentences, unknown_id: int, example: str) -> "SideReport":
        """Returns the statistics of sentences, of which there is at least one.

        `example` is the first character that is not in the vocabulary; "" = none.
        """
        return cls.of_lengths(
            sentences.lengths,
            unknown_tokens=int(np.count_nonzero(sentences.tokens == unknown_id)),
            unknown_example=example,
            unknown_id=unknown_id,
        )

    @classmethod
    def of_lengths(cls, lengths: np.ndarray, **unknown: Any) -> "SideReport":
        """Returns the statistics of sentences of these lengths, of which there is at least one."""
        return cls._of_counts(np.bincount(lengths), **unknown)

    @classmethod
    def _of_counts(cls, counts: np.ndarray, **unknown: Any) -> "SideReport":
        """Returns the statistics of so many sentences of each length, from 0 on."""
        number, tokens = int(counts.sum()), int(counts @ np.arange(len(counts)))
        return cls(
            tokens=tokens,
            mean_length=tokens / number,
            percentile_95=int(np.searchsorted(counts.cumsum(), 0.95 * number)),
            longest=int(np.flatnonzero(counts)[-1]),
            **unknown,
        )

    def without(self, counts: np.ndarray, dropped: Sentences) -> "SideReport":
        """Returns the report without some sentences, from the number of all of each length."""
        unknown = np.count_nonzero(dropped.tokens == self.unknown_id)
        return self._of_counts(
            counts - np.bincount(dropped.lengths, minlength=len(counts)),
            unknown_tokens=self.unknown_tokens - int(unknown),
            unknown_example=self.unknown_example,
            unknown_id=self.unknown_id,
        )

    @property
    def unknown_rate(self) -> float:
        """Fraction of tokens that are unknown."""
        return self.unknown_tokens / self.tokens

    def __str__(self) -> str:
        example = f", such as {self.unknown_example!r}" if self.unknown_example else ""
        return (
            f"{self.tokens:,} tokens, {self.mean_length:.1f} per sentence, 95% at most "
            f"{self.percentile_95:,}, longest {self.longest:,}; "
            f"{self.unknown_rate:.2%} unknown{example}"
        )


@dataclasses.dataclass(frozen=True)
class CorpusReport:
    """Statistics of a corpus after filtering; `str` gives a one-line summary."""

    pairs: int
    dropped: dict[str, Dropped]
    """Dropped pairs by reason."""
    sources: SideReport | None
    """The source side, before truncation to the row length; None for a language model."""
    targets: SideReport
    truncated: int = 0

    @property
    def kept(self) -> int:
        """Number of pairs that were not dropped."""
        return self.pairs - sum(dropped.count for dropped in self.dropped.values())

    def __str__(self) -> str:
        tokens = f"{self.targets.tokens:,} target tokens"
        unknown_tokens, all_tokens = self.targets.unknown_tokens, self.targets.tokens
        if self.sources is not None:
            tokens = f"{self.sources.tokens:,} source and {tokens}"
            unknown_tokens += self.sources.unknown_tokens
            all_tokens += self.sources.tokens
        return f"{self.changes()}; {tokens}, {unknown_tokens / all_tokens:.2%} unknown"

    @property
    def is_changed(self) -> bool:
        """Whether pairs were dropped or truncated."""
        return bool(self.dropped or self.truncated)

    def changes(self) -> str:
        """Returns how many pairs there are, and how many were dropped or truncated, and why."""
        changes = [
            f"{dropped.count:,} {reason} dropped" for reason, dropped in self.dropped.items()
        ]
        if self.truncated:
            changes.append(f"{self.truncated:,} truncated")
        if not changes:
            return f"{self.pairs:,} pairs"
        return f"{self.kept:,} of {self.pairs:,} pairs kept ({', '.join(changes)})"

    def details(self) -> list[str]:
        """Returns the lines about this corpus in the report of a starting run."""
        lines = [self.changes()]
        lines += [f"{reason}: {dropped}" for reason, dropped in self.dropped.items()]
        if self.sources is not None:
            lines.append(f"source: {self.sources}")
        return [*lines, f"target: {self.targets}"]


@dataclasses.dataclass(frozen=True)
class Locations:
    """Where the pairs of a corpus were read."""

    numbers: np.ndarray
    """The line of each pair, or its number in the corpus if that is not read from files."""
    files: Sequence[tuple[int, str]]
    """The index of the first pair of each file, and its name; "" if there is no file."""

    def __getitem__(self, index: int) -> str:
        file = [name for first, name in self.files if first <= index][-1]
        return location(file, int(self.numbers[index]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedCorpus(TokenPairs):
    """A corpus as pairs of token sequences of any length, each ending with the end token."""

    name: str
    """Origin of the text, for messages."""
    report: CorpusReport
    weight: float = 1.0
    parts: tuple[tuple[str, int], ...] = ()
    """See `ParallelCorpus.parts`."""
    locations: Locations | None = None
    shared: Mapping[str, Shared] = dataclasses.field(default_factory=dict)
    """What held-out text shares with it, by the fingerprint of that text, as far as is known."""

    def location(self, index: int) -> str:
        """Describes where a pair was read: file and line, if it is of a file."""
        return location(None, index + 1) if self.locations is None else self.locations[index]

    def without(self, reason: str, example: str, indices: np.ndarray) -> "EncodedCorpus":
        """Returns the corpus with a report without some of its pairs, which are dropped."""
        report, dropped = self.report, self.take(indices)
        chunks = [[*map(np.bincount, sides)] for _, sides in self.chunks_of_lengths()]
        sources, targets = map(_added_up, zip(*chunks, strict=True))
        report = dataclasses.replace(
            report,
            dropped={**report.dropped, reason: Dropped(len(indices), example)},
            sources=report.sources
            and report.sources.without(sources, cast(Sentences, dropped.sources)),
            targets=report.targets.without(targets, dropped.targets),
        )
        return dataclasses.replace(self, report=report)


def _added_up(counts: Sequence[np.ndarray]) -> np.ndarray:
    """Adds arrays, as if shorter ones ended with zeros."""
    longest = max(map(len, counts))
    return np.sum([np.pad(each, (0, longest - len(each))) for each in counts], axis=0)


class EncodedPairs(NamedTuple):
    """Pairs as tokens, and what their reports need that tokens do not tell."""

    tokens: TokenPairs
    unknown_examples: tuple[str, str]
    """The first characters of source and target that are not in the vocabulary; "" = none."""
    notes: Mapping[str, Dropped] = MappingProxyType({})
    """What is said of pairs that lack values of a field."""


def encode_pairs(
    pairs: Sequence[SentencePair],
    tokenizers: Tokenizers,
    has_inputs: bool,
    fields: Sequence[str] = (),
) -> EncodedPairs:
    """Encodes pairs; an empty line becomes a single end token.

    Args:
      pairs: with sources that are "" for a language model.
      tokenizers: the vocabularies.
      has_inputs: False for a language model.
      fields: the names of what the pairs have beside their texts, see `pair_fields`.
    """
    sources, example = None, ""
    if has_inputs:
        source = tokenizers.source
        sources, example = _encode_side([text for text, _ in pairs], source, source.with_source_end)
    target = tokenizers.target
    targets, target_example = _encode_side(
        [text for _, text in pairs], target, lambda tokens: [*tokens, target.eos_id]
    )
    encoded = {name: field_of(name).encode(pairs, tokenizers) for name in fields}
    return EncodedPairs(
        TokenPairs(sources, targets, {name: values for name, (values, _) in encoded.items()}),
        (example, target_example),
        merged(notes for _, notes in encoded.values()),
    )


def _encode_side(
    texts: Sequence[str], tokenizer: Tokenizer, with_end: Callable[[list[int]], list[int]]
) -> tuple[Sentences, str]:
    sentences = Sentences.from_lists([*map(with_end, tokenizer.encode(texts))])
    unknown = np.flatnonzero(sentences.tokens == tokenizer.unk_id)
    if not len(unknown):
        return sentences, ""
    first = int(np.searchsorted(sentences.offsets, unknown[0], side="right")) - 1
    token = int(unknown[0] - sentences.offsets[first])
    return sentences, tokenizer.split([texts[first]])[0][token].strip(SPACE)


def encode_corpus(
    corpus: ParallelCorpus, tokenizers: Tokenizers, model: TransformerConfig
) -> EncodedCorpus:
    """Encodes all pairs of a corpus in memory, without filtering or truncation.

    For a language model (`model.has_inputs` is False) only the targets are encoded.
    """
    check_special_ids(tokenizers, model)
    pairs, examples, _ = encode_pairs(list(corpus.pairs()), tokenizers, model.has_inputs)
    malformed = corpus.malformed()
    read = len(corpus) + sum(rows.count for rows in malformed.values())
    sources = None
    if pairs.sources is not None:
        sources = SideReport.of(pairs.sources, tokenizers.source.unk_id, examples[0])
    targets = SideReport.of(pairs.targets, tokenizers.target.unk_id, examples[1])
    report = CorpusReport(read, malformed, sources, targets)
    return EncodedCorpus(
        pairs.sources, pairs.targets, name=corpus.name, report=report, parts=corpus.parts
    )


def check_special_ids(tokenizers: Tokenizers, model: TransformerConfig) -> None:
    """Checks that model and tokenizers agree on the padding and end tokens.

    The start token may differ, but must be in the vocabulary.
    """
    for name in ("pad_id", "eos_id"):
        given = getattr(model, name)
        for tokenizer in (tokenizers.source, tokenizers.target):
            wanted = getattr(tokenizer, name)
            if given != wanted:
                raise UserError(
                    f"model.{name}={given}, but the tokenizer has {name}={wanted}: leave it out"
                )
    size, start = tokenizers.target.vocab_size, model.bos_id
    if start >= size:
        raise UserError(f"model.bos_id={start}, but the vocabulary has {size} tokens")
