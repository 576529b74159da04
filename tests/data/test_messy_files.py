"""Tables as programs write them, archives, and files with malformed rows."""

import bz2
import csv
import dataclasses
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import tarfile
import unicodedata
import zipfile
from pathlib import Path

import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig, TransformerConfig
from flaxformer_mt.data.corpora.corpus import load_corpus, open_corpora, read_corpus
from flaxformer_mt.data.corpora.rows import Row
from flaxformer_mt.data.corpora.text_files import stream_parallel
from flaxformer_mt.data.dataset import open_all
from flaxformer_mt.data.stream.encoded_corpus import encode_corpus
from flaxformer_mt.data.stream.mixture import select_pairs
from flaxformer_mt.data.stream.token_store import open_stores
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

PAIRS = [("A house.", "Une maison."), ('He said "hi"', 'Il dit "salut"')]
PLAIN = "".join(f"{source}\t{target}\n" for source, target in PAIRS)


def config_of(path, **options):
    return DataConfig(path=str(path), source_language="en", target_language="fr", **options)


def read(path, **options):
    return [*load_corpus(config_of(path, **options), "train").pairs()]


def written(path, pairs=PAIRS, **dialect):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **dialect).writerows(pairs)
    return path


# Quotes.


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_tabs_from_a_program_for_csv(tmp_path, caplog, quoting):
    pairs = [*PAIRS, ("Two\nlines", 'a\t"tab"'), ("7", "8")]
    path = written(tmp_path / "a.tsv", pairs, delimiter="\t", quoting=quoting)
    assert read(path) == [*PAIRS, ("Two lines", 'a\t"tab"'), ("7", "8")]
    assert caplog.messages == []
    (tmp_path / "b.tsv").write_text('"He said ""hi"""\t"Il dit ""salut"""\n')
    assert read(tmp_path / "b.tsv") == PAIRS[1:]
    assert read(tmp_path / "b.tsv", quoting="none") == [('"He said ""hi"""', '"Il dit ""salut"""')]


def test_quotes_of_text_stay(tmp_path):
    pairs = [('"Go!"', '"Va !"'), ('"Go," he said.', "« Va »"), ('5" or 6"', '"a"b'), ("a", "b")]
    (tmp_path / "a.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    assert read(tmp_path / "a.tsv") == pairs


# Headers.


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("English,French", ()),
        ("English,French", ("1", "2")),
        ("EN,fr_FR", ()),
        ("anglais_text,Français", ("1", "2")),
        ("src_text,tgt_text", ()),
        ("id,English,French", ()),
    ],
)
def test_a_header_is_not_a_pair(tmp_path, header, columns):
    names = header.split(",")
    rows = PAIRS
    if names[0] == "French":
        rows = [pair[::-1] for pair in PAIRS]
    elif names[0] == "id":
        rows = [("1", *pair) for pair in PAIRS]
    path = written(tmp_path / "a.csv", [names, *rows])
    if "anglais" in header:  # Not a name that is known: the row is text.
        assert len(read(path, columns=columns)) == 3
    else:
        assert read(path, columns=columns) == PAIRS


@pytest.mark.parametrize(
    "row", [("English", "Anglais"), ("French", "Français"), ("Text", "Texte"), ("En", "Dans")]
)
def test_a_pair_is_not_a_header(tmp_path, row):
    assert read(written(tmp_path / "a.csv", [row])) == [row]


# Forms and compression.


def packed_zip(content, *names):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".xz", lzma.compress),
        (".bz2", bz2.compress),
        (".GZ", gzip.compress),
        (".zip", lambda content: packed_zip(content, "fra.txt", "_about.txt", "__MACOSX/fra.txt")),
    ],
)
def test_compressed_files(tmp_path, suffix, pack):
    path = tmp_path / f"FRA.TSV{suffix}"
    content = pack(PLAIN.encode())
    path.write_bytes(content)
    assert read(path) == PAIRS
    folder = config_of(tmp_path, corpus="tsv")
    assert [*load_corpus(folder, "FRA").pairs()] == PAIRS
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"FRA\.TSV{suffix}: damaged \w+ file"):
        read(path)


def test_what_is_no_text_is_named(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("fra.txt"))
    gzipped = gzip.compress(PLAIN.encode())
    contents = {
        "a.tar.gz": (buffer.getvalue(), "is a tar archive.*unpack it"),
        "a.tgz": (buffer.getvalue(), "is a tar archive.*unpack it"),
        "a.tsv": (gzipped, r"is compressed by gzip.*suffix \.gz"),
        "a.xlsx": (packed_zip(b"", "x.xml"), "is a ZIP archive or a document.*export .* as CSV"),
        "a.txt": (PLAIN.encode("utf-16"), "is UTF-16, not UTF-8 text: convert it"),
        "a.7z": (b"7z\xbc\xaf\x27\x1c", "is a 7z archive"),
        "a.zip": (packed_zip(b"", "a", "b"), r"has 2 files \(a, b\), not one: unpack it"),
    }
    for name, (content, message) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} {message}"):
            read(tmp_path / name)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    sources, targets = map(list, zip(*PAIRS, strict=True))
    tables = [
        ({"en": sources, "fr": targets, "id": [1, 2]}, ()),
        ({"a": targets, "b": sources}, ("b", "a")),
        ({"translation": [{"en": en, "fr": fr} for en, fr in PAIRS]}, ()),
    ]
    path = tmp_path / "a.parquet"
    for columns, names in tables:
        parquet.write_table(pyarrow.table(columns), path)
        assert read(path, columns=names) == PAIRS
    with pytest.raises(UserError, match=r"no column 'c' \(data\.columns\), only 'translation\.en'"):
        read(path, columns=("c", "b"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as Parquet"):
        read(path)


TMX = """<?xml version="1.0"?>
<tmx version="1.4"><header/><body>
<tu>
<tuv xml:lang="fr-FR"><seg>Une <bpt i="1">&lt;b&gt;</bpt>maison<ept i="1">x</ept>.</seg></tuv>
<tuv xml:lang="EN"><seg>A <hi>house</hi>.</seg></tuv></tu>
<tu><tuv xml:lang="de"><seg>Nein</seg></tuv><tuv xml:lang="en"><seg>No</seg></tuv></tu>
</body></tmx>
"""


def test_tmx(tmp_path):
    path = tmp_path / "memory.tmx"
    path.write_text(TMX)
    (corpus,) = open_corpora(config_of(path), "train")
    (pair,) = corpus.pairs()
    assert pair == ("A house.", "Une maison.")
    assert isinstance(pair, Row)
    assert pair.number == 3
    path.write_text(TMX.replace("fr-FR", "it"))
    with pytest.raises(UserError, match="no translation unit in en and fr, only in EN, de, en, it"):
        read(path)
    path.write_text(TMX[:-30])
    with pytest.raises(UserError, match=r"memory\.tmx is not TMX: unclosed token: line 6"):
        read(path)
    declared = '<!DOCTYPE tmx [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'
    path.write_text(TMX.replace('"1.0"?>', f'"1.0"?>{declared}'))
    with pytest.raises(UserError, match="declares the entity a, which is not read"):
        read(path)


# Malformed rows.


def test_an_error_lists_the_first_five(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\tb\nno tab\na\tb\n\xff\tb\n" + b"a\tb\tc\n" * 9)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path}, line 2: 0 tabs; line 4: not UTF-8 (byte 1 of the line is 0xff); "
        "line 5: 2 tabs; line 6: 2 tabs; line 7: 2 tabs; a line must be a source, one tab and a "
        "target; or drop such rows by data.bad_rows=drop"
    )


def test_rows_of_parallel_files(tmp_path):
    (tmp_path / "train.en").write_bytes(b"a\n\xff\nc\nd\n")
    (tmp_path / "train.fr").write_bytes(b"a\n\xff\n\xff\nd\n")
    with pytest.raises(UserError, match=r"train\.en, line 2: not UTF-8.*train\.fr, line 3: not"):
        read(tmp_path)
    (corpus,) = open_corpora(config_of(tmp_path, bad_rows="drop"), "train")
    assert [*corpus.pairs()] == [("a", "a"), ("d", "d")]
    assert corpus.malformed()["not UTF-8"].count == 2
    both = read_corpus([corpus, corpus])
    tokenizers = Tokenizers.train([both], DataConfig())
    report = encode_corpus(both, tokenizers, TransformerConfig()).report
    assert str(report).startswith("4 of 8 pairs kept (4 not UTF-8 dropped);")


def test_members_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        '{"en": "a", "fr": "b"}',
        '{"en": "a", "fr": null}',
        "[1]",
        '{"en": 1, "fr": ""}',
        '{"en": "c"}',
        '{"en"',
    ]
    path.write_text("\n".join(rows))
    (corpus,) = open_corpora(config_of(path, bad_rows="drop"), "train")
    assert [*corpus.pairs()] == [("a", "b"), ("a", "")]
    assert {kind: found.count for kind, found in corpus.malformed().items()} == {
        "not a JSON object with a source and a target": 1,
        "'en' is not a string": 1,
        "no member 'fr'": 1,
        "not JSON": 1,
    }


DAMAGES = {
    "0 tabs": b"no tab here",
    "2 tabs": b"a\tb\tc",
    "not UTF-8": b"caf\xe9\tb",
    "a NUL character": b"a\x00b\tc",
    "empty side": b"\xe2\x80\x8b\tb",
    "longer than 1,048,576 bytes": b"x " * 2**19 + b"\tb",
    "more than 40 words": b"w " * 41 + b"\tb",
    "longer than a row": b"1a" * 60 + b"\tb",
}


def test_a_messy_file_is_read_and_its_lines_are_those_of_the_file(tmp_path):
    """1% of each damage in text of Tatoeba; `sed -n Np` shows the lines of the report."""
    rng = random.Random(0)
    good = [f"Sentence {i} of it.\tPhrase {i} ici." for i in range(3000)]
    if "TATOEBA" in os.environ:  # A folder with this text.
        paths = [Path(os.environ["TATOEBA"], f"train.{code}.gz") for code in ("en", "fr")]
        good = ["\t".join(pair) for pair in stream_parallel(*paths)]
    rows = [row.encode() for row in good]
    for damage in DAMAGES.values():
        # 1% of lines of a MiB would not fit into memory.
        for _ in range(len(good) // 100 if len(damage) < 1000 else 5):
            rows.insert(rng.randrange(len(rows)), damage)
    for changed in (
        lambda row: f"{row}\r\r",
        lambda row: unicodedata.normalize("NFD", f"é {row}"),
        lambda row: row.replace("\t", ' "so"\t"bon" '),
        lambda row: f"&quot;{row}&amp;amp;",
    ):
        for row in rng.choices(good, k=len(good) // 100):
            rows.insert(rng.randrange(len(rows)), changed(row).encode())
    path = tmp_path / "messy.tsv"
    path.write_bytes(b"English\tFrench\r\n" + b"\r\n".join(rows) + b"\r\n")

    data = config_of(path, bad_rows="drop", hold_out=len(good) // 30, max_words=40)
    data = dataclasses.replace(data, source_row_length=64)
    config = ExperimentConfig(data=data, model=TransformerConfig())
    corpora = open_all(config)["train"]
    tokenizers = Tokenizers.train(corpora, DataConfig(vocab_size=600))
    (store,) = open_stores(tmp_path / "cache", corpora, tokenizers, config)
    report = select_pairs(store, data)[0].report
    for kind, damage in DAMAGES.items():
        found = report.dropped[kind]
        # Hold-out may take some of the pairs that filters drop.
        bad = kind not in ("empty side", "more than 40 words", "longer than a row")
        wanted = 5 if len(damage) > 1000 else len(good) // 100
        assert found.count == wanted if bad else found.count > 0
        assert len(found.more) == (4 if bad else 0)
        for example in (found.example, *found.more):
            number = example.removeprefix(f"{path}, line ").split()[0].split(":")[0]
            shown = subprocess.run(["sed", "-n", f"{number}p", path], capture_output=True).stdout
            assert shown.rstrip(b"\r\n") == damage
    assert max(report.sources.longest, report.targets.longest) <= 64
    elsewhere = sum(corpora[0].division()[name] for name in ("valid", "test", "left_out"))
    assert report.pairs + elsewhere == len(rows)
    assert json.loads((tmp_path / "cache" / "train-0" / "store.json").read_text())["locations"] == [
        [0, str(path)]
    ]
