"""Corpora, filters, vocabularies and the layout of batches."""

import dataclasses
from typing import Literal, TypeAlias, TypedDict

from flaxformer_mt.config import relations
from flaxformer_mt.config.fields import (
    MAX_INTEGER,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Checked,
    FieldRole,
    option,
)

CorpusKind: TypeAlias = Literal[
    "text", "tsv", "csv", "jsonl", "parquet", "tmx", "datasets", "phrases", "reverse", "tfds"
]
"""A source of sentence pairs; the help of `DataConfig.corpus` explains each."""

Quoting: TypeAlias = Literal["auto", "csv", "none"]
"""Whether cells of a table may be in quotes; the help of `DataConfig.quoting` explains each."""

HeldOutRole: TypeAlias = Literal["valid", "test"]
"""A use of pairs that are held out of the training corpora."""

GENERATED: frozenset[CorpusKind] = frozenset({"phrases", "reverse"})
"""Sources that read no files."""


@dataclasses.dataclass(frozen=True, repr=False)
class CorpusConfig(Checked):
    """One of several corpora that are read together; empty fields default to those of `data`."""

    kind: CorpusKind | Literal[""] = option("", FieldRole.TEXT)
    """Like data.corpus."""
    path: str = option("", FieldRole.RUNNING)
    """Like data.path."""
    split: str = option("", FieldRole.TEXT)
    """Like data.train_split, data.valid_split or data.test_split."""
    columns: tuple[str, ...] = option((), FieldRole.TEXT)
    """Like data.columns."""
    source_language: str = option("", FieldRole.TEXT)
    """Like data.source_language."""
    target_language: str = option("", FieldRole.TEXT)
    """Like data.target_language."""
    tag: str = option("", FieldRole.TEXT)
    """Prefix of every source sentence: "<2de>" names the target language, "<bt>" a back-translated
    source, "<news>" a domain. Several are separated by spaces; each is one token of the
    vocabulary."""
    hold_out: int = option(-1, FieldRole.TEXT, lowest=0, also=-1)
    """Number of its pairs to hold out, like data.hold_out, which is of all other training corpora
    together. -1 = data.hold_out is of this corpus, too, unless it has a tag: back-translated text
    should be in no test."""
    weight: float = option(1.0, FieldRole.ROWS, above=0, limit=1e6)
    """Sampling weight of its pairs relative to the other corpora; see data.mixture_temperature."""

    _prefix = "CorpusConfig."
    _relations = relations.CORPUS

    @property
    def shares_hold_out(self) -> bool:
        """Whether `data.hold_out` is of this corpus; False if it has a number of its own."""
        return self.hold_out < 0 and not self.tag.strip()


@dataclasses.dataclass(frozen=True, repr=False)
class DataConfig(Checked):
    """Where sentence pairs come from, how they are filtered, tokenized and batched."""

    corpus: CorpusKind = option("text", FieldRole.TEXT)
    """text: SPLIT.LANGUAGE in the folder data.path, one sentence per line, or the file that
    data.path names, in the form that its suffix tells; tsv: SPLIT.tsv, tab-separated columns; csv:
    SPLIT.csv; jsonl: SPLIT.jsonl, a JSON object per line; parquet: SPLIT.parquet; tmx: SPLIT.tmx, a
    translation memory; datasets: a folder of Hugging Face's save_to_disk; phrases: generated
    numbers, dates, times, units, currencies and lists; reverse: generated digit strings, to be
    reversed; tfds: the TensorFlow Datasets builder that data.path names. Files may be compressed
    (.gz, .zst, .xz, .bz2, .zip)."""
    # The text that is read there is identified by its fingerprint, wherever it lies.
    path: str = option("", FieldRole.RUNNING)
    """Folder of the corpus; or one file (.csv, .jsonl, .parquet, .tmx, others tab-separated), two
    parallel files ("a.en,b.de", or "a" for a.en and a.de), a folder of Hugging Face's save_to_disk;
    name of a TensorFlow Datasets builder, or the folder that it was prepared in (tfds). "tfds:NAME"
    is a builder for every value of data.corpus."""
    columns: tuple[str, ...] = option((), FieldRole.TEXT)
    """The columns of source and target, by name or by number from 1; further ones are ignored. By
    default the columns that a header names after the two languages, or else the only two columns.
    Nested JSON members are written with a dot: translation.en. A translation memory has the codes
    of languages: en-GB fr."""
    pair_columns: tuple[str, ...] = option((), FieldRole.TEXT)
    """Columns of numbers of the training pairs, each as NAME=COLUMN. weight=COLUMN has the weight
    of each pair in the loss; the others are given to the objective, as `Batch.columns`."""
    quoting: Quoting = option("auto", FieldRole.TEXT)
    """Whether cells of tables may be in quotes, in which quotes are doubled. csv: they may; none:
    quotes are text; auto: in .csv files, and in tab-separated ones that a program for CSV wrote."""
    unescape_html: bool = option(False, FieldRole.TEXT)
    """Replace the HTML entities of training, development and test text (&quot;, &amp;amp;) by their
    characters. Otherwise a warning says where the first ones are."""
    # The pairs that are read are the same wherever both values read the text.
    bad_rows: Literal["error", "drop"] = option("error", FieldRole.RUNNING)
    """What happens to malformed rows of files: text that is not UTF-8, a NUL, the wrong number of
    columns, quotes that are not closed, JSON that is damaged. drop: they are left out and
    reported."""
    hold_out: int = option(0, FieldRole.TEXT, lowest=0)
    """Set this many training pairs aside for validation, and as many for the test. They take the
    place of data.valid_split and data.test_split. A hash of the source chooses them, among the
    pairs that pass the filters, in corpora without a tag; pairs that share their source or their
    target with one of them are not trained on. 0 = none."""
    filter_held_out: bool = option(True, FieldRole.TEXT)
    """Hold out only pairs that the filters keep, each of them once; otherwise any."""
    source_language: str = option("en", FieldRole.TEXT)
    """Language to translate from: the file suffix of text, the locale of phrases."""
    target_language: str = option("de", FieldRole.TEXT)
    """Language to translate into."""
    train_split: str = option("train", FieldRole.TEXT)
    """Name of the split to train on. For files (text, tsv, csv, jsonl) it may be several
    comma-separated names and patterns: "europarl,news-*"."""
    valid_split: str = option("valid", FieldRole.TEXT)
    """Name of the split to validate on, which selects the best checkpoint."""
    test_split: str = option("test", FieldRole.TEXT)
    """Name of the split that is evaluated only once, at the end; empty = no test."""
    generated_pairs: int = option(20000, FieldRole.TEXT, lowest=1, limit=10**7)
    """Training pairs of a generated corpus; valid and test have 500 each."""
    generator_seed: int = option(0, FieldRole.TEXT, lowest=-MAX_INTEGER)
    """Random seed of a generated corpus."""
    train_corpora: tuple[CorpusConfig, ...] = option((), FieldRole.TEXT)
    """Corpora to train on together; none = the one that the fields above describe."""
    valid_corpora: tuple[CorpusConfig, ...] = option((), FieldRole.TEXT)
    """Corpora to validate on together; none = the one that the fields above describe."""
    test_corpora: tuple[CorpusConfig, ...] = option((), FieldRole.TEXT)
    """Corpora to test on together; none = the one that the fields above describe."""
    # The content of the file is part of the fingerprint of the text.
    alignments: str = option("", FieldRole.RUNNING)
    """File of word alignments of the training pairs, for train.guided_alignment_weight: one line
    per pair, "0-0 1-2", source-target, both words between spaces counted from 0, as fast_align and
    eflomal write. Other spaces, such as U+00A0, are part of a word. Empty = none."""
    mixture_temperature: float = option(1.0, FieldRole.ROWS, lowest=0.1)
    """t: a corpus of n pairs is sampled in proportion to weight * n**(1/t). 1 samples every pair of
    all corpora equally often; higher values favour small corpora; 1e9 makes all corpora equal."""

    max_length_ratio: float = option(0.0, FieldRole.TOKENS, lowest=0)
    """Drop training pairs with more than this many times the words on one side than on the other;
    0 = no limit."""
    max_words: int = option(0, FieldRole.TOKENS, lowest=0)
    """Drop training pairs with more than this many words on either side; 0 = no limit."""
    drop_identical: bool = option(False, FieldRole.TOKENS)
    """Drop training pairs whose two sides are the same text."""
    drop_duplicates: bool = option(False, FieldRole.TOKENS)
    """Drop training pairs that occurred before with the same tag, in the same corpus or in an
    earlier one."""
    drop_wrong_script: bool = option(False, FieldRole.TOKENS)
    """Drop training pairs with a side that is mostly not in the script of its language."""
    drop_wrong_language: float = option(0.0, FieldRole.TOKENS, lowest=0, highest=1)
    """Drop training pairs with a side that is in another language than it should be with at least
    this probability, such as 0.7. Sides of fewer than 20 letters, and languages that py3langid does
    not know, are not checked; 0 = none are."""
    check_languages: bool = option(True, FieldRole.START)
    """Refuse corpora with swapped sides, or with a side in another language than it should be."""
    max_unknown_rate: float = option(0.1, FieldRole.TEXT, lowest=0, highest=1)
    """Reject a corpus with a larger share of unknown tokens."""

    tokenizer: Literal["bpe", "unigram", "word", "bytes"] = option("bpe", FieldRole.VOCABULARY)
    """Algorithm of the SentencePiece model, which is trained on the training split on first use.
    word: one token per word, for text that is segmented already, as by subword-nmt; other words are
    <unk>. bytes: one token per byte of UTF-8, as in ByT5, for any language; nothing is learned, and
    sentences need longer rows."""
    vocab_size: int = option(10000, FieldRole.VOCABULARY, lowest=1, limit=MAX_VOCABULARY)
    """Vocabulary size to learn (per language, unless joint_vocabulary). Small corpora get a
    smaller one; that of bytes is fixed."""
    joint_vocabulary: bool = option(True, FieldRole.VOCABULARY)
    """One vocabulary for both languages."""
    byte_fallback: bool = option(True, FieldRole.VOCABULARY)
    """bpe, unigram: encode characters outside the vocabulary as bytes instead of <unk>."""
    character_coverage: float = option(1.0, FieldRole.VOCABULARY, lowest=0.98, highest=1)
    """Share of the corpus' characters that the vocabulary covers."""
    # The vocabulary carries it.
    normalization: Literal["nfc", "nfkc", "none"] = option("nfc", FieldRole.START)
    """Unicode normalization of all text that a learned vocabulary encodes, in training as in
    translation. nfc: composed characters; nfkc: ligatures and full-width forms as ordinary letters,
    too; none: text as it is. Vocabularies of data.tokenizer_path have their own."""
    keep_whole: tuple[str, ...] = option((), FieldRole.VOCABULARY)
    """Texts without spaces that are one token wherever they occur, on both sides, such as the
    placeholders <URL> <NUM>; bpe, unigram, bytes. (Tags are one token without this.)"""
    tokenizer_path: str = option("", FieldRole.VOCABULARY)
    """Vocabulary to use instead of a learned one: a SentencePiece model, one for each side
    ("en.model,de.model"), or a run folder. Special tokens are those of the vocabulary."""
    curriculum: str = option("", FieldRole.ROWS)
    """How often each pair is used in an epoch; empty = once. Names are those of functions given to
    `flaxformer_mt.train(curriculum=...)`, which records them here."""
    subword_sampling: float = option(0.0, FieldRole.ROWS, lowest=0, highest=1)
    """Sample a new segmentation of each source every time it is used. bpe: the probability of
    skipping a merge (BPE-dropout; 0.1 is usual); unigram: the exponent of a segmentation's
    probability (subword regularization; 0.1 is usual, 1 varies least). 0 = always the best
    segmentation."""

    batching: Literal["packed", "buckets"] = option("packed", FieldRole.ROWS)
    """packed: several pairs per row, one shape; buckets: one pair per row, one shape for each of
    data.bucket_lengths. Validation is always packed."""
    bucket_lengths: tuple[int, ...] = option(
        (16, 32, 64), FieldRole.ROWS, lowest=2, limit=MAX_WIDTH
    )
    """Row lengths of buckets, for source and target alike, in increasing order; the longest
    replaces data.source_row_length and data.target_row_length. Batches of shorter rows have more
    rows."""
    source_row_length: int = option(0, FieldRole.ROWS, lowest=2, limit=MAX_WIDTH, also=0)
    """S: tokens per packed source row; also the longest source sentence, end token included.
    0 = the length that fills source rows as well as target rows."""
    target_row_length: int = option(64, FieldRole.ROWS, lowest=2, limit=MAX_WIDTH)
    """T: tokens per packed target row; also the longest target sentence, end token included."""
    workers: int = option(-1, FieldRole.RUNNING, lowest=0, also=-1, limit=1024)
    """Processes besides this one that prepare batches. -1 = up to 8 where training is on
    accelerators, the data are large (131,072 pairs with data.subword_sampling, 4,194,304 without),
    and this process may use more than two cores; 0 = none: a thread does. The batches are the same
    with any number. Other numbers than 0 need Linux."""
    long_sentences: Literal["drop", "truncate", "error"] = option("drop", FieldRole.ROWS)
    """What happens to training pairs longer than a row; their number is reported."""

    _prefix = "data."
    _relations = relations.DATA

    @property
    def splits_words(self) -> bool:
        """Whether a word may be several tokens."""
        return self.tokenizer != "word" or bool(self.tokenizer_path)

    @property
    def learns_subwords(self) -> bool:
        """Whether a word may be segmented in several ways."""
        return self.tokenizer in ("bpe", "unigram") or bool(self.tokenizer_path)

    @property
    def columns_of_pairs(self) -> dict[str, str]:
        """The columns of `pair_columns` by name."""
        return {name: column for name, _, column in (e.partition("=") for e in self.pair_columns)}

    @property
    def is_generated(self) -> bool:
        """Whether the corpus reads no files."""
        return self.corpus in GENERATED

    @property
    def held_out_roles(self) -> list[HeldOutRole]:
        """The roles whose pairs are set aside from the training corpora."""
        if not self.holds_out:
            return []
        is_set_aside: dict[HeldOutRole, bool] = {
            "valid": not self.valid_corpora,
            "test": not self.test_corpora and bool(self.test_split),
        }
        return [role for role, is_set in is_set_aside.items() if is_set]

    @property
    def holds_out(self) -> bool:
        """Whether pairs are held out of training corpora."""
        return self.hold_out > 0 or any(corpus.hold_out > 0 for corpus in self.train_corpora)

    @property
    def row_lengths(self) -> tuple[int, int]:
        """S and T: tokens in the longest source row and in the longest target row."""
        if self.batching == "buckets":
            return self.bucket_lengths[-1], self.bucket_lengths[-1]
        return self.source_row_length, self.target_row_length


class VocabularyOptions(TypedDict, total=False):
    """Fields of `DataConfig` that `train_tokenizers` takes beside its own arguments."""

    tokenizer: Literal["bpe", "unigram", "word", "bytes"]
    byte_fallback: bool
    character_coverage: float
    normalization: Literal["nfc", "nfkc", "none"]
    keep_whole: tuple[str, ...]


class PackingOptions(TypedDict, total=False):
    """Fields of `DataConfig` that `packed` takes beside its own arguments."""

    batching: Literal["packed", "buckets"]
    bucket_lengths: tuple[int, ...]
    long_sentences: Literal["drop", "truncate", "error"]
    mixture_temperature: float
    subword_sampling: float
    workers: int
    max_length_ratio: float
    max_words: int
    drop_identical: bool
    drop_duplicates: bool
    drop_wrong_script: bool
    drop_wrong_language: float
