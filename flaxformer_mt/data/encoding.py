"""From sentence pairs to token sequences that fit into rows, with an account of what was left out.

Nothing is left out silently: `CorpusReport` counts it, and `data.long_sentences` decides about it.
"""

import dataclasses
import itertools

import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpus import ParallelCorpus
from flaxformer_mt.data.packing import Sentences
from flaxformer_mt.data.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError


@dataclasses.dataclass(frozen=True)
class CorpusReport:
    """What became of a corpus on its way into rows; `str` gives a line to print."""

    name: str
    """Where the pairs were read from."""
    pairs: int
    """Pairs read."""
    empty: int
    """Pairs dropped because a side is empty or nothing but white space."""
    dropped: int
    """Pairs dropped because a side is longer than its row."""
    truncated: int
    """Pairs kept, but cut to the length of their row."""
    source_tokens: int
    """Tokens kept, end tokens included; 0 in a language model."""
    target_tokens: int
    """Tokens kept, end tokens included."""
    unknown_tokens: int
    """Tokens kept, of both sides, that stand for what the vocabulary cannot spell."""

    @property
    def kept(self) -> int:
        """Pairs that go into rows."""
        return self.pairs - self.empty - self.dropped

    @property
    def unknown_rate(self) -> float:
        """Share of the kept tokens that are unknown."""
        return self.unknown_tokens / (self.source_tokens + self.target_tokens)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.kept:,} of {self.pairs:,} pairs kept "
            f"({self.empty:,} with an empty side and {self.dropped:,} longer than a row dropped, "
            f"{self.truncated:,} truncated); {self.source_tokens:,} source and "
            f"{self.target_tokens:,} target tokens, {self.unknown_rate:.2%} unknown"
        )


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """Pairs of token sequences; each ends with the end token and fits into a row."""

    sources: Sentences | None
    """None in a language model."""
    targets: Sentences
    report: CorpusReport


@dataclasses.dataclass(frozen=True)
class _Side:
    """The sources or the targets of a corpus, and how they become tokens."""

    texts: list[str]
    tokenizer: Tokenizer
    row_length: int

    def encode(self, numbers: list[int]) -> list[list[int]]:
        """Tokens and end token of the texts with these indices."""
        sentences = self.tokenizer.encode([self.texts[number] for number in numbers])
        return [[*tokens, self.tokenizer.eos_id] for tokens in sentences]

    def truncate(self, tokens: list[int]) -> list[int]:
        """As many tokens as a row has room for; the last one is still the end token."""
        if len(tokens) <= self.row_length:
            return tokens
        return [*tokens[: self.row_length - 1], self.tokenizer.eos_id]

    def count_unknown(self, sentences: Sentences) -> int:
        return int(np.count_nonzero(sentences.tokens == self.tokenizer.unk_id))


def encode_corpus(
    corpus: ParallelCorpus, tokenizers: Tokenizers, config: ExperimentConfig
) -> EncodedCorpus:
    """Turns text into tokens, and deals with pairs that are empty or longer than a row.

    A language model (`config.model.has_inputs` is False) gets the targets only.

    Raises:
      UserError: model and tokenizer disagree about special ids; a pair is longer than a row and
        `data.long_sentences` is "error"; no pair is left.
    """
    _check_special_ids(tokenizers, config)
    sides = [_Side(corpus.targets, tokenizers.target, config.data.target_row_length)]
    if config.model.has_inputs:
        sides.append(_Side(corpus.sources, tokenizers.source, config.data.source_row_length))

    numbers = [i for i in range(len(corpus)) if all(side.texts[i].strip() for side in sides)]
    encoded = [side.encode(numbers) for side in sides]
    fits = [
        all(len(tokens) <= side.row_length for side, tokens in zip(sides, pair, strict=True))
        for pair in zip(*encoded, strict=True)
    ]
    empty, too_long = len(corpus) - len(numbers), fits.count(False)
    row_lengths = (
        f"data.source_row_length={config.data.source_row_length} or "
        f"data.target_row_length={config.data.target_row_length}"
    )
    if too_long and config.data.long_sentences == "error":
        raise UserError(
            f"{corpus.name}: {too_long} of {len(corpus)} pairs are longer than {row_lengths}, the "
            f"first is pair {numbers[fits.index(False)] + 1}; raise these, or set "
            "data.long_sentences to drop or truncate"
        )
    if config.data.long_sentences == "drop":
        encoded = [list(itertools.compress(sentences, fits)) for sentences in encoded]
    if not encoded[0]:
        raise UserError(
            f"{corpus.name}: none of {len(corpus)} pairs is left; {empty} have an empty side, "
            f"{too_long} are longer than {row_lengths}"
        )

    stored = [
        Sentences.from_lists([side.truncate(tokens) for tokens in sentences])
        for side, sentences in zip(sides, encoded, strict=True)
    ]
    targets, sources = stored[0], stored[1] if config.model.has_inputs else None
    report = CorpusReport(
        name=corpus.name,
        pairs=len(corpus),
        empty=empty,
        dropped=too_long if config.data.long_sentences == "drop" else 0,
        truncated=too_long if config.data.long_sentences == "truncate" else 0,
        source_tokens=0 if sources is None else len(sources.tokens),
        target_tokens=len(targets.tokens),
        unknown_tokens=sum(
            side.count_unknown(sentences) for side, sentences in zip(sides, stored, strict=True)
        ),
    )
    return EncodedCorpus(sources, targets, report)


def _check_special_ids(tokenizers: Tokenizers, config: ExperimentConfig) -> None:
    """The start token is free: it is no text, so no tokenizer has to agree to it."""
    for name in ("pad_id", "eos_id"):
        given = getattr(config.model, name)
        for tokenizer in (tokenizers.source, tokenizers.target):
            wanted = getattr(tokenizer, name)
            if given != wanted:
                raise UserError(f"model.{name}={given}, but the tokenizer's is {wanted}: set that")
