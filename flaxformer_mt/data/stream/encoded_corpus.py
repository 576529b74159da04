"""From sentence pairs to token sequences, with an account of what they are.

A corpus of any size is encoded once and kept on disk (`store.py`); development and test sets are
encoded in memory, here. Nothing is cut: which pairs fit into rows is decided when rows are planned.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.corpora.filters import Dropped
from flaxformer_mt.data.stream.packing import Sentences
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError


@dataclasses.dataclass(frozen=True)
class SideReport:
    """The kept sources, or the kept targets, of a corpus: counts of tokens, end tokens included."""

    tokens: int
    """Tokens in all."""
    mean_length: float
    """Tokens in a sentence, on average."""
    percentile_95: int
    """95% of the sentences have at most so many tokens."""
    longest: int
    """Tokens in the longest sentence."""
    unknown_tokens: int
    """Tokens that stand for what the vocabulary cannot spell."""
    unknown_example: str = ""
    """The first character that the vocabulary cannot spell."""

    @property
    def unknown_rate(self) -> float:
        """Share of the tokens that are unknown."""
        return self.unknown_tokens / self.tokens

    def __str__(self) -> str:
        example = f", such as {self.unknown_example!r}" if self.unknown_example else ""
        return (
            f"{self.tokens:,} tokens, {self.mean_length:.1f} a sentence, 95% at most "
            f"{self.percentile_95:,}, longest {self.longest:,}; "
            f"{self.unknown_rate:.2%} unknown{example}"
        )


@dataclasses.dataclass(frozen=True)
class CorpusReport:
    """What became of the pairs of a corpus; `str` gives one line to print."""

    pairs: int
    """Pairs read."""
    dropped: dict[str, Dropped]
    """By reason: how many pairs were left out, and the first of them."""
    sources: SideReport | None
    """The source side, before anything is cut to the length of a row; None in a language model."""
    targets: SideReport
    """The target side, likewise."""
    truncated: int = 0
    """Pairs kept, but cut to the length of their row."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CorpusReport":
        """The inverse of `dataclasses.asdict`."""
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
        """Pairs that are left."""
        return self.pairs - sum(dropped.count for dropped in self.dropped.values())

    def fitted_to_rows(self, dropped: Dropped | None = None, truncated: int = 0) -> "CorpusReport":
        """This report once rows have their length.

        Args:
          dropped: the pairs left out because they are longer than a row, if there are any.
          truncated: pairs that were cut instead.
        """
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
        """The lines that the report at the start of a run has for this corpus."""
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
    """Texts of different lengths, stored end to end.

    Attributes:
      data: uint8 [all bytes], UTF-8.
      offsets: int64 [texts + 1]; text i is `data[offsets[i]:offsets[i + 1]]`.
    """

    data: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_list(cls, texts: Sequence[str]) -> "Texts":
        """Stores `texts` in their order."""
        encoded = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> str:
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes().decode()


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """Pairs of token sequences of any length; each sequence ends with the end token."""

    name: str
    """What messages call it: where it was read from."""
    sources: Sentences | None
    """None in a language model."""
    targets: Sentences
    report: CorpusReport
    texts: Texts | None = None
    """The text of each source, where splits are drawn anew (`data.subword_sampling`)."""
    weight: float = 1.0
    """How often its pairs are seen, in proportion to those of other corpora."""


class SideEncoder:
    """Encodes the texts of one side part by part, and keeps count of unknown tokens.

    Args:
      tokenizer: the vocabulary of the side.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._lengths = [np.empty(0, np.int64)]
        self._unknown_tokens = 0
        self._unknown_example = ""

    def encode(self, texts: Sequence[str]) -> Sentences:
        """Tokens and end token of each text; a text of nothing but spaces is the end token."""
        end = self._tokenizer.eos_id
        sentences = Sentences.from_lists(
            [[*tokens, end] for tokens in self._tokenizer.encode(texts)]
        )
        self._lengths.append(sentences.lengths)
        unknown = np.flatnonzero(sentences.tokens == self._tokenizer.unk_id)
        self._unknown_tokens += len(unknown)
        if len(unknown) and not self._unknown_example:
            first = int(np.searchsorted(sentences.offsets, unknown[0], side="right")) - 1
            self._unknown_example = self._unknown_character(texts[first])
        return sentences

    def _unknown_character(self, text: str) -> str:
        """The first character of `text` that is unknown; all of it, if none is by itself."""
        pieces = zip(text, self._tokenizer.encode(list(text)), strict=True)
        unknown = (character for character, ids in pieces if self._tokenizer.unk_id in ids)
        return next(unknown, text)

    def report(self) -> SideReport:
        """The report on all that was encoded, at least one text."""
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
    """Turns a corpus into tokens, in memory: every pair, whatever its length.

    So a development or test set stays what it is. An empty line becomes the end token alone. A
    language model (`config.model.has_inputs` is False) gets the targets only.

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
    return EncodedCorpus(corpus.name, sources, targets, report)


def check_special_ids(tokenizers: Tokenizers, config: ExperimentConfig) -> None:
    """Makes sure that model and tokenizers mean the same by padding and end.

    The start token is free: it is no text, so no tokenizer has to agree to it.

    Raises:
      UserError: they do not.
    """
    for name in ("pad_id", "eos_id"):
        given = getattr(config.model, name)
        for tokenizer in (tokenizers.source, tokenizers.target):
            wanted = getattr(tokenizer, name)
            if given != wanted:
                raise UserError(f"model.{name}={given}, but the tokenizer's is {wanted}: set that")
