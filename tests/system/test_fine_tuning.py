"""Fine-tuning of a published model: conversion to a run, training, conversion back."""

import warnings

import chex
import opus_mt
import pytest
from small_runs import metrics

from flaxformer_mt import experiment
from flaxformer_mt.cli import training
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.interop.convert import OWN, VocabularyOptions, convert
from flaxformer_mt.trained_model import load_run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hub_models
    from transformers import AutoModelForSeq2SeqLM, MarianMTModel, MarianTokenizer


@pytest.fixture(scope="module")
def published(text, tmp_path_factory):
    """A folder with random weights, and the vocabulary of `text`."""
    folder = tmp_path_factory.mktemp("published") / "opus"
    sides = ((text / f"train.{language}").read_text().splitlines() for language in ("en", "de"))
    vocabularies = opus_mt.write_tokenizer(folder, *(opus_mt.train_model(s, 150) for s in sides))
    config = opus_mt.config(vocabularies, encoder_layers=1, init_std=0.1, dropout=0.0)
    opus_mt.random_model(config).save_pretrained(folder)
    return folder


def fine_tune(run, text, tuned, *more):
    """Trains a converted run further; its loss falls. Returns its losses."""
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
        *more,
    ]
    config = training.parse_flags(options).experiment()
    with experiment.open_folder(tuned):
        experiment.fit(experiment.prepare(config, tuned), tuned)
    losses = [line["loss"] for line in metrics(tuned) if line["split"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    return losses


@pytest.mark.slow
def test_a_published_model_is_trained_further(published, text, tmp_path):
    run, tuned, exported = (tmp_path / name for name in ("run", "tuned", "exported"))
    convert("marian", OWN, published, run)
    fine_tune(run, text, tuned)
    ours, before = load_run(tuned), load_run(run)
    assert ours.tokenizers.source.files == before.tokenizers.source.files

    convert(OWN, "marian", tuned, exported)
    theirs = MarianMTModel.from_pretrained(exported)
    chex.assert_trees_all_equal(
        theirs.get_input_embeddings().weight.detach().numpy(),
        ours.params["target_embedding"]["embedding"],
    )
    assert theirs.config.to_diff_dict().keys() >= {"scale_embedding", "decoder_start_token_id"}
    assert theirs.generation_config.max_length == 5  # With the token that starts decoding.
    sentence = "seven kilometers"
    expected = MarianTokenizer.from_pretrained(published)(sentence).input_ids
    assert MarianTokenizer.from_pretrained(exported)(sentence).input_ids == expected
    (own,) = ours.tokenizers.source.encode([sentence])
    assert [*own, ours.config.model.eos_id] == expected


@pytest.mark.slow
def test_validation_translates_into_the_languages_of_the_references(monkeypatch, tmp_path):
    published, run, folder = (tmp_path / name for name in ("published", "run", "text"))
    texts = {"eng_Latn": "four dogs bark", "deu_Latn": "vier Hunde bellen jetzt"}
    hub_models.save("nllb", [*texts.values()] * 50, published)
    convert("m2m100", OWN, published, run)
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.fr").write_text("quatre chiens aboient\n" * 2)
        references = "".join(f"{language} {text}\n" for language, text in texts.items())
        (folder / f"{split}.en").write_text(references)
    config = with_changes(
        load_run(run).config,
        {
            "data": {"path": str(folder), "source_language": "fr", "target_language": "en"},
            "train": {"init_from": str(run), "batch_tokens": 256},
            "parallel": {"num_devices": 1},
        },
    )
    prepared = experiment.prepare(config, tmp_path / "tuned")
    monkeypatch.setattr(
        type(prepared.validation),
        "translate",
        lambda self, params, sentences, *_: [texts[each.prefix] for each in sentences],
    )
    metrics, samples = prepared.validation.validate(prepared.initial_state().params)
    assert (metrics["bleu"], metrics["chrf"]) == pytest.approx((100, 100))
    assert [sample.reference for sample in samples] == [*texts.values()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nllb", "flan", "mbart50"])
def test_a_model_of_the_hub_is_trained_further(kind, text, tmp_path):
    published, run, tuned, exported = (
        tmp_path / name for name in ("published", "run", "tuned", "exported")
    )
    family, _ = hub_models.KINDS[kind]
    lines = [(text / f"train.{side}").read_text().splitlines() for side in ("en", "de")]
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


@pytest.mark.slow
def test_a_language_that_was_added_is_learned(text, tmp_path):
    published, run, own = (tmp_path / name for name in ("published", "run", "text"))
    lines = [(text / f"train.{side}").read_text().splitlines() for side in ("en", "de")]
    hub_models.save("nllb", [*lines[0], *lines[1]], published)
    options = VocabularyOptions((*lines[0], *lines[1]), languages={"tyv_Cyrl": "eng_Latn"})
    convert("m2m100", OWN, published, run, vocabulary=options)
    own.mkdir()
    for split, origin in (("train", "train"), ("valid", "valid"), ("test", "valid")):
        sources = (text / f"{origin}.en").read_text().splitlines()
        (own / f"{split}.en").write_text("".join(f"tyv_Cyrl {line}\n" for line in sources))
        (own / f"{split}.de").write_text((text / f"{origin}.de").read_text())
    tuned = tmp_path / "tuned"
    more = ("--train.num-steps=100", "--optimizer.learning-rate=3e-3")
    losses = fine_tune(run, own, tuned, *more)
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    (token,), (like,) = load_run(tuned).tokenizers.source.encode_parts(["tyv_Cyrl", "eng_Latn"])
    table = load_run(tuned).params["target_embedding"]["embedding"]
    assert abs(table[token] - table[like]).max() > 1e-3


def test_a_published_folder_is_no_configuration(refuse, published, tmp_path):
    error = refuse(f"--config={published / 'config.json'}", f"--workdir={tmp_path / 'run'}")
    assert "make a run of its folder with `flaxformer-mt convert --from marian" in error
