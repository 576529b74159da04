"""Text: encodings, line ends, control characters, counts that differ, damaged gzip, no files."""

import gzip
import json
import os
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from fuzz.core import Case, Outcome
from fuzz.mutations import DEEP, damage_bytes
from fuzz.world import World

PIECES = (
    b"two", b"ten", b"", b" ", b"\t", b"\0", b"\r", b"\x0b", b"\x0c", b"\x1b[2J", b"\x7f", b"\x85",
    "\u2028".encode(), "\ufeff".encode(), "\u0085".encode(), "ü".encode("latin-1"), b"\xff\xfe",
    "👩‍🚀".encode(), "a\u0301".encode(), b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"|||",
    "\u202e".encode(), b"<s>", b"</s>", b"<pad>", b"<unk>", b">>de<<", "▁".encode(), b"%s{}\\n",
    "\U0010ffff".encode(), b"a" * 3000, b"two " * 200, "\u200b".encode(), b"0" * 400,
)  # fmt: skip
"""Parts of lines, valid or not."""
ENCODINGS = ("utf-16", "utf-32", "latin-1", "cp1252", "utf-8-sig", "utf-7", "shift_jis")
JSON_LINES = (
    b'{"text": "two"}', b'{"text": ""}', b'{"text": "two", "prefix": "zwei"}', b"{}", b"[]", b"3",
    b'{"text": null}', b'{"text": 3}', b'{"text": "two", "phrases": [""]}', b"NaN", b"two",
    b'{"text": "two", "phrases": ["zwei", 3]}', b'{"text": "two", "phrases": "zwei"}', b'{"text"',
    b'{"text": "\\ud800"}', b'{"text": "\\u0000"}', b'{"text": "a\\nb"}', b'{"text": "two"} 3',
    b'{"text": "two", "prefix": ["x"]}', b'{"text": "two", "text": "ten"}', DEEP.encode(), b"",
    b'{"text": "two", "prefix": "\\n"}', b'{"text": "two", "unknown": 1}', b"9" * 5000,
    b'{"text": "two", "phrases": []}', b'{"text": "two", "phrases": ["\\ud800"]}', b"\xff",
)  # fmt: skip
SPECIAL = ("missing", "folder", "fifo", "empty", "newline", "null device", "broken link")


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    makers = (lines_in, lines_in, pairs, pairs, json_lines)
    return rng.choice(makers)(rng, world, folder)


def text(rng: random.Random) -> bytes:
    """Returns the content of a text file, mostly valid."""
    pieces = PIECES if rng.random() < 0.5 else PIECES[:4]
    lines = [
        b"".join(rng.choices(pieces, k=rng.choice((1, 1, 1, 2, 3))))
        for _ in range(rng.choice((1, 2, 2, 3, 6)))
    ]
    end = rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\n\n"))
    content = end.join(lines) + rng.choice((end, end, b"", b"\n\n"))
    match rng.randrange(12):
        case 0:
            encoding = rng.choice(ENCODINGS)
            return content.decode(errors="ignore").encode(encoding, errors="replace")
        case 1:
            return b"\xef\xbb\xbf" + content
    return content


def write_text(rng: random.Random, path: Path) -> tuple[Path, str, int | None]:
    """Writes a text file.

    Returns:
      Its path, what it is, and its number of lines if it is one that can be read.
    """
    if rng.random() < 0.15:
        way = rng.choice(SPECIAL)
        write_special(way, path)
        return path, way, {"newline": 1}.get(way)
    content = text(rng)
    count = line_count(content)
    if rng.random() < 0.15:
        path = path.with_name(f"{path.name}.gz")
        packed = gzip.compress(content, mtime=0)
        done = "gzip"
        if rng.random() < 0.6:
            packed, done = damage_bytes(rng, packed, content)
            count = count if unpacked(packed) == content else None  # The header holds a date.
        path.write_bytes(packed)
        return path, f"{done} of {content!r}", count
    path.write_bytes(content)
    return path, repr(content), count


def write_special(way: str, path: Path) -> None:
    match way:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "empty":
            path.write_bytes(b"")
        case "newline":
            path.write_bytes(b"\n")
        case "null device":
            path.symlink_to("/dev/null")
        case "broken link":
            path.symlink_to("nowhere")


def unpacked(packed: bytes) -> bytes | None:
    """Returns what a gzip file holds; None if it is damaged."""
    try:
        return gzip.decompress(packed)
    except (EOFError, OSError, zlib.error):
        return None


def line_count(content: bytes) -> int | None:
    """Returns the number of lines of a text file; None if it is not UTF-8 or empty."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        content.decode()
    except UnicodeDecodeError:
        return None
    return content.count(b"\n") + (not content.endswith(b"\n")) if content else None


def expected_lines(expected: int | None, name: str = "lines") -> Callable[[Outcome], str]:
    """Returns a check that the output has a line per sentence, none for unusable input."""

    def check(outcome: Outcome) -> str:
        found = outcome.out.count("\n")
        if expected is None:
            return f"{found} {name} for unusable input" if found else ""
        return "" if found == expected else f"{found} {name} for {expected} sentences"

    return check


def lines_in(rng: random.Random, world: World, folder: Path) -> Case:
    """Text to be translated."""
    path, done, count = write_text(rng, folder / "input.txt")
    short = ("--max-length", "3")
    if rng.random() < 0.5 and path.is_file() and path.suffix != ".gz":
        arguments = ("translate", "--run", str(world.run), *short)
        return Case(done, arguments, path.read_bytes(), check=expected_lines(count))
    arguments = ("translate", "--run", str(world.run), "--input", str(path), *short)
    return Case(done, arguments, check=expected_lines(count), names=(str(path),))


def pairs(rng: random.Random, world: World, folder: Path) -> Case:
    """Two files that are or are not parallel, to be scored, evaluated or learned from."""
    source, done, count = write_text(rng, folder / "source.txt")
    target, also_done, other_count = write_text(rng, folder / "target.txt")
    if rng.random() < 0.5 and count is not None:
        target.unlink() if target.is_file() or target.is_symlink() else None
        target = folder / "parallel.txt"
        target.write_bytes(b"zwei\n" * count)
        also_done, other_count = f"{count} lines", count
    command = rng.choice(("score", "score", "lexicon", "evaluate"))
    options = ["--run", str(world.run), "--source", str(source)]
    options += ["--reference" if command == "evaluate" else "--target", str(target)]
    is_usable = count is not None and count == other_count
    expected = count if is_usable else None

    def check(outcome: Outcome) -> str:
        if not is_usable:
            return f"accepted files with {count} and {other_count} lines"
        if command == "score":
            return expected_lines(expected)(outcome)
        if command == "evaluate":
            found = json.loads(outcome.out)["sentences"]
            return "" if found == expected else f"{found} sentences instead of {expected}"
        found = int(re.findall(r"from ([\d,]+) pairs", outcome.err)[0].replace(",", ""))
        return "" if found == expected else f"{found} pairs instead of {expected}"

    if command == "evaluate":
        options += ["--max-length", "3"]
    if command == "lexicon":
        options += ["--output", str(folder / "output")]
    names = (str(source), str(target), "probabilit", "lexicon", "entries", "pairs")
    return Case(f"{done}; {also_done}", (command, *options), check=check, names=names)


def json_lines(rng: random.Random, world: World, folder: Path) -> Case:
    """JSON lines to be translated."""
    content = b"\n".join(rng.choices(JSON_LINES, k=rng.choice((1, 2, 3)))) + b"\n"
    options = ("--max-length", "3", "--input-format", "jsonl")
    if rng.random() < 0.5:
        options += ("--format", "jsonl")
    count = line_count(content)
    return Case(
        repr(content[:300]),
        ("translate", "--run", str(world.run), *options),
        content,
        check=expected_lines(count),
        names=("standard input",),
    )
