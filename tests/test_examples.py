"""The programs in `examples/`, with tiny models."""

import importlib
import sys

import pytest

from flaxformer_mt import Run
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.interop.convert import OWN, convert


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs a program in this process, in a folder of its own, and returns what it prints."""

    def execute(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        importlib.import_module(f"examples.{name}").main()
        return capsys.readouterr().out

    return execute


@pytest.fixture
def file(tmp_path):
    """A file of two columns."""
    pairs = load_corpus(DataConfig(corpus="phrases", generated_pairs=200), "train")
    lines = map("\t".join, zip(pairs.sources, pairs.targets, strict=True))
    (tmp_path / "pairs.tsv").write_text("\n".join(lines))
    return "pairs.tsv"


TINY = ("--steps", 2, "--batch-tokens", 1024)


@pytest.mark.slow
def test_train_on_your_file(example, file):
    size = ("--width", 8, "--vocabulary", 400, "--hold-out", 20)
    out = example("train_on_your_file", file, "--workdir", "run", *TINY, *size)
    assert "CheckpointScore(step=2, metric='bleu', value=" in out
    assert out.count(" -> ") == 5
    run = Run("run")
    assert "<figure>" in (run.folder / "curves.html").read_text()
    assert run.config.data.columns == ("1", "2")


@pytest.mark.slow
def test_an_opus_mt_model(example, file, trained_run, tmp_path):
    convert(OWN, "marian", trained_run, tmp_path / "opus")
    options = ("--workdir", "tuned", "--hold-out", 20, "--sentence", "seven kilometers", *TINY)
    out = example("opus_mt", "opus", file, *options)
    assert "<Model marian 'opus'>" in out
    assert "Run('tuned')" in out
    assert Run("tuned").config.train.init_from == "tuned-start"
    assert (tmp_path / "tuned/curves.png").stat().st_size > 10_000
    assert "<html" in (tmp_path / "tuned-start/attention.html").read_text()


@pytest.mark.slow
def test_an_attention_of_your_own(example, tmp_path):
    out = example("own_attention", "--workdir", "runs", "--width", 8, "--pairs", 60, *TINY)
    assert out.count("translate with: flaxformer-mt translate --run runs/") == 2
    params = Run("runs/cosine").model().params
    assert params["encoder"]["layers"]["self_attention"]["temperature"].shape == (2, 4)
    assert (tmp_path / "runs/curves.png").exists()
