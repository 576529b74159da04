"""The main job as a user meets it: what a run folder holds, stopping and going on, bad input."""

import gzip
import json
import shutil
import sys

import chex
import pytest

import train
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpus import load_corpus
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.training.checkpoint import restore_params

SMALL = (
    "--model.d-model=16",
    "--model.num-heads=2",
    "--model.d-ff=32",
    "--model.num-encoder-layers=1",
    "--model.num-decoder-layers=1",
    "--data.vocab-size=400",
    "--train.batch-tokens=512",
    "--train.eval-every=4",
    "--train.checkpoint-every=2",
    "--train.log-every=2",
    "--train.eval-sentences=4",
    "--train.show-translations=1",
    "--decode.max-length-factor=0",
    "--decode.max-length-extra=4",
    "--decode.beam-size=2",
    "--parallel.num-devices=2",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of parallel text: English and German phrases; the test split gzipped."""
    folder = tmp_path_factory.mktemp("text")
    config = DataConfig(corpus="phrases", generated_pairs=300)
    for split, size in (("train", 300), ("valid", 20), ("test", 8)):
        corpus = load_corpus(config, split)
        for language, lines in (("en", corpus.sources), ("de", corpus.targets)):
            data = "".join(f"{line}\n" for line in lines[:size]).encode()
            path = folder / f"{split}.{language}"
            if split == "test":
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)
    return folder


def flags(text, workdir, *options):
    return [
        "--config=configs/multi30k_tiny_en_de.py",
        f"--data.path={text}",
        f"--workdir={workdir}",
        *SMALL,
        *options,
    ]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run of 6 steps without interruption."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    train.run(train.parse_flags(flags(text, workdir, "--train.num-steps=6")))
    return workdir


def metrics(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_folder_is_all_that_a_model_needs(finished, text, tmp_path):
    assert {path.name for path in finished.iterdir()} == {
        "checkpoints", "config.json", "data.json", "metrics.jsonl", "tensorboard", "tokenizer",
    }  # fmt: skip
    assert list((finished / "tensorboard").iterdir())
    lines = metrics(finished)
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"), (4, "train"), (4, "valid"), (6, "train"), (6, "valid"), (6, "test"),
    ]  # fmt: skip
    for key in (
        "loss",
        "accuracy",
        "target_tokens_per_second",
        "padding_fraction",
        "learning_rate",
    ):
        assert lines[0][key] >= 0
    assert lines[3]["compilations"] == 1
    for key in ("loss", "accuracy", "perplexity", "bleu", "chrf"):
        assert lines[2][key] >= 0
    assert "version:" in lines[5]["bleu_signature"]

    moved = tmp_path / "elsewhere"
    shutil.copytree(finished, moved)
    assert len(Translator.from_run(moved).translate(["three", "", "two hundred"])) == 3


@pytest.mark.parametrize("stop", [2, 3])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(finished, text, tmp_path, stop):
    workdir = tmp_path / "run"
    train.run(train.parse_flags(flags(text, workdir, f"--train.num-steps={stop}")))
    train.run(train.parse_flags(flags(text, workdir, "--train.num-steps=6")))
    assert restore_params(workdir, "last")[0] == 6
    chex.assert_trees_all_equal(
        restore_params(workdir, "last")[1], restore_params(finished, "last")[1]
    )
    losses = {line["step"]: line["loss"] for line in metrics(workdir) if line["split"] == "valid"}
    assert losses[6] == metrics(finished)[4]["loss"]


def refuse(monkeypatch, capsys, arguments):
    """Runs `train.py`, which must leave with one line of complaint; returns the line."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("train.py: error: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture
def refused(monkeypatch, capsys, text, tmp_path):
    """Trains on a damaged copy of the text; nothing must be written."""

    def run(damage, *options):
        copy = tmp_path / "copy"
        shutil.copytree(text, copy)
        damage(copy)
        workdir = tmp_path / "run"
        error = refuse(monkeypatch, capsys, flags(copy, workdir, *options))
        assert not workdir.exists()
        return error

    return run


def test_different_line_counts(refused):
    error = refused(lambda text: (text / "train.de").write_text("eins\nzwei\n"))
    assert "train.en has 300 lines" in error
    assert "train.de has 2" in error


def test_empty_file(refused):
    assert "valid.en is empty" in refused(lambda text: (text / "valid.en").write_text(""))


def test_invalid_utf8(refused):
    error = refused(lambda text: (text / "valid.en").write_bytes(b"one\ntwo\n\xff\nfour\n"))
    assert "valid.en, line 3: not UTF-8" in error


def test_missing_file(refused):
    error = refused(lambda text: (text / "train.en").unlink())
    assert "neither train.en nor train.en.gz" in error


def test_sentence_longer_than_the_row_as_error(refused):
    error = refused(lambda text: None, "--data.long-sentences=error", "--data.target-row-length=8")
    assert "pairs are longer than" in error


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_sentences_longer_than_the_row_are_counted(text, tmp_path, capsys, policy):
    arguments = flags(
        text,
        tmp_path / "run",
        f"--data.long-sentences={policy}",
        "--data.target-row-length=16",
        "--dry-run",
    )
    train.run(train.parse_flags(arguments))
    output = " ".join(capsys.readouterr().out.split())
    count = {"drop": " longer than a row dropped", "truncate": " truncated"}[policy]
    assert int(output.split(count)[0].split()[-1].replace(",", "")) > 0
    assert not (tmp_path / "run").exists()


def test_a_run_folder_with_another_configuration(monkeypatch, capsys, finished, text):
    before = sorted(path.stat().st_mtime_ns for path in finished.rglob("*"))
    error = refuse(
        monkeypatch,
        capsys,
        flags(text, finished, "--model.d-ff=64", "--optimizer.learning-rate=1"),
    )
    assert "model.d_ff: 32 in the run, 64 now" in error
    assert "optimizer.learning_rate: 0.005 in the run, 1.0 now" in error
    assert before == sorted(path.stat().st_mtime_ns for path in finished.rglob("*"))


def test_a_run_folder_with_other_text(monkeypatch, capsys, finished, text, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(text, copy)
    lines = (copy / "train.en").read_text().splitlines()
    (copy / "train.en").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    assert "the train corpus" in refuse(monkeypatch, capsys, flags(copy, finished))


def test_an_unknown_option_suggests_the_right_one(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        train.parse_flags(
            ["--config=configs/reverse.py", f"--workdir={tmp_path / 'run'}", "--model.d-modle=3"]
        )
    assert stop.value.code == 2
    assert "--model.d-model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_missing_config(monkeypatch, capsys, tmp_path):
    error = refuse(
        monkeypatch, capsys, ["--config=configs/none.py", f"--workdir={tmp_path / 'run'}"]
    )
    assert "there is no file configs/none.py" in error


@pytest.mark.parametrize("name", ["forkme", "multi30k_en_de", "quickstart"])
def test_the_other_configurations_are_valid(name, tmp_path):
    train.parse_flags([f"--config=configs/{name}.py", f"--workdir={tmp_path}"])
