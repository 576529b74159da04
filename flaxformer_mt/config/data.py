"""Corpora, filters, vocabularies and the layout of batches."""

import dataclasses
from typing import Literal, TypeAlias

from flaxformer_mt.config.fields import require

CorpusKind: TypeAlias = Literal["text", "tsv", "phrases", "reverse", "tfds"]
"""Where pairs are read from; the help of `DataConfig.corpus` explains each."""


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """One of several corpora that are read together; what is left empty is as in `data`."""

    kind: CorpusKind | Literal[""] = ""
    """As data.corpus."""
    path: str = ""
    """As data.path."""
    split: str = ""
    """As data.train_split, data.valid_split or data.test_split."""
    source_language: str = ""
    """As data.source_language."""
    target_language: str = ""
    """As data.target_language."""
    tag: str = ""
    """Put before every source sentence: "<2de>" names the target language, "<bt>" a back-translated
    source, "<news>" a domain. Several are parted by spaces; each is one piece of the vocabulary."""
    weight: float = 1.0
    """How often its pairs are seen, in proportion to those of the other corpora; see
    data.mixture_temperature."""

    def __post_init__(self) -> None:
        require(self.weight > 0, "a corpus' weight must be positive")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where sentence pairs come from and how they become rows of tokens."""

    corpus: CorpusKind = "text"
    """text: SPLIT.LANGUAGE or SPLIT.LANGUAGE.gz in data.path, one sentence a line; tsv: SPLIT.tsv
    or SPLIT.tsv.gz in data.path, source and target parted by a tab; phrases: generated numbers,
    dates, times, units, currencies and lists; reverse: generated digit strings, to be reversed;
    tfds: the TensorFlow Datasets builder that data.path names."""
    path: str = ""
    """Folder of the corpus (text, tsv); name of a TensorFlow Datasets builder, or the folder in
    which it was prepared (tfds). "tfds:NAME" is a builder whatever data.corpus says."""
    source_language: str = "en"
    """Language translated from: the file ending of text, the locale of phrases."""
    target_language: str = "de"
    """Language translated into."""
    train_split: str = "train"
    """Name of the split to train on. Of files it may be several names and patterns, parted by
    commas: "europarl,news-*"."""
    valid_split: str = "valid"
    """Name of the split that steers training (best checkpoint)."""
    test_split: str = "test"
    """Name of the split that is only measured at the end."""
    generated_pairs: int = 20000
    """Training pairs of a generated corpus; valid and test get 500 each."""
    generator_seed: int = 0
    """Seed of a generated corpus."""
    train_corpora: tuple[CorpusConfig, ...] = ()
    """Corpora to train on together; none = the one that the fields above describe."""
    valid_corpora: tuple[CorpusConfig, ...] = ()
    """Corpora to validate on together; none = the one that the fields above describe."""
    test_corpora: tuple[CorpusConfig, ...] = ()
    """Corpora to test on together; none = the one that the fields above describe."""
    mixture_temperature: float = 1.0
    """t: a corpus of n pairs is seen in proportion to weight * n**(1/t). 1 takes every pair of all
    corpora equally often; more favours small corpora; 1e9 makes all equal."""

    max_length_ratio: float = 0.0
    """Drop training pairs of which one side has more than this times the words of the other; 0 =
    keep."""
    max_words: int = 0
    """Drop training pairs with more words than this on a side; 0 = keep."""
    drop_identical: bool = False
    """Drop training pairs whose two sides are the same text."""
    drop_duplicates: bool = False
    """Drop training pairs that were seen before, in this corpus or an earlier one."""
    drop_wrong_script: bool = False
    """Drop training pairs of which a side is mostly not in the script of its language."""
    max_unknown_rate: float = 0.1
    """Refuse a corpus of whose tokens a larger share is unknown."""

    tokenizer: Literal["bpe", "unigram"] = "bpe"
    """SentencePiece model, trained on the training split on first use."""
    vocab_size: int = 10000
    """Pieces to learn (of each language, unless joint_vocabulary). Small corpora get fewer."""
    joint_vocabulary: bool = True
    """One vocabulary for both languages."""
    byte_fallback: bool = True
    """Spell characters outside the vocabulary as bytes instead of <unk>."""
    character_coverage: float = 1.0
    """Share of the corpus' characters that get a piece of their own."""
    tokenizer_path: str = ""
    """Run folder, or its folder `tokenizer`, whose vocabulary is used instead of learning one."""
    subword_sampling: float = 0.0
    """Split sources anew each time they are seen. bpe: the probability with which a merge is left
    out (BPE-dropout; 0.1 is usual); unigram: the exponent of a split's probability (subword
    regularisation; 0.1 is usual, 1 varies least). 0 = always the best split."""

    batching: Literal["packed", "buckets"] = "packed"
    """packed: several pairs in a row, one shape; buckets: one pair in a row, a shape for each of
    data.bucket_lengths. Validation always packs."""
    bucket_lengths: tuple[int, ...] = (16, 32, 64)
    """Row lengths of buckets, of source and target; the longest takes the place of
    data.source_row_length and data.target_row_length. A batch has the more rows the shorter they
    are."""
    source_row_length: int = 0
    """S: tokens in a packed source row; also the longest source sentence, end token included.
    0 = as many as fill as well as the target rows do."""
    target_row_length: int = 64
    """T: tokens in a packed target row; also the longest target sentence, end token included."""
    long_sentences: Literal["drop", "truncate", "error"] = "drop"
    """What happens to training pairs longer than a row; the count is reported."""

    def __post_init__(self) -> None:
        require(
            self.source_row_length == 0 or self.source_row_length > 1,
            "data.source_row_length must be at least 2, or 0",
        )
        require(self.target_row_length > 1, "data.target_row_length must be at least 2")
        require(self.mixture_temperature > 0, "data.mixture_temperature must be positive")
        for name in ("max_length_ratio", "max_words"):
            require(getattr(self, name) >= 0, f"data.{name} must not be negative")
        for name in ("max_unknown_rate", "subword_sampling"):
            require(0 <= getattr(self, name) <= 1, f"data.{name} must be in [0, 1]")
        require(
            bool(self.bucket_lengths)
            and self.bucket_lengths[0] > 1
            and list(self.bucket_lengths) == sorted(set(self.bucket_lengths)),
            "data.bucket_lengths must be rising and at least 2",
        )
        require(self.vocab_size > 0, "data.vocab_size must be positive")
        require(self.generated_pairs > 0, "data.generated_pairs must be positive")
        require(
            0.98 <= self.character_coverage <= 1,
            "data.character_coverage must be in [0.98, 1], as SentencePiece wants it",
        )

    @property
    def row_lengths(self) -> tuple[int, int]:
        """S and T: tokens in the longest source row and in the longest target row."""
        if self.batching == "buckets":
            return self.bucket_lengths[-1], self.bucket_lengths[-1]
        return self.source_row_length, self.target_row_length
