"""Errors are reported in one line, before anything is written, or with nothing lost."""

import pytest
from small_runs import flags

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers


def swap(text):
    (text / "train.en").rename(text / "other")
    (text / "train.de").rename(text / "train.en")
    (text / "other").rename(text / "train.de")


REFUSED = {
    "train.en has 300 lines": lambda text: (text / "train.de").write_text("eins\nzwei\n"),
    "no pair has text on both sides": lambda text: (text / "valid.de").write_text(" \n" * 20),
    "valid.en, line 2: not UTF-8": lambda text: (text / "valid.en").write_bytes(b"one\n\xff\n"),
    "none of train.en, train.en.gz, train.en.zst": lambda text: (text / "train.en").unlink(),
    "swap": swap,
}


@pytest.mark.parametrize("message", REFUSED)
def test_text_is_refused_before_anything_is_written(refused, message):
    assert message in refused(REFUSED[message])


def test_a_run_folder_with_another_configuration(refuse, begun, text):
    def times():
        return {path: path.stat().st_mtime_ns for path in begun.rglob("*") if path.name != "lock"}

    before = times()
    error = refuse(*flags(text, begun, "--model.d-ff=64", "--optimizer.learning-rate=1"))
    assert "model.d_ff: 32 in the run, 64 now" in error
    assert "optimizer.learning_rate: 0.005 in the run, 1.0 now" in error
    assert before == times()


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_folder_that_cannot_be_written(refuse, text, options):
    assert "/dev/null" in refuse(*flags(text, "/dev/null/run", *options))


def test_a_corpus_that_the_vocabulary_cannot_spell(refused, text, tmp_path):
    config = DataConfig(path=str(text), target_language="de", vocab_size=400, byte_fallback=False)
    Tokenizers.train([load_corpus(config, "train")], config).save(tmp_path / "vocabulary")

    def add_letters(copy):
        lines = (copy / "train.en").read_text().splitlines()
        (copy / "train.en").write_text("".join(f"{line} 一 丁 七 丈 三\n" for line in lines))

    error = refused(add_letters, f"--data.tokenizer-path={tmp_path / 'vocabulary'}")
    assert "of the source tokens are unknown" in error
    assert "such as '一'" in error
    assert "(data.max_unknown_rate=0.1)" in error
    assert "use a vocabulary made for this text" in error


def test_a_sentence_of_5000_tokens(refused):
    def add(text):
        for language in ("en", "de"):
            with (text / f"train.{language}").open("a") as file:
                file.write("9 " * 5000 + "\n")

    options = ("--data.long-sentences=error", "--data.source-row-length=80")
    assert "train.en, line 301" in refused(add, *options, "--data.target-row-length=64")
