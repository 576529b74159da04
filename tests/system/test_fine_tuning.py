"""Fine-tuning of a published model: conversion to a run, training, conversion back."""

import warnings

import chex
import opus_mt
import pytest
from small_runs import metrics

from flaxformer_mt import experiment
from flaxformer_mt.cli import training
from flaxformer_mt.interop.convert import OWN, convert
from flaxformer_mt.trained_model import load_run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hub_models
    from transformers import AutoModelForSeq2SeqLM, MarianTokenizer


@pytest.fixture(scope="module")
def published(text, tmp_path_factory):
    """A folder with random weights, and the vocabulary of `text`."""
    folder = tmp_path_factory.mktemp("published") / "opus"
    sides = ((text / f"train.{language}").read_text().splitlines() for language in ("en", "de"))
    vocabularies = opus_mt.write_tokenizer(folder, *(opus_mt.train_model(s, 150) for s in sides))
    config = opus_mt.config(vocabularies, encoder_layers=1, init_std=0.1, dropout=0.0)
    opus_mt.random_model(config).save_pretrained(folder)
    return folder


def fine_tune(run, text, tuned):
    """Trains a converted run further; its loss falls."""
    options = [
        f"--config={run / 'config.json'}",
        f"--workdir={tuned}",
        f"--train.init-from={run}",
        f"--data.path={text}",
        "--data.source-language=en",
        "--data.target-language=de",
        "--optimizer.learning-rate=3e-2",
        "--optimizer.warmup-steps=5",
        "--train.num-steps=30",
        "--train.log-every=10",
        "--train.batch-tokens=512",
        "--train.eval-sentences=1",
        "--decode.beam-size=1",
        "--decode.max-length=4",
        "--parallel.num-devices=1",
    ]
    config = training.parse_flags(options).experiment()
    with experiment.open_folder(tuned):
        experiment.fit(experiment.prepare(config, tuned), tuned)
    losses = [line["loss"] for line in metrics(tuned) if line["split"] == "train"]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["marian", "nllb", "flan", "mbart50"])
def test_a_model_of_the_hub_is_trained_further(kind, text, tmp_path, request):
    run, tuned, exported = (tmp_path / name for name in ("run", "tuned", "exported"))
    lines = [(text / f"train.{side}").read_text().splitlines() for side in ("en", "de")]
    if kind == "marian":
        family, published = kind, request.getfixturevalue("published")
        tokenizer = MarianTokenizer.from_pretrained(published)
    else:
        (family, _), published = hub_models.KINDS[kind], tmp_path / "published"
        _, tokenizer = hub_models.save(kind, [*lines[0], *lines[1]], published)
    convert(family, OWN, published, run)
    fine_tune(run, text, tuned)
    convert(OWN, family, tuned, exported)
    ours = load_run(tuned)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(exported)
    chex.assert_trees_all_equal(
        theirs.get_input_embeddings().weight.detach().numpy(),
        ours.params["target_embedding"]["embedding"],
    )
    assert theirs.generation_config.max_length == 5
    again = type(tokenizer).from_pretrained(exported)
    assert again(lines[0][0]).input_ids == tokenizer(lines[0][0]).input_ids


def test_a_published_folder_is_no_configuration(refuse, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    error = refuse(f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'run'}")
    assert "make a run of its folder with `flaxformer-mt convert --from marian" in error
