"""Corpora as token sequences, with statistics.

Training corpora are encoded once and stored on disk (`token_store`); development and test sets are
encoded in memory, here. Sequences are not truncated: long pairs are handled in `mixture`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.corpora.alignments import AlignedPair
from flaxformer_mt.data.corpora.corpus import Corpus, ParallelCorpus, SentencePair
from flaxformer_mt.data.corpora.filters import Dropped
from flaxformer_mt.data.stream.links import LinkEncoder
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CorpusReport":
        """Inverts `dataclasses.asdict`."""
        sources, targets, dropped = values["sources"], values["targets"], values["dropped"]
        return cls(
            **{
                **values,
                "dropped": {reason: Dropped(**pairs) for reason, pairs in dropped.items()},
                "sources": sources and SideReport(**sources),
                "targets": SideReport(**targets),
            }
        )

    @property
    def kept(self) -> int:
        """Number of pairs that were not dropped."""
        return self.pairs - sum(dropped.count for dropped in self.dropped.values())

    def fitted_to_rows(self, dropped: Dropped | None = None, truncated: int = 0) -> "CorpusReport":
        """Returns the report with the pairs longer than a row, which were dropped or truncated."""
        too_long = {} if dropped is None else {"longer than a row": dropped}
        return dataclasses.replace(self, dropped={**self.dropped, **too_long}, truncated=truncated)

    def __str__(self) -> str:
        tokens = f"{self.targets.tokens:,} target tokens"
        unknown_tokens, all_tokens = self.targets.unknown_tokens, self.targets.tokens
        if self.sources is not None:
            tokens = f"{self.sources.tokens:,} source and {tokens}"
            unknown_tokens += self.sources.unknown_tokens
            all_tokens += self.sources.tokens
        return f"{self._pairs()}; {tokens}, {unknown_tokens / all_tokens:.2%} unknown"

    def _pairs(self) -> str:
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
        lines = [self._pairs()]
        lines += [
            f"{reason}: {dropped.count:,}, the first is {dropped.example}"
            for reason, dropped in self.dropped.items()
        ]
        if self.sources is not None:
            lines.append(f"source: {self.sources}")
        return [*lines, f"target: {self.targets}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedCorpus(TokenPairs):
    """A corpus as pairs of token sequences of any length, each ending with the end token."""

    name: str
    """Origin of the text, for messages."""
    report: CorpusReport
    weight: float = 1.0
    parts: tuple[tuple[str, int], ...] = ()
    """See `ParallelCorpus.parts`."""


class PairEncoder:
    """Encodes the pairs of a corpus in chunks, and collects their statistics."""

    def __init__(
        self, tokenizers: Tokenizers, corpus: Corpus, has_inputs: bool, keeps_texts: bool = False
    ) -> None:
        self._sources = _SideEncoder(tokenizers.source) if has_inputs else None
        self._targets = _SideEncoder(tokenizers.target)
        self._links = LinkEncoder(tokenizers, corpus.name) if corpus.is_aligned else None
        self._keeps_texts = keeps_texts and has_inputs

    def encode(self, pairs: Sequence[SentencePair]) -> TokenPairs:
        """Encodes a chunk of pairs; an empty line becomes a single end token."""
        sources = [source for source, _ in pairs]
        return TokenPairs(
            sources=self._sources.encode(sources) if self._sources else None,
            targets=self._targets.encode([target for _, target in pairs]),
            links=self._links.encode(cast(Sequence[AlignedPair], pairs)) if self._links else None,
            texts=Sentences.from_texts(sources) if self._keeps_texts else None,
        )

    def report(self, pairs: int, dropped: dict[str, Dropped]) -> CorpusReport:
        """Returns the statistics of all chunks, which must contain at least one pair."""
        if self._links:
            self._links.finish()
        sources = self._sources.report() if self._sources else None
        return CorpusReport(pairs, dropped, sources, self._targets.report())


class _SideEncoder:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._lengths = [np.empty(0, np.int64)]
        self._unknown_tokens = 0
        self._unknown_example = ""

    def encode(self, texts: Sequence[str]) -> Sentences:
        end = self._tokenizer.eos_id
        sentences = Sentences.from_lists(
            [[*tokens, end] for tokens in self._tokenizer.encode(texts)]
        )
        self._lengths.append(sentences.lengths)
        unknown = np.flatnonzero(sentences.tokens == self._tokenizer.unk_id)
        self._unknown_tokens += len(unknown)
        if len(unknown) and not self._unknown_example:
            first = int(np.searchsorted(sentences.offsets, unknown[0], side="right")) - 1
            token = int(unknown[0] - sentences.offsets[first])
            self._unknown_example = self._tokenizer.split([texts[first]])[0][token].strip(SPACE)
        return sentences

    def report(self) -> SideReport:
        lengths = np.concatenate(self._lengths)
        return SideReport(
            tokens=int(lengths.sum()),
            mean_length=float(lengths.mean()),
            percentile_95=int(np.quantile(lengths, 0.95, method="inverted_cdf")),
            longest=int(lengths.max()),
            unknown_tokens=self._unknown_tokens,
            unknown_example=self._unknown_example,
        )


def encode_corpus(
    corpus: ParallelCorpus, tokenizers: Tokenizers, model: TransformerConfig
) -> EncodedCorpus:
    """Encodes all pairs of a corpus in memory, without filtering or truncation.

    For a language model (`model.has_inputs` is False) only the targets are encoded.
    """
    check_special_ids(tokenizers, model)
    encoder = PairEncoder(tokenizers, corpus, model.has_inputs)
    pairs = encoder.encode(list(corpus.pairs()))
    report = encoder.report(len(corpus), {})
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
                raise UserError(f"model.{name}={given}, but the tokenizer has {name}={wanted}")
    size, start = tokenizers.target.vocab_size, model.bos_id
    if start >= size:
        raise UserError(f"model.bos_id={start}, but the vocabulary has {size} tokens")
