"""Data sets of TensorFlow Datasets: what is read, and what is refused."""

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest
import tfds_folder

pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.files import load_config
from flaxformer_mt.data.corpora.corpus import load_corpus, open_corpora
from flaxformer_mt.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
PAIRS = [(f"house {number}", f"Häuser, {number} an der Zahl") for number in range(500)]


def read(folder, split):
    corpus = load_corpus(DataConfig(corpus="tfds", path=str(folder)), split)
    return list(corpus.pairs())


def test_pairs_are_read_in_order_by_splits_and_slices(tmp_path):
    tfds_folder.write(tmp_path / "data", train=PAIRS, test=PAIRS[:3])
    assert read(tmp_path / "data", "train") == PAIRS
    assert read(tmp_path / "data", "train[2:4]+test") == PAIRS[2:4] + PAIRS[:3]


def changed(name, change):
    """A damage to the metadata of a data set."""

    def damage(folder):
        text = (folder / name).read_text()
        assert change(text) != text
        (folder / name).write_text(change(text))

    return damage


def translation_class(name):
    return lambda text: re.sub(r'"pythonClassName": "[^"]*"', f'"pythonClassName": "{name}"', text)


def pipe(folder):
    (path,) = folder.glob("*array_record*")
    path.unlink()
    os.mkfifo(path)


FEATURES = "tensorflow_datasets.core.features"
DAMAGES = {
    "fewer": (changed("dataset_info.json", lambda text: text.replace('"500"', '"3"')), "has 500"),
    "more": (changed("dataset_info.json", lambda text: text.replace('"500"', '"900"')), "has 500"),
    "no splits": (
        changed("dataset_info.json", lambda text: text.replace('"splits"', '"x"')), "split train",
    ),
    "not JSON": (changed("dataset_info.json", lambda text: text[:50]), "split train"),
    "null": (changed("features.json", lambda _: "null"), "data"),
    "deep": (changed("features.json", lambda _: "[" * 100_000), "nested too deeply"),
    "a class": (
        changed("features.json", translation_class("antigravity.Popen")),
        "names antigravity.Popen, not a feat",
    ),
    "a text": (
        changed("features.json", translation_class(f"{FEATURES}.text_feature.Text")),
        "has no feature Translation, only Text",
    ),
    "a pipe": (pipe, "a named pipe, not a file"),
    "another feature": (
        changed("features.json", lambda text: text.replace('"translation"', '"text"')), "data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, name):
    tfds_folder.write(tmp_path / "data", train=PAIRS)
    damage, message = DAMAGES[name]
    damage(tmp_path / "data")
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / "data", "train")
    assert str(tmp_path / "data") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "antigravity" not in sys.modules


def test_a_data_set_of_hugging_face_is_not_looked_for_in_the_network():
    with pytest.raises(UserError, match="only builders of TensorFlow Datasets itself are read"):
        open_corpora(DataConfig(path="tfds:huggingface:wmt14/de-en"), "train")


@pytest.mark.parametrize("name", ["wmt14_en_de_base", "wmt14_en_de_big"])
def test_a_data_set_can_replace_wmt(tmp_path, name):
    folder = tmp_path / "data"
    splits = {"train": PAIRS, "validation": PAIRS[:3], "test": PAIRS[3:5]}
    tfds_folder.write(folder, **splits)
    config = load_config(CONFIGS / f"{name}.py").data
    for role, pairs in zip(("train", "valid", "test"), splits.values(), strict=True):
        (corpus,) = open_corpora(dataclasses.replace(config, path=str(folder)), role)
        assert list(corpus.pairs()) == pairs
