import dataclasses
import gzip
import os
import shutil
import sys

import pytest

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora.corpus import (
    ParallelCorpus,
    load_corpus,
    open_corpora,
    read_corpus,
)
from flaxformer_mt.data.corpora.text_files import read_lines, stream_parallel
from flaxformer_mt.errors import UserError

ENGLISH = "A house.\nTwo houses.\n"
GERMAN = "Ein Haus.\nZwei Häuser.\n"


def text_config(folder, **options):
    return DataConfig(corpus="text", path=str(folder), **options)


def write_pair(folder, english=ENGLISH, german=GERMAN, name="train"):
    (folder / f"{name}.en").write_text(english, encoding="utf-8", newline="")
    (folder / f"{name}.de").write_text(german, encoding="utf-8", newline="")


def fingerprint(config, role="train", **options):
    (corpus,) = open_corpora(dataclasses.replace(config, **options), role)
    return corpus.fingerprint


def test_text_pairs(tmp_path):
    write_pair(tmp_path)
    corpus = load_corpus(text_config(tmp_path), "train")
    assert corpus.sources == ["A house.", "Two houses."]
    assert corpus.targets == ["Ein Haus.", "Zwei Häuser."]
    assert len(corpus) == 2


def test_gzipped_text_is_the_same_corpus(tmp_path):
    write_pair(tmp_path)
    plain = load_corpus(text_config(tmp_path), "train")
    plain_fingerprint = fingerprint(text_config(tmp_path))
    for name in ("train.en", "train.de"):
        path = tmp_path / name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    zipped = load_corpus(text_config(tmp_path), "train")
    assert (zipped.sources, zipped.targets) == (plain.sources, plain.targets)
    assert fingerprint(text_config(tmp_path)) == plain_fingerprint


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\n\n b \n", ["a", "", " b "]),
        ("a\u2028b\u0085c\x0bd\x0ce\n".encode(), ["a\u2028b\u0085c\x0bd\x0ce"]),
        (b"a\rb\n", ["a b"]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        (b"\n", [""]),
    ],
)
def test_lines_end_at_line_feeds_only(tmp_path, data, lines):
    (tmp_path / "text").write_bytes(data)
    assert read_lines(tmp_path / "text") == lines


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_a_file_without_lines_is_empty(tmp_path, data):
    path = tmp_path / ("text.gz" if data.startswith(b"\x1f") else "text")
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{path.name} is empty"):
        read_lines(path)


def test_text_is_streamed(tmp_path):
    write_pair(tmp_path, english=ENGLISH * 50_000, german=GERMAN * 50_000)
    with (tmp_path / "train.de").open("ab") as file:
        file.write(b"\xff\n")
    pairs = stream_parallel(tmp_path / "train.en", tmp_path / "train.de")
    assert next(pairs) == ("A house.", "Ein Haus.")
    with pytest.raises(UserError, match=r"train\.de, line 100001: not UTF-8"):
        list(pairs)


@pytest.mark.parametrize(("english", "german"), [(2, 5), (5, 2), (1, 1)])
def test_different_line_counts_name_both(tmp_path, english, german):
    write_pair(tmp_path, english="One.\n" * english, german="Eins.\n" * german + "Zwei.\n")
    expected = rf"train\.en has {english} lines but .*train\.de has {german + 1}"
    with pytest.raises(UserError, match=expected):
        load_corpus(text_config(tmp_path), "train")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-10],
        lambda data: b"no gzip " + data,
        lambda data: data[:12] + bytes([data[12] ^ 0xFF]) + data[13:],
    ],
)
def test_damaged_gzip(tmp_path, damage):
    path = tmp_path / "train.en.gz"
    path.write_bytes(damage(gzip.compress(ENGLISH.encode() * 100)))
    with pytest.raises(UserError, match=r"train\.en\.gz: damaged gzip file"):
        read_lines(path)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(UserError, match=r"data\.path is empty"):
        load_corpus(text_config(""), "train")
    with pytest.raises(UserError, match=r"data\.path=.*nowhere is not a folder"):
        load_corpus(text_config(tmp_path / "nowhere"), "train")
    with pytest.raises(UserError, match=r"has none of train\.en, train\.en\.gz"):
        load_corpus(text_config(tmp_path), "train")
    with pytest.raises(UserError, match="there is no file"):
        read_lines(tmp_path / "train.en")
    with pytest.raises(UserError, match="a folder, not a file"):
        read_lines(tmp_path)


def test_tsv_pairs(tmp_path):
    config = DataConfig(corpus="tsv", path=str(tmp_path))
    (tmp_path / "train.tsv").write_text("A house.\tEin Haus.\r\n\tZwei\n", encoding="utf-8")
    corpus = load_corpus(config, "train")
    assert corpus.sources == ["A house.", ""]
    assert corpus.targets == ["Ein Haus.", "Zwei"]


@pytest.mark.parametrize(("line", "tabs"), [("no tab", 0), ("a\tb\tc", 2), ("", 0)])
def test_tsv_line_without_exactly_one_tab(tmp_path, line, tabs):
    (tmp_path / "train.tsv").write_text(f"a\tb\n{line}\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"train\.tsv, line 2: {tabs} tabs"):
        load_corpus(DataConfig(corpus="tsv", path=str(tmp_path)), "train")


def test_many_files_by_name_and_pattern(tmp_path):
    for name in ("news-b", "news-a", "europarl", "other"):
        write_pair(tmp_path, f"{name}\n", f"{name} auf Deutsch\n", name)
    (tmp_path / "news-a.de.gz").write_bytes(gzip.compress(b"the plain file goes before this\n"))
    (tmp_path / "news-c.en.gz").write_bytes(gzip.compress(b"news-c\n"))
    (tmp_path / "news-c.de").write_bytes(b"news-c auf Deutsch\n")
    (corpus,) = open_corpora(text_config(tmp_path, train_split="europarl, news-*,news-a"), "train")
    sources = ["europarl", "news-a", "news-b", "news-c"]
    assert list(corpus.pairs()) == [(source, f"{source} auf Deutsch") for source in sources]
    assert corpus.name.endswith("europarl.de, and 3 more")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "train,news-*"}, r"has none of news-\*\.en, news-\*\.en\.gz"),
        ({"train_split": "t*"}, "has two in only one of the languages en and de"),
        ({"train_split": "/train"}, r"data\.path="),
        ({"train_split": "**train"}, r"data\.path="),
        ({"train_split": ""}, r"data\.path="),
        (
            {"train_corpora": (CorpusConfig(), CorpusConfig(path="nowhere"))},
            r"data\.train_corpora\.1\.path=nowhere is not a folder",
        ),
    ],
)
def test_files_that_are_missing_are_named(tmp_path, options, message):
    write_pair(tmp_path)
    (tmp_path / "two.de").write_text("Ein Haus.\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        open_corpora(text_config(tmp_path, **options), "train")


def test_empty_fields_of_corpora_default_to_those_of_the_data(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "train.fr").write_text("Une maison.\nDeux maisons.\n", encoding="utf-8")
    (tmp_path / "talks.tsv").write_text("Hi!\tHallo!\n", encoding="utf-8")
    config = text_config(
        tmp_path,
        train_corpora=(
            CorpusConfig(tag="<2de>"),
            CorpusConfig(target_language="fr", tag="<2fr>  <news>", weight=2.0),
            CorpusConfig(kind="tsv", split="talks"),
        ),
    )
    german, french, talks = open_corpora(config, "train")
    assert next(german.pairs()) == ("<2de> A house.", "Ein Haus.")
    assert list(french.pairs())[1] == ("<2fr> <news> Two houses.", "Deux maisons.")
    assert list(talks.pairs()) == [("Hi!", "Hallo!")]
    assert (french.languages, french.tag, french.weight) == (("en", "fr"), "<2fr> <news>", 2.0)

    joined = read_corpus([german, talks])
    assert joined.sources == ["<2de> A house.", "<2de> Two houses.", "Hi!"]
    assert joined.targets == ["Ein Haus.", "Zwei Häuser.", "Hallo!"]
    assert joined.name == f"{german.name} + {talks.name}"


@pytest.mark.parametrize("kind", ["text", "tsv", "reverse"])
def test_a_language_model_reads_targets_only(tmp_path, kind):
    (tmp_path / "train.de").write_text(GERMAN, encoding="utf-8")
    (tmp_path / "train.tsv").write_text("A\tEin Haus.\nB\tZwei Häuser.\n", encoding="utf-8")
    path = "" if kind == "reverse" else str(tmp_path)
    config = DataConfig(corpus=kind, path=path, generated_pairs=2)
    (corpus,) = open_corpora(config, "train", has_inputs=False)
    targets = ["8 8", "9 8 1 8 5 1 2 9 4 8 7 2"] if kind == "reverse" else GERMAN.splitlines()
    assert list(corpus.pairs()) == [("", target) for target in targets]


def test_fingerprints_depend_on_the_content_and_not_on_names(tmp_path):
    (tmp_path / "a").mkdir()
    write_pair(tmp_path / "a")
    config = text_config(tmp_path / "a")
    first = fingerprint(config)
    shutil.move(tmp_path / "a", tmp_path / "b")
    for name in ("train.en", "train.de"):
        (tmp_path / "b" / name).rename(tmp_path / "b" / name.replace("train", "europarl"))
    moved = text_config(tmp_path / "b", train_split="europarl")
    assert fingerprint(moved) == first
    assert fingerprint(moved, source_language="de", target_language="en") != first
    assert fingerprint(moved, train_corpora=(CorpusConfig(tag="<2de>"),)) != first
    write_pair(tmp_path / "b", german=GERMAN.replace("Zwei", "zwei"), name="europarl")
    assert fingerprint(moved) != first


def test_a_random_sample_is_the_same_each_time_and_of_all_the_text():
    lines = [str(number) for number in range(1000)]
    corpus = ParallelCorpus(lines, lines, "both", parts=(("a", 400), ("b", 600)))
    chosen = corpus.sample(100)
    assert chosen == corpus.sample(100) == sorted(set(chosen))
    assert [sum(index < 400 for index in chosen), len(chosen)] == [40, 100]
    assert max(chosen[:40]) > 300
    assert max(chosen) > 900


def test_reverse_is_the_same_on_every_machine():
    corpus = load_corpus(DataConfig(corpus="reverse", generated_pairs=20), "train")
    assert corpus.sources[:3] == ["8 8", "2 7 8 4 9 2 1 5 8 1 8 9", "4 2 4"]
    assert corpus.targets[:3] == ["8 8", "9 8 1 8 5 1 2 9 4 8 7 2", "4 2 4"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Folder of a data set prepared by TensorFlow Datasets itself, without TensorFlow."""
    return prepare_with_tfds(
        tmp_path_factory.mktemp("tfds"),
        lambda features: features.Translation(["de", "en"]),
        [{"en": f"house {number}", "de": f"Häuschen {number}"} for number in range(10)],
    )


def prepare_with_tfds(folder, make_features, examples):
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")

    class HousePairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = make_features(tfds.features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from enumerate(examples)

    builder = HousePairs(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_path)


def tfds_config(path, **options):
    return DataConfig(corpus="tfds", path=path, **options)


def test_tfds_pairs(prepared):
    corpus = load_corpus(tfds_config(prepared), "train")
    expected = {(f"house {number}", f"Häuschen {number}") for number in range(10)}
    assert set(zip(corpus.sources, corpus.targets, strict=True)) == expected
    assert load_corpus(tfds_config(prepared), "train[:30%]").sources == corpus.sources[:3]


def test_tfds_fingerprint_follows_split_languages_and_files(prepared, tmp_path):
    config = tfds_config(prepared)
    first = fingerprint(config)
    moved = shutil.copytree(prepared, tmp_path / "moved")
    assert fingerprint(tfds_config(str(moved))) == first
    assert fingerprint(config, train_split="train[:50%]") != first
    assert fingerprint(config, source_language="de", target_language="en") != first
    (shard,) = moved.glob("*.array_record-*")
    shard.write_bytes(shard.read_bytes() + b"x")
    assert fingerprint(tfds_config(str(moved))) != first


@pytest.mark.parametrize(
    ("left", "message"), [(0.5, "has a truncated file"), (0.1, "cannot be read")]
)
def test_tfds_truncated_file(prepared, tmp_path, left, message):
    moved = shutil.copytree(prepared, tmp_path / "moved")
    (shard,) = moved.glob("*.array_record-*")
    os.truncate(shard, int(left * shard.stat().st_size))
    with pytest.raises(UserError, match=rf"moved/train {message}.*: prepare or copy it again"):
        load_corpus(tfds_config(str(moved)), "train")


@pytest.mark.parametrize(
    ("language", "split", "message"),
    [
        ("fr", "train", r"data\.target_language=fr: .* has only de, en"),
        ("de", "train[:0]", r"split train\[:0\]: "),
        ("de", "train[9:3]", r"split train\[9:3\]: "),
        ("de", "dev", "split dev: Unknown split 'dev'"),
    ],
)
def test_tfds_languages_and_splits_that_are_missing(prepared, language, split, message):
    with pytest.raises(UserError, match=message):
        load_corpus(tfds_config(prepared, target_language=language), split)


@pytest.mark.parametrize("package", ["tensorflow_datasets", "array_record.python"])
def test_tfds_not_installed(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"flaxformer_mt\[data\]"):
        load_corpus(DataConfig(corpus="tfds", path="wmt14_translate/de-en"), "train")
