"""Corpora as token sequences, with statistics.

Training corpora are encoded once and stored on disk (`token_store`); development and test sets are
encoded in memory, here. Sequences are not truncated: long pairs are handled in `mixture`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.corpora.filters import Dropped
from flaxformer_mt.data.stream.packing import Sentences
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


@dataclasses.dataclass(frozen=True)
class Texts:
    """A ragged array of UTF-8 texts: number i is `data[offsets[i]:offsets[i + 1]]`, in uint8."""

    data: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_list(cls, texts: Sequence[str]) -> "Texts":
        """Concatenates texts."""
        encoded = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> str:
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes().decode()


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """A corpus as pairs of token sequences of any length, each ending with the end token."""

    name: str
    """Origin of the text, for messages."""
    sources: Sentences | None
    """None for a language model."""
    targets: Sentences
    report: CorpusReport
    texts: Texts | None = None
    """The text of each source, for `data.subword_sampling`; otherwise None."""
    weight: float = 1.0
    parts: tuple[tuple[str, int], ...] = ()
    """See `ParallelCorpus.parts`."""
    links: Sentences | None = None
    """The links of each pair, from `LinkEncoder`; None if the corpus has none."""


class SideEncoder:
    """Encodes one side of a corpus in chunks and collects its statistics."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._lengths = [np.empty(0, np.int64)]
        self._unknown_tokens = 0
        self._unknown_example = ""

    def encode(self, texts: Sequence[str]) -> Sentences:
        """Encodes a chunk of texts, each followed by the end token."""
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
        """Returns the statistics of all chunks, which must contain at least one text."""
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
    corpus: ParallelCorpus, tokenizers: Tokenizers, config: ExperimentConfig
) -> EncodedCorpus:
    """Encodes all pairs of a corpus in memory, without filtering or truncation.

    An empty line becomes a single end token. For a language model (`config.model.has_inputs` is
    False) only the targets are encoded.

    Raises:
      UserError: model and tokenizer disagree about special ids.
    """
    check_special_ids(tokenizers, config)
    target_encoder = SideEncoder(tokenizers.target)
    targets = target_encoder.encode(corpus.targets)
    sources: Sentences | None = None
    source_report: SideReport | None = None
    if config.model.has_inputs:
        source_encoder = SideEncoder(tokenizers.source)
        sources = source_encoder.encode(corpus.sources)
        source_report = source_encoder.report()
    report = CorpusReport(len(corpus), {}, source_report, target_encoder.report())
    return EncodedCorpus(corpus.name, sources, targets, report, parts=corpus.parts)


def check_special_ids(tokenizers: Tokenizers, config: ExperimentConfig) -> None:
    """Checks that model and tokenizers agree on the padding and end tokens.

    The start token may differ, but must be in the vocabulary.

    Raises:
      UserError: an id differs, or the start token is not in the vocabulary.
    """
    for name in ("pad_id", "eos_id"):
        given = getattr(config.model, name)
        for tokenizer in (tokenizers.source, tokenizers.target):
            wanted = getattr(tokenizer, name)
            if given != wanted:
                raise UserError(f"model.{name}={given}, but the tokenizer has {name}={wanted}")
    size, start = tokenizers.target.vocab_size, config.model.bos_id
    if start >= size:
        raise UserError(f"model.bos_id={start}, but the vocabulary has {size} tokens")
