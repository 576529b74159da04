"""Which bytes a file holds, and what separates the columns of a table."""

import csv
import itertools
import random
import unicodedata

import numpy as np
import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import open_corpora
from flaxformer_mt.data.corpora.text_files import arriving_lines, read_lines
from flaxformer_mt.errors import UserError


def opened(path, **options):
    data = DataConfig(path=str(path), source_language="en", target_language="fr", **options)
    return open_corpora(data, "train")[0]


def read(path, **options):
    return [*opened(path, **options).pairs()]


SCRIPTS = {"Latin": (0x41, 0x17F), "Cyrillic": (0x410, 0x44F), "Han": (0x4E00, 0x9FFF)}
WIDE = [f"utf-{size}-{order}" for size in (16, 32) for order in ("le", "be")]


@pytest.mark.parametrize(("script", "encoding"), [*itertools.product(SCRIPTS, WIDE)])
def test_random_text_in_other_encodings_is_named(tmp_path, script, encoding):
    rng, (first, last) = random.Random(script), SCRIPTS[script]
    letters = [chr(n) for n in range(first, last) if unicodedata.category(chr(n)).startswith("L")]
    lines = [
        " ".join("".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(8))
        for _ in range(rng.randint(1, 20))
    ]
    text = "\n".join(lines) + "\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    name = encoding.upper().replace("-L", "L").replace("-B", "B")
    with pytest.raises(UserError, match=rf"is {name} without .* mark.*iconv -f {name} -t UTF-8"):
        read_lines(path)
    path.write_bytes(text.encode(encoding[:6]))  # With a mark.
    with pytest.raises(UserError, match=rf"is {name[:6]}, not UTF-8 text: .*iconv -f {name[:6]} "):
        read_lines(path)
    for mark in ("", "\ufeff"):
        path.write_text(mark + text)
        assert read_lines(path) == lines


def test_western_text_and_line_ends_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("un\nété\n".encode("cp1252"))
    with pytest.raises(UserError, match=r"line 2: not UTF-8 .*iconv -f WINDOWS-1252 -t UTF-8"):
        read_lines(path)
    path.write_bytes(b"one\rtwo\rthree")
    with pytest.raises(UserError, match=r"a\.txt has lines that end in CR alone: .*tr '.r' '.n'"):
        read_lines(path)
    path.write_bytes("one\rtwo\r\nthree\u2028four\x85\n".encode())
    assert read_lines(path) == ["one two", "three\u2028four\x85"]


def test_a_mark_where_files_are_joined(tmp_path, caplog):
    path = tmp_path / "a.tsv"
    path.write_text("\ufeffa\tb\n\ufeffc\td\ne\tf\ufeffg\n")
    assert read(path) == [("a", "b"), ("c", "d"), ("e", "f\ufeffg")]
    assert "line 2 begins with a byte order mark" in caplog.text
    assert "line 3 has a byte order mark within it" in caplog.text
    path.write_text("a\n\ufeffb\rc\n", newline="")
    with path.open("rb") as stream:
        assert [*arriving_lines(stream, "input", 1000)] == [["a", "b c"]]


def test_a_nul_is_no_text(tmp_path):
    contents = {
        "a.tsv": b"a\tb\nc\0\td\n",
        "a.csv": b'"a","b"\nc,"d\0"\n',
        "a.jsonl": b'{"en": "a", "fr": "b"}\n{"en": "c\\u0000", "fr": "d"}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}, line 2: a NUL character \(.* or drop"):
            read(tmp_path / name)
        corpus = opened(tmp_path / name, bad_rows="drop")
        assert [*corpus.pairs()] == [("a", "b")]
        assert corpus.malformed()["a NUL character"].count == 1


@pytest.mark.parametrize(
    ("name", "text", "pairs", "warning"),
    [
        ("a.tsv", '"A, b"\tc\nd\t"e, f"\n', [("A, b", "c"), ("d", "e, f")], "comma is quoted"),
        ("a.tsv", '"A, b"\tc\nd\te, f\n', [('"A, b"', "c"), ("d", "e, f")], ""),
        ("a.csv", "A, b;c\nD;e, f\n", [("A, b", "c"), ("D", "e, f")], "separated by ';' or ','"),
        ("a.csv", "en;fr\nA,b;c\nD;e,f\n", [("A,b", "c"), ("D", "e,f")], ""),
        ("a.csv", '"A,b";"c"\n"D";"e; f"\n', [("A,b", "c"), ("D", "e; f")], ""),
        ("a.csv", "A, b\tc\nD\te, f; g\n", [("A, b", "c"), ("D", "e, f; g")], "separated by"),
        ("a.csv", "A; b,c\nD,e; f\n", [("A; b", "c"), ("D", "e; f")], "separated by ',' or ';'"),
        ("a.csv", '"A\nb";c\n', [("A b", "c")], ""),
    ],
)
def test_quotes_and_columns_tell_how_a_table_is_written(
    tmp_path, caplog, name, text, pairs, warning
):
    (tmp_path / name).write_text(text)
    assert read(tmp_path / name) == pairs
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.messages)


@pytest.mark.parametrize("seed", range(5))
def test_random_tables_are_read_as_they_were_written(tmp_path, seed):
    rng = random.Random(seed)
    words = ["a", "b, c", "d; e", 'f "g"', "h\ti", "j\nk"]
    rows = [[" ".join(rng.choices(words, k=3)) for _ in range(2)] for _ in range(30)]
    expected = [tuple(cell.replace("\n", " ") for cell in row) for row in rows]
    for delimiter in ",;\t":
        path = tmp_path / ("a.tsv" if delimiter == "\t" and seed % 2 else "a.csv")
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(rows)
        assert read(path) == expected


def test_parquet_of_other_types_of_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = ["é", "b", "b", None]
    for kind in (
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
        *(pyarrow.binary(), pyarrow.large_binary(), pyarrow.string_view()),
    ):
        column = pyarrow.array(texts, pyarrow.string()).cast(kind)
        parquet.write_table(pyarrow.table({"en": column, "fr": column}), path)
        assert read(path) == [(text or "", text or "") for text in texts]
    column = pyarrow.array([b"a", b"\xff", b"\0"])
    parquet.write_table(pyarrow.table({"en": column, "fr": column, "n": np.arange(3)}), path)
    corpus = opened(path, bad_rows="drop")
    assert [*corpus.pairs()] == [("a", "a")]
    assert {kind: rows.count for kind, rows in corpus.malformed().items()} == {
        "not UTF-8": 1,
        "a NUL character": 1,
    }
    with pytest.raises(UserError, match=r"column 'n' \(data\.columns\) has no text: int64"):
        read(path, columns=("n", "en"))
