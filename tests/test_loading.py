"""Whole models from folders of any kind."""

import jax
import numpy as np
import pytest

import flaxformer_mt
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, convert


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_run_folders_and_folders_of_opus_mt(trained_run, tmp_path):
    """The trained run has the architecture of OPUS-MT."""
    opus = tmp_path / "opus"
    convert(OWN, "marian", trained_run, opus)
    run, model = flaxformer_mt.load(str(trained_run)), flaxformer_mt.load(opus)
    assert repr(model) == f"<Model marian '{opus}'>"
    assert_same(model.params, run.params)
    assert model.tokenizers.source.encode(["seven"]) == run.tokenizers.source.encode(["seven"])
    translation = model.translate("seven kilometers")
    assert isinstance(translation, str)
    assert model.translate(["seven kilometers"]) == [translation]

    saved = model.save(tmp_path / "saved")
    assert_same(saved.model().params, model.params)
    assert saved.fine_tuning_config().train.init_from == str(saved.folder)
    with pytest.raises(UserError, match="saved exists: give another folder, or overwrite=True"):
        model.save(saved.folder)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    flaxformer_mt.save_run(
        saved.folder, model.config.model, model.tokenizers, doubled, overwrite=True
    )
    assert_same(model.save(saved.folder, overwrite=True).model().params, model.params)
    (saved.folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        model.save(saved.folder, overwrite=True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no model: it has no config.json, dict.txt or file of Marian"),
        ({"config.json": '{"model_type": "bert"}'}, "model_type=bert, which cannot be read; there"),
        ({"config.json": "[]"}, "config.json"),
        ({"a.npz": "", "b.npz": ""}, "has 2 models"),
    ],
)
def test_folders_that_are_no_model(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        flaxformer_mt.load(tmp_path)


def test_paths_that_are_no_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="is a file: give the folder that has its vocabulary, too"):
        flaxformer_mt.load(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="there is no folder Helsinki-NLP/opus-mt-en-de"):
        flaxformer_mt.load("Helsinki-NLP/opus-mt-en-de")
    with pytest.raises(UserError, match="unknown"):
        flaxformer_mt.load(tmp_path, family="unknown")
