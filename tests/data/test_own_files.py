"""One file of the user's as a corpus: forms, columns and compression."""

import gzip
import importlib
import json
import sys

import pytest

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus, open_corpora, read_corpus
from flaxformer_mt.errors import UserError

PAIRS = [("A house.", "Une maison."), ("Two, houses", 'Il dit "oui"')]
ATTRIBUTED = "".join(f"{source}\t{target}\tCC-BY 2.0\n" for source, target in PAIRS)
HEADED = 'id,fr,en\n1,Une maison.,A house.\n\n2,"Il dit ""oui""","Two, houses"\n'
MEMBERS = "".join(json.dumps({"id": 1, "en": en, "fr": fr}) + "\n" for en, fr in PAIRS)
NESTED = "".join(json.dumps({"translation": {"en": en, "fr": fr}}) + "\n\n" for en, fr in PAIRS)


def read(path, **options):
    config = DataConfig(path=str(path), source_language="en", target_language="fr", **options)
    corpus = load_corpus(config, "train")
    return [*corpus.pairs()]


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("fra.txt", ATTRIBUTED, ("1", "2")),
        ("fra.tsv", ATTRIBUTED.replace("\tCC-BY 2.0", ""), ()),
        ("fra.tsv", "English\tFrench\tid\n" + ATTRIBUTED, ("English", "French")),
        ("fra.csv", HEADED, ()),
        ("fra.csv", HEADED.partition("\n")[2], ("3", "2")),
        ("fra.jsonl", MEMBERS, ()),
        ("fra.jsonl", NESTED, ()),
        ("fra.ndjson", NESTED, ("translation.en", "translation.fr")),
    ],
)  # fmt: skip
def test_one_file(tmp_path, name, text, columns):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read(tmp_path / name, columns=columns) == PAIRS
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / f"{name}.gz", columns=columns) == PAIRS


def test_line_breaks_within_a_sentence_become_spaces(tmp_path):
    (tmp_path / "a.csv").write_text('en,fr\n"A\nhouse","Une\r\nmaison"\n', newline="")
    (tmp_path / "a.jsonl").write_text(json.dumps({"en": "A\nhouse", "fr": "Une\r\nmaison"}) + "\n")
    for name in ("a.csv", "a.jsonl"):
        assert read(tmp_path / name) == [("A house", "Une maison")]


def test_a_folder_of_tables(tmp_path):
    (tmp_path / "train.csv").write_text(HEADED)
    (tmp_path / "valid.jsonl").write_text(MEMBERS)
    assert read(tmp_path, corpus="csv") == PAIRS
    config = DataConfig(
        path=str(tmp_path),
        target_language="fr",
        valid_corpora=(CorpusConfig(kind="jsonl"), CorpusConfig(path=f"{tmp_path}/train.csv")),
    )
    assert [*read_corpus(open_corpora(config, "valid")).pairs()] == PAIRS * 2


@pytest.mark.parametrize("end", ["", ".gz"])
def test_two_parallel_files(tmp_path, end):
    for code, side in (("en", 0), ("fr", 1)):
        text = "".join(f"{pair[side]}\n" for pair in PAIRS).encode()
        path = tmp_path / f"fra-eng.{code}{end}"
        path.write_bytes(gzip.compress(text) if end else text)
    assert read(tmp_path / "fra-eng") == PAIRS
    assert read(f"{tmp_path}/fra-eng.en{end},{tmp_path}/fra-eng.fr{end}") == PAIRS
    with pytest.raises(UserError, match=r"data\.columns=\('1', '2'\): .* has no columns"):
        read(tmp_path / "fra-eng", columns=("1", "2"))


@pytest.mark.parametrize(
    ("name", "text", "columns", "message"),
    [
        ("a.txt", "a\tb\nc\td\te\n", (), r"line 2: 2 tabs; .* name the two, such as 1 2 \(data.c"),
        ("a.csv", "a,b\n", ("1", "3"), r"line 1: no column 3 \(data.columns\): it has 2"),
        (
            "a.txt",
            "ab\n",
            (),
            "line 1: 0 tabs; a line must be a source, one tab and a target; or drop",
        ),
        ("a.csv", 'a,"b\n', (), "line 1: not CSV: unexpected end of data"),
        ("a.jsonl", '{"en": "a", "de": "b"}\n', (), "line 1: no member 'fr', only 'en', 'de'"),
        ("a.jsonl", '{"en": "a",\n', (), "line 1: not JSON: Expect"),
        ("a.jsonl", '{"translation": "a"}\n', (), "line 1: no member 'translation.en'"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, text, columns, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}.*{message}"):
        read(tmp_path / name, columns=columns)


@pytest.mark.parametrize("columns", [("1",), ("1", "1"), ("1", ""), ("1", "2", "3")])
def test_columns_are_two(columns):
    with pytest.raises(UserError, match=r"data\.columns=.*: must be two columns"):
        DataConfig(columns=columns)


def test_zstandard(tmp_path, monkeypatch):
    zstd = importlib.import_module(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    )
    path = tmp_path / "fra.txt.zst"
    content = zstd.compress(ATTRIBUTED.encode() * 100)
    path.write_bytes(content)
    assert read(path, columns=("1", "2")) == PAIRS * 100
    for damaged in (content[:-3], b"no zst " + content):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"fra\.txt\.zst: damaged Zstandard file"):
            read(path, columns=("1", "2"))
    monkeypatch.setitem(sys.modules, zstd.__name__, None)
    with pytest.raises(UserError, match=r"not installed: pip install 'flaxformer_mt\[data\]'"):
        read(path, columns=("1", "2"))


def test_a_file_has_no_splits(tmp_path):
    (tmp_path / "own.tsv").write_text("a\tb\n")
    corpora = (CorpusConfig(kind="tsv", path=str(tmp_path / "own.tsv"), split="valid"),)
    with pytest.raises(UserError, match=r"data\.valid_corpora\.0\.split=valid has no effect"):
        open_corpora(DataConfig(valid_corpora=corpora), "valid")


def test_one_file_needs_development_pairs(tmp_path):
    (tmp_path / "own.tsv").write_text("a\tb\n")
    with pytest.raises(UserError, match=r"own\.tsv has only training pairs: .*data\.hold_out"):
        open_corpora(DataConfig(path=str(tmp_path / "own.tsv")), "valid")


# Data sets of Hugging Face.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    datasets = importlib.import_module("datasets")
    folder = tmp_path_factory.mktemp("datasets")
    datasets.disable_progress_bars()
    nested = datasets.Dataset.from_list([{"id": 1, "translation": {"en": en, "fr": fr}} for
                                         en, fr in PAIRS])  # fmt: skip
    flat = datasets.Dataset.from_list([{"en": en, "fr": f"{fr}\n"} for en, fr in PAIRS])
    dev = nested.select([1])
    datasets.DatasetDict(train=nested, dev=dev).save_to_disk(folder / "splits")
    flat.save_to_disk(folder / "flat")
    languages = datasets.Features(translation=datasets.Translation(["en", "fr"]))
    hub = {"translation": [{"en": en, "fr": fr} for en, fr in PAIRS]}
    datasets.Dataset.from_dict(hub, features=languages).save_to_disk(folder / "hub")
    return folder


def test_hugging_face_folders(saved):
    assert read(saved / "splits") == PAIRS
    assert read(saved / "flat") == PAIRS
    assert read(saved / "hub") == PAIRS
    assert read(saved / "splits", columns=("translation.fr", "translation.en")) == [
        pair[::-1] for pair in PAIRS
    ]
    config = DataConfig(path=str(saved / "splits"), target_language="fr", valid_split="dev")
    (corpus,) = open_corpora(config, "valid")
    assert [*corpus.pairs()] == PAIRS[1:]
    assert corpus.fingerprint != open_corpora(config, "train")[0].fingerprint


def test_damaged_arrow_files_are_named_or_hold_as_many_texts(tmp_path):
    """Without a check, some of these would end the process, or read the memory of others."""
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    texts = [f"text {number}" for number in range(50)]
    datasets.Dataset.from_dict({"en": texts, "fr": texts}).save_to_disk(tmp_path / "data")
    (file,) = (tmp_path / "data").glob("*.arrow")
    content = file.read_bytes()
    file.unlink()
    messages = []
    for place in range(0, len(content), 13):
        file.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        try:
            assert len(read(tmp_path / "data")) == 50
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert not [message for message in messages if "\n" in message]


def test_what_a_hugging_face_folder_lacks_is_named(saved, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="has no split training, only train, dev"):
        open_corpora(DataConfig(path=str(saved / "splits"), train_split="training"), "train")
    with pytest.raises(UserError, match=r"'translation\.fr', not one in each of en and de: name"):
        open_corpora(DataConfig(path=str(saved / "splits")), "train")
    with pytest.raises(UserError, match=r"'translation\.fr', not one in each of en and de: name"):
        open_corpora(DataConfig(path=str(saved / "hub")), "train")
    with pytest.raises(UserError, match=r"column 'id' \(data\.columns\) has no text: int64"):
        read(saved / "splits", columns=("id", "translation.fr"))
    with pytest.raises(UserError, match="has only training pairs"):
        open_corpora(DataConfig(path=str(saved / "flat")), "valid")
    with pytest.raises(UserError, match="is not a folder that datasets' save_to_disk has written"):
        open_corpora(DataConfig(path=str(tmp_path), corpus="datasets"), "train")
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_corpora(DataConfig(path=str(tmp_path)), "train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="not installed: pip install datasets"):
        read(saved / "splits")
