"""Line-by-line reading of text files, plain or compressed, without loading them into memory.

A text file has one sentence per line. Two files are parallel if line i of one translates line i of
the other.
"""

import codecs
import contextlib
import gzip
import hashlib
import importlib
import io
import itertools
import os
import select
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import open_regular

MAX_LINE_BYTES = 2**20
"""Limit of the length of a line, with its end: some 150,000 words."""

COMPRESSED = (".gz", ".zst")
"""Suffixes of the files that are decompressed while they are read."""

_Item = TypeVar("_Item")


class Source(NamedTuple):
    """Text as it is stored: before tags, held-out pairs and filters."""

    name: str
    """Origin of the text, for messages."""
    read: Callable[[], Iterable[tuple[str, ...]]]
    """Yields the texts of each pair. Only the last one is used for a language model."""
    digest: Callable[[], bytes] | None
    """Computes the SHA-256 of the underlying files; None = that of the pairs is used."""


_CHUNK_BYTES = 2**20
_PAUSE_SECONDS = 0.02
"""Lines that arrive on a pipe at shorter intervals are grouped: their writer does not wait for
answers."""

_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Names of open files, which are pipes if the shell substitutes a process: `<(zcat text)`."""


def stream_lines(path: Path) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 text file, which may be compressed (`.gz`, `.zst`).

    Lines end only with "\n" or "\r\n": other Unicode line separators, such as U+2028, are part of a
    sentence. A leading byte order mark is removed.

    Raises:
      UserError: the file is missing, empty, a damaged compressed file, not UTF-8, or has a line of
        more than `MAX_LINE_BYTES` (the message names the line). Errors are raised when the reader
        reaches them, after the lines before.
    """
    with opened(path) as file, _explained(str(path)):
        # One byte more than a line may have tells that it is longer.
        lines = _decoded(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), str(path))
        first = next(lines, None)
        if first is None:
            raise UserError(f"{path} is empty")
        yield first
        yield from lines


def read_lines(path: Path) -> list[str]:
    """Reads all lines of a file."""
    return list(stream_lines(path))


def arriving_lines(stream: io.BufferedIOBase, name: str, enough: int) -> Iterator[list[str]]:
    """Yields nonempty groups of lines as they arrive, without waiting for more input.

    Args:
      stream: UTF-8 text, possibly empty, with line ends as in `stream_lines`.
      name: origin of the text, for messages.
      enough: size of a group in bytes if input arrives without a pause.
    """
    number = 1
    groups = _arriving(stream, enough)
    while True:
        with _explained(name):
            lines = next(groups, None)
        if lines is None:
            return
        yield list(_decoded(lines, name, number))
        number += len(lines)


def count_lines(stream: io.BufferedIOBase, name: str) -> int:
    """Counts the remaining lines of a seekable stream, and restores its position."""
    count, last = 0, b"\n"
    with _explained(name):
        start = stream.tell()
        while chunk := stream.read1(_CHUNK_BYTES):
            count += chunk.count(b"\n")
            last = chunk[-1:]
        stream.seek(start)
    return count + (last != b"\n")


def counted(items: Iterable[_Item], activity: str) -> Iterator[_Item]:
    """Yields pairs, and counts them after the text `activity` on standard error, if a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed:,} pairs", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield from progress.track(items, description=activity)


def stream_parallel(*paths: Path) -> Iterator[tuple[Any, ...]]:
    """Yields the lines of a file with those of its translations, each of which is read once."""
    rows = itertools.zip_longest(*map(stream_lines, paths))
    for number, row in enumerate(rows, start=1):
        if None in row:
            counts = [number - (line is None) for line in row]
            for others in rows:
                counts = [n + (line is not None) for n, line in zip(counts, others, strict=True)]
            other = next(n for n, count in enumerate(counts) if count != counts[0])
            raise UserError(
                f"{paths[0]} has {counts[0]} lines but {paths[other]} has {counts[other]}: "
                "line i of one must translate line i of the other"
            )
        yield row


def of_files(
    files: Sequence[tuple[Path, ...]], read: Callable[..., Iterable[tuple[str, ...]]]
) -> Source:
    """Concatenates files, or groups of parallel files, each of which `read` reads."""
    names = [" and ".join(map(str, group)) for group in files]
    more = f", and {len(files) - 1} more" if len(files) > 1 else ""
    return Source(
        f"{names[0]}{more}",
        lambda: itertools.chain.from_iterable(itertools.starmap(read, files)),
        lambda: digest_files(itertools.chain.from_iterable(files)),
    )


def digest_files(paths: Iterable[Path], rule: bytes = b"") -> bytes:
    """Returns the SHA-256 of what decides how files are read, and of the files."""
    return hashlib.sha256(rule + b"".join(map(digest_file, paths))).digest()


def digest_file(path: Path) -> bytes:
    """Returns the SHA-256 of a file's content, decompressed if it is compressed."""
    with opened(path) as file, _explained(str(path)):
        return hashlib.file_digest(file, "sha256").digest()


def find_files(folder: Path, names: str, suffix: str, option: str) -> dict[str, Path]:
    """Finds the files of a split, {name without suffix: file}; those of a pattern are sorted.

    Args:
      folder: folder of the files.
      names: comma-separated file names or glob patterns ("news-*"), without suffix.
      suffix: such as ".en"; it may be followed by ".gz" or ".zst".
      option: the option that gave the folder, for messages.
    """
    found: dict[str, Path] = {}
    for name in map(str.strip, names.split(",")):
        suffixes = [suffix, *(f"{suffix}{end}" for end in COMPRESSED)]
        try:
            matches = {
                str(path.relative_to(folder)).removesuffix(end): path
                for end in reversed(suffixes)  # A plain file precedes a compressed one.
                for path in folder.glob(f"{name}{end}")
                if path.is_file()
            }
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{option}={folder}: {name!r} is no file name or pattern in this folder: {error}"
            ) from error
        if not matches:
            raise UserError(
                f"{option}={folder} has none of {', '.join(name + end for end in suffixes)}"
            )
        found |= dict(sorted(matches.items()))
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a file for reading, as a binary stream, decompressed if its name is of `COMPRESSED`.

    Folders and named pipes, whose writer may never come, raise `UserError`.
    """
    with contextlib.ExitStack() as stack:
        with _explained(str(path)):
            stream: Any = stack.enter_context(_open(path))
            if path.suffix == ".gz":
                stream = stack.enter_context(gzip.open(stream))
            elif path.suffix == ".zst":
                stream = stack.enter_context(_require_zstd(str(path)).open(stream))
        yield stream


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns errors of reading a file, which may be compressed, into `UserError`."""
    damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    is_zstd = name.endswith(".zst")
    if is_zstd:
        damages = (*damages, _require_zstd(name).ZstdError)
    try:
        yield
    except damages as error:
        kind = "Zstandard" if is_zstd else "gzip"
        raise UserError(f"{name}: damaged {kind} file ({error}); fetch it again") from error
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from error


def _open(path: Path) -> io.BufferedReader:
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if str(path).startswith(_DESCRIPTORS):
        return path.open("rb")
    try:
        return open_regular(path)
    except UserError as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _require_zstd(path: str) -> Any:
    """Imports the module of Zstandard: of Python from 3.14 on, of a package before."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{path} needs a package that is not installed: pip install 'flaxformer_mt[data]'"
        ) from error


def _arriving(stream: io.BufferedIOBase, enough: int) -> Iterator[list[bytes]]:
    chunks: list[bytes] = []
    while chunk := stream.read1(_CHUNK_BYTES):
        chunks.append(chunk)
        # Joined only once per group: a single line may span many chunks.
        size, has_lines = sum(map(len, chunks)), any(b"\n" in chunk for chunk in chunks)
        if size > MAX_LINE_BYTES and not has_lines:
            yield [b"".join(chunks)]  # Too long, which is an error.
            return
        if size < enough and _is_waiting(stream):
            continue
        if has_lines:
            text, _, rest = b"".join(chunks).rpartition(b"\n")
            yield [line + b"\n" for line in text.split(b"\n")]
            chunks = [rest]
    rest = b"".join(chunks)
    if rest:
        yield [line + b"\n" for line in rest.removesuffix(b"\n").split(b"\n")]


def _is_waiting(stream: io.BufferedIOBase) -> bool:
    # On Windows, `select` only works on sockets; there, each chunk is a group.
    return os.name != "nt" and bool(select.select([stream], [], [], _PAUSE_SECONDS)[0])


def _decoded(lines: Iterable[bytes], name: str, first: int = 1) -> Iterator[str]:
    for number, line in enumerate(lines, first):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line:
                return
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{name}, line {number}: longer than {MAX_LINE_BYTES:,} bytes; separate its "
                "sentences by line ends"
            )
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: not UTF-8 (byte {error.start + 1} of the line is "
                f"{line[error.start]:#04x}); convert it to UTF-8"
            ) from error
        yield text.removesuffix("\n").removesuffix("\r")
