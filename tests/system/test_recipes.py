"""Whole runs of other kinds: several corpora, buckets, a language model, fine-tuning."""

import dataclasses
import shutil
import sys

import numpy as np
import pytest
import tfds_folder
from small_runs import flags, metrics

from flaxformer_mt.cli import training
from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora.text_files import stream_parallel
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.experiment import prepare
from flaxformer_mt.trained_model import load_run


def run(arguments):
    training.train(training.parse_flags(arguments))


def losses(workdir, split="train"):
    return [line["loss"] for line in metrics(workdir) if line["split"] == split]


def test_a_data_set_of_tensorflow_datasets_is_read_without_tensorflow(text, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    splits = {"train": "train", "validation": "valid", "test": "test"}
    for split, name in splits.items():
        files = [next(text.glob(f"{name}.{language}*")) for language in ("en", "de")]
        splits[split] = list(stream_parallel(*files))
    tfds_folder.write(tmp_path / "data", **splits)
    options = ("--config=configs/wmt14_en_de_base.py", "--data.target-row-length=64")
    arguments = flags(tmp_path / "data", tmp_path / "run", "--train.num-steps=4", *options)
    config = training.parse_flags(arguments).experiment()
    prepared = prepare(config, tmp_path / "run")
    assert dict(prepared.dataset.report())["train"]
    assert (tmp_path / "run/cache/train-0").is_dir()
    assert "tensorflow" not in sys.modules


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


@pytest.mark.slow
def test_a_language_model_needs_one_language(text, tmp_path):
    copy = tmp_path / "text"
    copy.mkdir()
    for path in text.glob("*.de*"):
        shutil.copy(path, copy)
    run(flags(copy, tmp_path / "run", "--model.no-has-inputs", "--train.num-steps=4"))
    validation = losses(tmp_path / "run", "valid")
    assert np.isfinite(validation).all()
