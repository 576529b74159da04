"""Chunks of corpora: what is not wanted is not read, and the others are what `pairs` yields."""

import gzip
import random

import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora import text_files
from flaxformer_mt.data.corpora.corpus import open_corpora, open_path
from flaxformer_mt.data.corpora.hold_out import hold_out
from flaxformer_mt.errors import UserError

SIZE = 5
SENTENCES = ["A house.", "", "Zwei Häuser.", "a" * 50, "\u2028", "x\r"]


def write_folder(folder, generator):
    """Writes files of which some lines are not UTF-8; returns the pairs of the rows, or None."""
    rows = []
    for name in ("train-a", "train-b", "train-c"):
        lines = generator.randint(1, 40)
        sides = [[generator.choice(SENTENCES).encode() for _ in range(lines)] for _ in range(2)]
        for side in sides:
            for index in range(lines):
                if generator.random() < 0.1:
                    side[index] = b"\xff"
        rows += [
            None if b"\xff" in pair else tuple(text.decode().rstrip("\r") for text in pair)
            for pair in zip(*sides, strict=True)
        ]
        for code, side in zip(("en", "de"), sides, strict=True):
            content = b"".join(line + b"\n" for line in side)
            if side[-1] and generator.random() < 0.5:
                content = content[:-1]
            path = folder / f"{name}.{code}"
            if generator.random() < 0.5:
                path.write_bytes(content)
            else:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    return rows


def corpus_in(folder, tag="", **options):
    data = DataConfig(
        path=str(folder), train_split="train-*", source_language="en", target_language="de",
        bad_rows="drop", **options,
    )  # fmt: skip
    return open_path(data, "train-*", tag=tag)


@pytest.mark.parametrize("tag", ["", "<de>"])
@pytest.mark.parametrize("seed", range(20))
def test_wanted_chunks_are_the_pairs_of_their_rows(seed, tag, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 30)
    generator = random.Random(seed)
    rows = write_folder(tmp_path, generator)
    corpus = corpus_in(tmp_path, tag)
    pairs = [*corpus.pairs()]
    wanted = {number for number in range(len(rows)) if generator.random() < 0.5}
    chunks = [*corpus.chunks(SIZE, wanted.__contains__)]
    assert len(chunks) == -(-len(rows) // SIZE)
    found, dropped = {}, 0
    for number, chunk in enumerate(chunks):
        assert (chunk is not None) == (number in wanted)
        if chunk is not None:
            found |= dict(zip(chunk.numbers, chunk.pairs, strict=True))
            dropped += sum(rows.count for rows in chunk.malformed.values())
    prefix = f"{tag} " if tag else ""
    expected = {
        number: (prefix + row[0], row[1])
        for number, row in enumerate(rows, start=1)
        if row is not None and (number - 1) // SIZE in wanted
    }
    assert found == expected
    assert dropped == sum(row is None and index // SIZE in wanted for index, row in enumerate(rows))
    assert pairs == [(prefix + row[0], row[1]) for row in rows if row is not None]
    everything = [pair for chunk in corpus.chunks(SIZE) for pair in chunk.pairs]
    assert everything == pairs
    assert [(p.path, p.number) for p in everything] == [(p.path, p.number) for p in pairs]


def test_what_is_not_wanted_is_not_even_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 10)
    (tmp_path / "a.en").write_bytes(b"good line\n" * 50 + b"\xff\xff\n" * 50 + b"good line\n" * 50)
    (tmp_path / "a.de").write_bytes(b"gute Zeile\n" * 150)
    data = DataConfig(path=str(tmp_path / "a"), source_language="en", target_language="de")
    (corpus,) = open_corpora(data, "train")
    chunks = [*corpus.chunks(25, lambda number: number in (0, 5))]
    assert [chunk and len(chunk.pairs) for chunk in chunks] == [25, None, None, None, None, 25]
    with pytest.raises(UserError, match="line 51: not UTF-8"):
        [*corpus.chunks(25)]


@pytest.mark.parametrize("seed", range(5))
def test_held_out_pairs_are_left_out_of_chunks(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 30)
    generator = random.Random(seed)
    lines = [b"\xff" if generator.random() < 0.1 else b"a %d" % n for n in range(200)]
    (tmp_path / "a.en").write_bytes(b"\n".join(lines))
    (tmp_path / "a.de").write_bytes(b"\n".join(b"b %d" % n for n in range(200)))
    data = DataConfig(
        path=str(tmp_path / "a"), source_language="en", target_language="de", bad_rows="drop",
        hold_out=20,
    )  # fmt: skip
    (corpus,) = hold_out(open_corpora(data, "train"), data)["train"]
    pairs = [*corpus.pairs()]
    assert 130 < len(pairs) < 200 - 20
    chunks = [[*corpus.chunks(7, lambda n, own=own: n % 3 == own)] for own in range(3)]
    joined = [chunks[number % 3][number] for number in range(len(chunks[0]))]
    assert [pair for chunk in joined for pair in chunk.pairs] == pairs
    assert sum(c.malformed["not UTF-8"].count for c in joined if c.malformed) == lines.count(
        b"\xff"
    )
