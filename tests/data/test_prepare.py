import gzip
import os
import re
import sys

import pytest
from full_disks import files_no_longer_than

pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")

from flaxformer_mt.cli import main
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, load_corpus
from flaxformer_mt.data.corpora.tfds_builder import build_dataset
from flaxformer_mt.errors import UserError

PAIRS = [(f"house {number}", f"Häuser, {number} an der Zahl") for number in range(500)]


def corpus_of(pairs):
    sources, targets = map(list, zip(*pairs, strict=True))
    return ParallelCorpus(sources, targets, "a corpus", ("en", "de"))


def write_text(folder, name, pairs):
    for side, language in enumerate(("en", "de")):
        lines = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{name}.{language}").write_text(lines, encoding="utf-8")


def prepare(folder, *options, path="", output="data"):
    """Runs the command on text in a folder."""
    languages = ["--source-language", "en", "--target-language", "de"]
    folders = ["--path", str(folder / path), "--output", str(folder / output)]
    return main(["prepare", *folders, *languages, *options])


def read(folder, split):
    corpus = load_corpus(DataConfig(corpus="tfds", path=str(folder)), split)
    return list(corpus.pairs())


def test_pairs_round_trip_in_order(tmp_path):
    import tensorflow_datasets as tfds

    folder = tmp_path / "some" / "data"
    counts = build_dataset({"train": corpus_of(PAIRS), "test": corpus_of(PAIRS[:3])}, folder)
    assert counts == {"train": 500, "test": 3}
    assert read(folder, "train") == PAIRS
    assert read(folder, "train[2:4]+test") == PAIRS[2:4] + PAIRS[:3]
    builder = tfds.builder_from_directory(folder)
    assert isinstance(builder.info.features, tfds.features.Translation)
    assert sorted(builder.info.features) == ["de", "en"]
    assert builder.as_data_source("test")[1] == {"en": b"house 1", "de": PAIRS[1][1].encode()}
    assert list(folder.parent.iterdir()) == [folder]


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
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, name):
    build_dataset({"train": corpus_of(PAIRS)}, tmp_path / "data")
    damage, message = DAMAGES[name]
    damage(tmp_path / "data")
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / "data", "train")
    assert str(tmp_path / "data") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "antigravity" not in sys.modules


def test_an_existing_folder_is_not_changed(tmp_path):
    with pytest.raises(UserError, match="exists: remove it, or choose another folder"):
        build_dataset({"train": corpus_of(PAIRS)}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, UserError("the text is damaged")])
def test_an_interruption_leaves_no_files(tmp_path, interruption):
    class Interrupted(ParallelCorpus):
        def pairs(self):
            yield from super().pairs()
            raise interruption

    corpus = Interrupted(["a"], ["b"], "a corpus", ("en", "de"))
    kind = interruption if isinstance(interruption, type) else type(interruption)
    with pytest.raises(kind):
        build_dataset({"train": corpus_of(PAIRS), "test": corpus}, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path):
    text = [(str(os.urandom(2000)), "b") for _ in range(500)]
    with (
        files_no_longer_than(10_000),
        pytest.raises(UserError, match=r"cannot be written: .*File too la"),
    ):
        build_dataset({"train": corpus_of(text)}, tmp_path / "data")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"file/data cannot be written: .*file is not a folder"):
        build_dataset({"train": corpus_of(PAIRS)}, tmp_path / "file" / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_invalid_data_sets_are_rejected(tmp_path):
    with pytest.raises(UserError, match="a split cannot be called 'news-2013'"):
        build_dataset({"news-2013": corpus_of(PAIRS)}, tmp_path / "data")
    english = ParallelCorpus(["a"], ["b"], "a corpus", ("en", "en"))
    with pytest.raises(UserError, match=r"a data set has two languages, not 1: \['en'\]"):
        build_dataset({"train": english}, tmp_path / "data")


def test_on_the_command_line(tmp_path, capfd):
    write_text(tmp_path, "europarl", PAIRS[:4])
    write_text(tmp_path, "news-1", PAIRS[4:6])
    (tmp_path / "news-2.en.gz").write_bytes(gzip.compress(b"gzipped\n"))
    (tmp_path / "news-2.de").write_bytes(b"gepackt\n")
    write_text(tmp_path, "newstest2013", PAIRS[7:9])
    assert prepare(tmp_path, "--splits", "train=europarl,news-*", "validation=newstest2013") == 0
    assert read(tmp_path / "data", "train") == [*PAIRS[:6], ("gzipped", "gepackt")]
    assert read(tmp_path / "data", "validation") == PAIRS[7:9]
    counts, how_to_train = capfd.readouterr().out.splitlines()
    assert counts == f"{tmp_path}/data: 7 pairs train, 2 pairs validation"
    assert how_to_train.endswith(
        f"--data.corpus=tfds --data.path={tmp_path}/data --data.source-language=en "
        "--data.target-language=de --data.train-split=train --data.valid-split=validation "
        "--data.test-split="
    )

    assert prepare(tmp_path, "--splits", "train") == 1
    assert "--splits train: write NAME=FILES" in capfd.readouterr().err
    assert prepare(tmp_path, "--splits", "train=europarl", "train=news-*") == 1
    assert "--splits train is given twice: write train=europarl,news-*" in capfd.readouterr().err
    assert prepare(tmp_path) == 1
    assert "has none of train.en, train.en.gz, train.en.zst" in capfd.readouterr().err
