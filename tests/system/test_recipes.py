"""Whole runs of other kinds: several corpora, buckets, a language model, fine-tuning."""

import dataclasses
import shutil
import sys

import numpy as np
import pytest
from small_runs import flags, metrics

from flaxformer_mt.cli import main as command
from flaxformer_mt.cli import training
from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.experiment import prepare
from flaxformer_mt.runs.checkpoint import restore_params
from flaxformer_mt.trained_model import load_run


def run(arguments):
    training.train(training.parse_flags(arguments))


def losses(workdir, split="train"):
    return [line["loss"] for line in metrics(workdir) if line["split"] == split]


@pytest.fixture
def data_set_flags(text, tmp_path):
    """Makes a TensorFlow data set of the text; the arguments that train on it."""
    pytest.importorskip("tensorflow_datasets")
    languages = ["--source-language", "en", "--target-language", "de"]
    command(["prepare", "--path", str(text), "--output", str(tmp_path / "data"), *languages])
    return [
        *flags(tmp_path / "data", tmp_path / "run", "--train.num-steps=4"),
        "--config=configs/wmt14_en_de_base.py",
        "--train.log-every=4",
        "--train.batch-tokens=1024",
        "--data.target-row-length=64",
    ]


def test_a_data_set_of_tensorflow_datasets_is_read_without_tensorflow(data_set_flags, tmp_path):
    config = training.parse_flags(data_set_flags).experiment()
    prepared = prepare(config, tmp_path / "run")
    assert dict(prepared.dataset.report())["train"]
    assert (tmp_path / "run/cache/train-0").is_dir()
    assert "tensorflow" not in sys.modules


@pytest.mark.slow
def test_a_data_set_of_tensorflow_datasets(data_set_flags, tmp_path):
    run(data_set_flags)
    assert restore_params(tmp_path / "run", "last")[0] == 4
    assert "tensorflow" not in sys.modules
    assert np.isfinite(losses(tmp_path / "run")).all()


@pytest.mark.slow
def test_several_corpora_with_tags(text, tmp_path, monkeypatch):
    # What a configuration file would say.
    corpora = (
        CorpusConfig(path=str(text), tag="<2de>", weight=2),
        CorpusConfig(path=str(text), source_language="de", target_language="en", tag="<2en>"),
    )
    data = DataConfig(
        train_corpora=corpora,
        valid_corpora=corpora,
        test_corpora=corpora[:1],
        mixture_temperature=5,
        subword_sampling=0.1,
    )
    load_config = training.load_config
    monkeypatch.setattr(
        training,
        "load_config",
        lambda path: dataclasses.replace(load_config(path), data=data),
    )
    arguments = [
        argument
        for argument in flags(text, tmp_path / "run", "--train.num-steps=4")
        if not argument.startswith("--data.path")
    ]
    run(arguments)
    loaded = load_run(tmp_path / "run")
    assert [len(loaded.tokenizers.source.encode([tag])[0]) for tag in ("<2de>", "<2en>")] == [1, 1]
    assert Translator.from_run(tmp_path / "run").translate(["<2de> three"])


@pytest.mark.slow  # Decided by tests/training/test_devices.py.
def test_buckets_compile_each_shape_once(text, tmp_path):
    run(
        flags(
            text,
            tmp_path / "run",
            "--train.num-steps=30",
            "--train.log-every=10",
            "--train.eval-every=30",
            "--data.batching=buckets",
            "--data.bucket-lengths",
            "24",
            "64",
        )
    )
    last = [line for line in metrics(tmp_path / "run") if line["split"] == "train"][-1]
    assert last["compilations"] == 2


@pytest.mark.slow
def test_a_language_model_needs_one_language(text, tmp_path):
    copy = tmp_path / "text"
    copy.mkdir()
    for path in text.glob("*.de*"):
        shutil.copy(path, copy)
    run(flags(copy, tmp_path / "run", "--model.no-has-inputs", "--train.num-steps=4"))
    validation = losses(tmp_path / "run", "valid")
    assert np.isfinite(validation).all()


@pytest.mark.slow  # Decided by tests/training/test_features.py.
@pytest.mark.parametrize("options", [["--train.r-drop=5"], ["--train.ema-decay=0.9"]])
def test_features_that_change_the_loss_or_the_parameters(text, tmp_path, options):
    run(flags(text, tmp_path / "run", "--train.num-steps=4", *options))
    assert np.isfinite(losses(tmp_path / "run", "valid")).all()
