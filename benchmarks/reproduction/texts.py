"""Corpora in the form that a publication has used."""

import functools
import io
import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flaxformer_mt import atomic
from flaxformer_mt.data.corpora.text_files import read_lines
from flaxformer_mt.errors import UserError
from reproduction.recipe import Text

SPLITS = ("train", "valid", "test")
MULTI30K_TESTS = ("test", "test_2017_flickr", "test_2017_mscoco")
_MULTI30K_SPLITS = ("train", "valid", *MULTI30K_TESTS)


def moses(language: str) -> Callable[[str], str]:
    """Returns lower-casing, then punctuation normalisation, then tokenization, as by Moses.

    The order is that of scripts/task1-tokenize.sh in github.com/multi30k/dataset. On Multi30k the
    result equals the corpus' own tokenized files, except for some punctuation after quotation marks
    and "œ", in 1 of 7,000 lines.
    """
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return lambda line: tokenizer.tokenize(normalizer.normalize(line.lower()), return_str=True)


def multi30k(language: str, *, tokenized: bool) -> Text:
    """Returns Multi30k, English and one other language, with its three test sets."""
    name = f"multi30k-en-{language}"

    def write(raw: Path, folder: Path) -> None:
        for suffix in ("en", language):
            convert = moses(suffix) if tokenized else str
            for split in _MULTI30K_SPLITS:
                path = folder / f"{split}.{suffix}"
                if not path.exists():
                    write_lines(path, map(convert, read_lines(raw / name / f"{split}.{suffix}.gz")))

    return Text(f"{name}-{'tokenized' if tokenized else 'raw'}", write, tokenized)


def subword_nmt(lines: Iterable[str], num_merges: int) -> Callable[[str], str]:
    """Learns byte pair encoding with subword-nmt.

    Returns:
      Segments a line: "a play@@ house". `without_markers` is its inverse.
    """
    from subword_nmt.apply_bpe import BPE
    from subword_nmt.learn_bpe import learn_bpe

    merges = io.StringIO()
    learn_bpe(io.StringIO("\n".join(lines)), merges, num_merges)
    merges.seek(0)
    return BPE(merges).process_line


def without_markers(line: str) -> str:
    """Joins the subwords of subword-nmt, as fairseq's `--remove-bpe` does."""
    return f"{line} ".replace("@@ ", "").removesuffix(" ")


def multi30k_subwords(language: str) -> Text:
    """Returns the tokenized Multi30k in the subwords of Wu et al. 2021, 10,000 joint merges.

    They equal those in github.com/LividWo/Revisit-MMT, data/multi30k-en-de and -en-fr, except in
    the lines whose tokenized text differs, 1 of 4,600.
    """
    tokenized = multi30k(language, tokenized=True)

    def write(raw: Path, folder: Path) -> None:
        paths = [f"{split}.{suffix}" for split in _MULTI30K_SPLITS for suffix in ("en", language)]
        if all((folder / path).exists() for path in paths):
            return
        words = folder.with_name(tokenized.name)
        words.mkdir(exist_ok=True)
        tokenized.write(raw, words)
        training = (read_lines(words / f"train.{suffix}") for suffix in ("en", language))
        segment = subword_nmt(itertools.chain(*training), 10_000)
        for path in paths:
            write_lines(folder / path, map(segment, read_lines(words / path)))

    return Text(
        f"multi30k-en-{language}-subwords", write, is_tokenized=True, joined=without_markers
    )


_WH_QUESTION = re.compile(r"(what|who|whom|whose|which|when|where|why|how)\b.*\?", re.IGNORECASE)


def _is_wh_question(english: str) -> bool:
    return _WH_QUESTION.fullmatch(english.strip()) is not None


def _pairs(raw: Path, split: str) -> list[tuple[str, str]]:
    """Reads a split of Tatoeba, English and French."""
    sides = (read_lines(raw / "tatoeba-eng-fra" / f"{split}.{code}.gz") for code in ("en", "fr"))
    return list(zip(*sides, strict=True))


def _write_pairs(folder: Path, split: str, pairs: Sequence[tuple[str, str]]) -> None:
    if not pairs:
        raise UserError(f"no pairs for {folder / split}")
    english, french = zip(*pairs, strict=True)
    write_lines(folder / f"{split}.en", english)
    write_lines(folder / f"{split}.fr", french)


def _write_questions(raw: Path, folder: Path) -> None:
    for split in SPLITS:
        _write_pairs(
            folder, split, [pair for pair in _pairs(raw, split) if _is_wh_question(pair[0])]
        )


QUESTIONS = Text("questions", _write_questions)
"""The pairs of Tatoeba whose English side starts with a wh-word and ends with a question mark."""


def _write_sample(count: int, raw: Path, folder: Path) -> None:
    # A prefix of one permutation: each size contains the smaller ones.
    pairs = _pairs(raw, "train")
    if len(pairs) < count:
        raise UserError(f"{raw} has {len(pairs):,} training pairs, fewer than {count:,}")
    random.Random(0).shuffle(pairs)
    _write_pairs(folder, "train", pairs[:count])
    for split in ("valid", "test"):
        _write_pairs(folder, split, _pairs(raw, split))


def tatoeba(count: int) -> Text:
    """Returns `count` training pairs of Tatoeba, at random, with all of its other splits."""
    return Text(f"tatoeba-{count}", functools.partial(_write_sample, count))


def _write_copies(raw: Path, folder: Path) -> None:
    generator = random.Random(0)
    for split, count in (("train", 20 * 20 * 80), ("valid", 500), ("test", 500)):
        lines = [
            " ".join("a" + "".join(generator.choices("abcdefghij", k=9))) for _ in range(count)
        ]
        for suffix in ("in", "out"):
            write_lines(folder / f"{split}.{suffix}", lines)


COPIES = Text("copies", _write_copies)
"""The copy task of The Annotated Transformer: ten symbols out of ten, the first always the same.

Training has 20 epochs of 20 batches of 80 lines, all of them different."""


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a file, all of them or none."""
    atomic.write_text(path, "".join(f"{line}\n" for line in lines))
