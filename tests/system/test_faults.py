"""Errors are reported in one line, before anything is written, or with nothing lost."""

import shutil

import pytest
from small_runs import flags

from flaxformer_mt.cli import training
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.runs.folder import locked


def test_different_line_counts(refused):
    error = refused(lambda text: (text / "train.de").write_text("eins\nzwei\n"))
    assert "train.en has 300 lines" in error
    assert "train.de has 2" in error


def test_empty_file(refused):
    assert "valid.en is empty" in refused(lambda text: (text / "valid.en").write_text(""))


@pytest.mark.parametrize("name", ["train.en", "valid.de"])
def test_a_split_without_text_is_named(refused, name):
    def make_blank(text):
        lines = (text / name).read_text().splitlines()
        (text / name).write_text(" \n" * len(lines))

    error = refused(make_blank)
    assert name in error
    assert "no pair has text on both sides" in error


def test_invalid_utf8(refused):
    error = refused(lambda text: (text / "valid.en").write_bytes(b"one\ntwo\n\xff\nfour\n"))
    assert "valid.en, line 3: not UTF-8" in error


def test_missing_file(refused):
    error = refused(lambda text: (text / "train.en").unlink())
    assert "none of train.en, train.en.gz, train.en.zst" in error


def test_sentence_longer_than_the_row_as_error(refused):
    error = refused(lambda text: None, "--data.long-sentences=error", "--data.target-row-length=8")
    assert "pairs are longer than" in error


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop", pytest.param("truncate", marks=pytest.mark.slow)])
def test_sentences_longer_than_the_row_are_counted(text, tmp_path, capsys, policy):
    arguments = flags(
        text,
        tmp_path / "run",
        f"--data.long-sentences={policy}",
        "--data.target-row-length=16",
        "--dry-run",
    )
    training.train(training.parse_flags(arguments))
    output = " ".join(capsys.readouterr().out.split())
    count = {"drop": " longer than a row dropped", "truncate": " truncated"}[policy]
    assert int(output.split(count)[0].split()[-1].strip("(").replace(",", "")) > 0
    assert not (tmp_path / "run").exists()


def test_a_run_folder_with_another_configuration(refuse, begun, text):
    before = sorted(path.stat().st_mtime_ns for path in begun.rglob("*"))
    error = refuse(*flags(text, begun, "--model.d-ff=64", "--optimizer.learning-rate=1"))
    assert "model.d_ff: 32 in the run, 64 now" in error
    assert "optimizer.learning_rate: 0.005 in the run, 1.0 now" in error
    assert before == sorted(path.stat().st_mtime_ns for path in begun.rglob("*"))


def test_a_run_folder_with_other_text(refuse, begun, text, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(text, copy)
    lines = (copy / "train.en").read_text().splitlines()
    (copy / "train.en").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    assert "the train corpus" in refuse(*flags(copy, begun))


def test_swapped_sides(refused):
    def swap(text):
        (text / "train.en").rename(text / "other")
        (text / "train.de").rename(text / "train.en")
        (text / "other").rename(text / "train.de")

    assert "swap" in refused(swap)


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


@pytest.mark.parametrize("policy", [pytest.param("drop", marks=pytest.mark.slow), "error"])
def test_a_sentence_of_5000_tokens(text, tmp_path, refuse, capsys, policy):
    copy = tmp_path / "copy"
    shutil.copytree(text, copy)
    for language in ("en", "de"):
        with (copy / f"train.{language}").open("a") as file:
            file.write("9 " * 5000 + "\n")
    arguments = flags(
        copy,
        tmp_path / "run",
        f"--data.long-sentences={policy}",
        "--data.source-row-length=80",
        "--data.target-row-length=64",
        "--dry-run",
    )
    if policy == "error":
        assert "train.en, line 301" in refuse(*arguments)
        return
    training.train(training.parse_flags(arguments))
    output = capsys.readouterr().out
    assert "299 of 301" in output or "300 of 301" in output
    assert "longer than a row" in output


def test_two_runs_in_one_folder(refuse, begun, text):
    with locked(begun):
        error = refuse(*flags(text, begun, "--train.num-steps=8"))
    assert f"is training in {begun} already" in error


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
@pytest.mark.parametrize("workdir", ["/dev/null", "/dev/null/run", "/proc/run"])
def test_a_folder_that_cannot_be_written(refuse, text, workdir, options):
    error = refuse(*flags(text, workdir, *options))
    assert f"{workdir} cannot be written" in error or f"{workdir} is not a folder" in error
