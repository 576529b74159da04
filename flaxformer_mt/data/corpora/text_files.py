"""Text files, plain or gzipped, read line by line: a file is never in memory as a whole.

A text file has one sentence a line. Two files are parallel if line i of one translates line i of
the other; a TSV file has both in one line, parted by a tab.
"""

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import os
import select
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxformer_mt.errors import UserError

_CHUNK_BYTES = 2**20
_PAUSE_SECONDS = 0.02
"""Who writes lines at shorter intervals to a pipe does not wait for answers."""


def stream_lines(path: Path) -> Iterator[str]:
    r"""The lines of a UTF-8 text file, which may be gzipped (`.gz`).

    Lines end with "\n" or "\r\n" and nowhere else: other separators that Unicode knows, such as
    U+2028, are part of a sentence. A byte order mark at the start is not.

    Raises:
      UserError: the file is missing, empty, no whole gzip file, or not UTF-8 (names the line).
        What comes after the lines that were read so far is found out later than they are given.
    """
    with opened(path) as file:
        lines = _decoded(file, str(path))
        first = next(lines, None)
        if first is None:
            raise UserError(f"{path} is empty")
        yield first
        yield from lines


def read_lines(path: Path) -> list[str]:
    """All lines of a file; see `stream_lines`."""
    return list(stream_lines(path))


def arriving_lines(stream: io.BufferedIOBase, name: str, enough: int) -> Iterator[list[str]]:
    """Lines as they come: what has come from a terminal or a pipe does not wait for what follows.

    Args:
      stream: UTF-8 text, which may be empty; lines end where they do for `stream_lines`.
      name: where it comes from, for messages.
      enough: bytes of a group, if so many come without a pause.

    Yields:
      Groups of lines, none of them empty.

    Raises:
      UserError: `name` is not UTF-8 (names the line).
    """
    number = 1
    for lines in _arriving(stream, enough):
        yield list(_decoded(lines, name, number))
        number += len(lines)


def count_lines(stream: io.BufferedIOBase) -> int:
    """How many lines follow in a stream that can be read again, which is left where it is."""
    start = stream.tell()
    count, last = 0, b"\n"
    while chunk := stream.read1(_CHUNK_BYTES):
        count += chunk.count(b"\n")
        last = chunk[-1:]
    stream.seek(start)
    return count + (last != b"\n")


def stream_parallel(source_path: Path, target_path: Path) -> Iterator[tuple[str, str]]:
    """The pairs of two parallel files.

    Raises:
      UserError: see `stream_lines`; or the files have different numbers of lines.
    """
    sources, targets = stream_lines(source_path), stream_lines(target_path)
    pairs = itertools.zip_longest(sources, targets)
    for number, (source, target) in enumerate(pairs, start=1):
        if source is None or target is None:
            ended, longer = number - 1, number + sum(1 for _ in pairs)
            counts = (ended, longer) if source is None else (longer, ended)
            raise UserError(
                f"{source_path} has {counts[0]} lines but {target_path} has {counts[1]}: "
                "line i of one must translate line i of the other"
            )
        yield source, target


def read_parallel(source_path: Path, target_path: Path) -> tuple[list[str], list[str]]:
    """The lines of two parallel files; see `stream_parallel`."""
    sources, targets = zip(*stream_parallel(source_path, target_path), strict=True)
    return list(sources), list(targets)


def stream_tsv(path: Path) -> Iterator[tuple[str, str]]:
    """The pairs of a file whose lines are a source, one tab, a target.

    Raises:
      UserError: see `stream_lines`; or a line has another number of tabs.
    """
    for number, line in enumerate(stream_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise UserError(
                f"{path}, line {number}: {len(columns) - 1} tabs; "
                "a line is a source, one tab, a target"
            )
        yield columns[0], columns[1]


def digest_file(path: Path) -> bytes:
    """SHA-256 of the file's bytes; of a gzipped file, of what was zipped.

    Raises:
      UserError: the file is missing or no whole gzip file.
    """
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


def find_files(folder: Path, names: str, ending: str, option: str) -> dict[str, Path]:
    """The files of a split.

    Args:
      folder: where they are.
      names: file names without their ending, or patterns of such ("news-*"), parted by commas.
      ending: what comes after the name: ".en". The file may also have ".gz" after that.
      option: what named the folder, for messages.

    Returns:
      {name without ending: file}; those that a pattern matches are sorted by name.

    Raises:
      UserError: a name or pattern stands for no file.
    """
    found: dict[str, Path] = {}
    for name in map(str.strip, names.split(",")):
        endings = (ending, f"{ending}.gz")
        matches = {
            str(path.relative_to(folder)).removesuffix(suffix): path
            for suffix in reversed(endings)  # A plain file goes before a gzipped one.
            for path in folder.glob(f"{name}{suffix}")
            if path.is_file()
        }
        if not matches:
            raise UserError(
                f"{option}={folder} has neither {name}{endings[0]} nor {name}{endings[1]}"
            )
        found |= dict(sorted(matches.items()))
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """The file to be read, unzipped if it is gzipped (`.gz`).

    Raises:
      UserError: it is missing, or, while it is read, turns out not to be readable.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _arriving(stream: io.BufferedIOBase, enough: int) -> Iterator[list[bytes]]:
    """The groups of `arriving_lines`, with their line ends."""
    chunks: list[bytes] = []
    while chunk := stream.read1(_CHUNK_BYTES):
        chunks.append(chunk)
        # A line can be long: the chunks are only joined when they are given away.
        if sum(map(len, chunks)) < enough and _is_waiting(stream):
            continue
        if any(b"\n" in chunk for chunk in chunks):
            text, _, rest = b"".join(chunks).rpartition(b"\n")
            yield [line + b"\n" for line in text.split(b"\n")]
            chunks = [rest]
    rest = b"".join(chunks)
    if rest:
        yield [line + b"\n" for line in rest.removesuffix(b"\n").split(b"\n")]


def _is_waiting(stream: io.BufferedIOBase) -> bool:
    """Whether there is more to read, now or in a moment."""
    # Windows can only wait for sockets: there a group is what comes in one piece.
    return os.name != "nt" and bool(select.select([stream], [], [], _PAUSE_SECONDS)[0])


def _decoded(lines: Iterable[bytes], name: str, first: int = 1) -> Iterator[str]:
    for number, line in enumerate(lines, first):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line:
                return
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: not UTF-8 (byte {error.start + 1} of the line is "
                f"{line[error.start]:#04x}); convert it to UTF-8"
            ) from error
        yield text.removesuffix("\n").removesuffix("\r")
