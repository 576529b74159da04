"""Line-by-line reading of text files, plain or compressed, without loading them into memory.

A text file has one sentence per line. Two files are parallel if line i of one translates line i of
the other.
"""

import bz2
import codecs
import contextlib
import functools
import gzip
import hashlib
import importlib
import io
import itertools
import logging
import lzma
import math
import os
import re
import select
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from flaxformer_mt.data.corpora.file_content import UNPACK, check_is_text, clean
from flaxformer_mt.data.corpora.rows import NOT_WANTED, Fault, Reading, decoded, located
from flaxformer_mt.errors import UserError, prefixed, requiring
from flaxformer_mt.input_files import open_regular

MAX_LINE_BYTES = 2**20
"""Limit of the length of a line, with its end: some 150,000 words."""

_COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "Zstandard",
    ".xz": "xz",
    ".bz2": "bzip2",
    ".zip": "ZIP",
}
COMPRESSED = tuple(_COMPRESSIONS)
"""Suffixes of the files that are decompressed while they are read, in any case."""

_Item = TypeVar("_Item")

_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Text as it is stored: before tags, held-out pairs and filters."""

    name: str
    """Origin of the text, for messages."""
    rows: Callable[[Reading], Iterable[tuple[str, ...] | None]]
    """Yields the texts of each pair, or None for a row that is malformed, which it adds, or that is
    not wanted. Only the last text is used for a language model."""
    digest: Callable[[], bytes] | None
    """Computes the SHA-256 of the underlying files; None = that of the pairs is used."""


_CHUNK_BYTES = 2**20
_BLOCK_BYTES = 2**16
_PAUSE_SECONDS = 0.02
"""Lines that arrive on a pipe at shorter intervals are grouped: their writer does not wait for
answers."""

_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Names of open files, which are pipes if the shell substitutes a process: `<(zcat text)`."""


def stream_lines(path: Path) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 text file, which may be compressed (`COMPRESSED`).

    Lines end only with "\n", "\r\n" or "\r\r\n": other Unicode line separators, such as
    U+2028, are part of a sentence, and "\r" becomes a space. Byte order marks before lines are
    removed.

    Raises:
      UserError: the file is missing, empty, a damaged compressed file, not UTF-8, or has a NUL or a
        line of more than `MAX_LINE_BYTES` (the message names the line). Errors are raised when the
        reader reaches them, after the lines before.
    """
    return _valid(lines_and_faults(path, remark=_log.warning), str(path))


def lines_and_faults(
    path: Path,
    is_wanted: Callable[[int, int], bool] = lambda first, last: True,
    remark: Callable[[str], object] = lambda text: None,
) -> Iterator[str | Fault]:
    """Yields lines like `stream_lines`, and what is wrong in place of those that are malformed.

    Lines of which none `is_wanted`, see `Reading`, may be replaced by `NOT_WANTED`. `remark` gets
    what else there is to say, once each.
    """
    number = 0
    told: set[str] = set()

    def cleaned(lines: Iterable[str | Fault], first: int) -> Iterator[str | Fault]:
        for index, line in enumerate(lines, first + 1):

            def tell(text: str, index: int = index) -> None:
                if text not in told:
                    told.add(text)
                    remark(f"{path}, line {index} {text}")

            yield line if isinstance(line, Fault) else clean(line, tell)

    with opened(path) as file, explained(str(path)):
        start = file.peek(_BLOCK_BYTES)
        if not start.removeprefix(codecs.BOM_UTF8):
            raise UserError(f"{path} is empty")
        check_is_text(start, path)
        if start.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        for block in blocks(file):
            if len(block) > MAX_LINE_BYTES:
                # With a line that is too long, which may go on after the block.
                rest = iter(functools.partial(file.readline, MAX_LINE_BYTES + 1), b"")
                yield from cleaned(_decoded(itertools.chain(io.BytesIO(block), rest)), number)
                return
            first, number = number, number + block.count(b"\n") + (not block.endswith(b"\n"))
            if not is_wanted(first, number):
                yield from itertools.repeat(NOT_WANTED, number - first)
                continue
            try:
                text = block.decode()
            except UnicodeDecodeError:
                yield from cleaned(_decoded(io.BytesIO(block)), first)
                continue
            lines = text.removesuffix("\n").split("\n")
            if "\r" in text or "\0" in text or "\ufeff" in text:
                yield from cleaned(lines, first)
            else:
                yield from lines


def blocks(file: Any) -> Iterator[bytes]:
    """Yields the content of a binary stream in blocks that end with lines.

    A block of more than `MAX_LINE_BYTES` ends with a line, or a part of one, that is too long.
    """
    while block := file.read(_BLOCK_BYTES):
        yield block if block.endswith(b"\n") else block + file.readline(MAX_LINE_BYTES + 1)


def read_lines(path: Path) -> list[str]:
    """Reads all lines of a file."""
    return list(stream_lines(path))


def arriving_lines(
    stream: io.BufferedIOBase, name: str, enough: int, max_wait: float = math.inf
) -> Iterator[list[str]]:
    """Yields nonempty groups of lines as they arrive, without waiting for more input.

    Args:
      stream: UTF-8 text, possibly empty, with line ends as in `stream_lines`.
      name: origin of the text, for messages.
      enough: size of a group in bytes if input arrives without a pause.
      max_wait: seconds from the first line of a group until it is yielded, at most.
    """
    number = 1
    groups = _arriving(stream, enough, max_wait)
    while True:
        with explained(name):
            lines = next(groups, None)
        if lines is None:
            return
        if number == 1:
            check_is_text(b"".join(lines)[:_BLOCK_BYTES], Path(name))
        texts = _decoded(filter(None, lines))
        # Every line gets an answer, also one with a NUL.
        cleaned = (t if isinstance(t, Fault) else clean(t.replace("\0", " ")) for t in texts)
        yield list(_valid(cleaned, name, number))
        number += len(lines)


def count_lines(stream: io.BufferedIOBase, name: str) -> int:
    """Counts the remaining lines of a seekable stream, and restores its position."""
    count, last = 0, b"\n"
    with explained(name):
        start = stream.tell()
        while chunk := stream.read1(_CHUNK_BYTES):
            count += chunk.count(b"\n")
            last = chunk[-1:]
        stream.seek(start)
    return count + (last != b"\n")


def counted(items: Iterable[_Item], activity: str, unit: str = "pairs") -> Iterator[_Item]:
    """Yields items, and counts them after the text `activity` on standard error, if a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn(f"{{task.description}}: {{task.completed:,}} {unit}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield from progress.track(items, description=activity)


def stream_parallel(*paths: Path, reading: Reading | None = None) -> Iterator[Any]:
    """Yields the lines of a file with those of its translations, each of which is read once.

    A malformed line is an error; with a `reading`, see there, None is yielded for it.
    """
    read: Callable[[Path], Iterator[str | Fault]] = stream_lines
    if reading is not None:
        before, is_wanted = reading.rows_before, reading.is_wanted
        read = functools.partial(
            lines_and_faults,
            is_wanted=lambda first, last: is_wanted(before + first, before + last),
            remark=reading.remark,
        )
    rows = itertools.zip_longest(*map(read, paths))
    for number, lines in enumerate(rows, start=1):
        if None in lines:
            if reading is not None:
                reading.check()  # What is no text may be why the lines do not match.
            counts = [number - (line is None) for line in lines]
            for others in rows:
                counts = [n + (line is not None) for n, line in zip(counts, others, strict=True)]
            other = next(n for n, count in enumerate(counts) if count != counts[0])
            raise UserError(
                f"{paths[0]} has {counts[0]} lines but {paths[other]} has {counts[other]}: "
                "line i of one must translate line i of the other"
            )
        if Fault not in map(type, lines):
            yield located(cast(tuple[str, ...], lines), paths[0], number)
            continue
        if reading is not None and NOT_WANTED not in lines:
            path, fault = next(
                each for each in zip(paths, lines, strict=True) if isinstance(each[1], Fault)
            )
            reading.add(path, number, cast(Fault, fault))
        yield None
    if reading is not None:
        reading.rows_before += number


def of_files(
    files: Sequence[tuple[Path, ...]], read: Callable[..., Iterable[tuple[str, ...] | None]]
) -> Source:
    """Concatenates files, or groups of parallel files; `read(*group, reading=)` reads each."""
    names = [" and ".join(map(str, group)) for group in files]
    more = f", and {len(files) - 1} more" if len(files) > 1 else ""

    def rows(reading: Reading) -> Iterator[tuple[str, ...] | None]:
        for group in files:
            yield from read(*group, reading=reading)
            reading.check()

    return Source(f"{names[0]}{more}", rows, lambda: digest_files(itertools.chain(*files)))


def digest_files(paths: Iterable[Path], rule: bytes = b"") -> bytes:
    """Returns the SHA-256 of what decides how files are read, and of the files."""
    return hashlib.sha256(rule + b"".join(map(digest_file, paths))).digest()


def digest_file(path: Path) -> bytes:
    """Returns the SHA-256 of a file's content, decompressed if it is compressed."""
    with opened(path) as file, explained(str(path)):
        return hashlib.file_digest(file, "sha256").digest()


def find_files(folder: Path, names: str, suffix: str, option: str) -> dict[str, Path]:
    """Finds the files of a split, {name without suffix: file}; those of a pattern are sorted.

    Args:
      folder: folder of the files.
      names: comma-separated file names or glob patterns ("news-*"), without suffix.
      suffix: such as ".en", in any case; it may be followed by one of `COMPRESSED`.
      option: the option that gave the folder, for messages.
    """
    found: dict[str, Path] = {}
    suffixes = [suffix, *(f"{suffix}{end}" for end in COMPRESSED)]
    for name in map(str.strip, names.split(",")):
        try:
            if any("**" in part and part != "**" for part in name.split("/")):
                raise ValueError("** stands for whole folders")  # Python 3.13 reads it as *.
            matches = {
                str(path.relative_to(folder))[: -len(end)]: path
                for end in reversed(suffixes)  # A plain file precedes a compressed one.
                for path in folder.glob(f"{name}{_in_any_case(end)}")
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


def _in_any_case(text: str) -> str:
    """Returns a glob pattern for a text in upper and lower case."""
    return re.sub("[A-Za-z]", lambda found: f"[{found[0].lower()}{found[0].upper()}]", text)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a file for reading, as a binary stream, decompressed if its name is of `COMPRESSED`.

    Folders and named pipes, whose writer may never come, raise `UserError`.
    """
    with contextlib.ExitStack() as stack:
        with explained(str(path)):
            stream: Any = stack.enter_context(_open(path))
            match path.suffix.lower():
                case ".gz":
                    stream = stack.enter_context(gzip.open(stream))
                case ".zst":
                    stream = stack.enter_context(_require_zstd(str(path)).open(stream))
                case ".xz":
                    stream = stack.enter_context(lzma.open(stream))
                case ".bz2":
                    stream = stack.enter_context(bz2.open(stream))
                case ".zip":
                    archive = stack.enter_context(zipfile.ZipFile(stream))
                    stream = stack.enter_context(archive.open(_member(archive, path)))
        yield stream


def content_name(path: Path) -> Path:
    """Returns the name of what `opened` reads: without the suffix of a compressed file."""
    suffix = path.suffix.lower()
    if suffix == ".zip":
        with explained(str(path)), _open(path) as stream, zipfile.ZipFile(stream) as archive:
            return Path(_member(archive, path))
    return path.with_suffix("") if suffix in COMPRESSED else path


def _member(archive: zipfile.ZipFile, path: Path) -> str:
    """Returns the name of the only file of an archive, besides hidden ones and `_about.txt`."""
    names = [
        name
        for name in archive.namelist()
        if not name.endswith("/") and not name.startswith("__MACOSX/")
        if not Path(name).name.startswith((".", "_"))
    ]
    if len(names) != 1:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        content = f"{len(names)} files ({listed})" if names else "no file"
        raise UserError(f"{path} has {content}, not one: {UNPACK}")
    return names[0]


_DAMAGES = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns errors of reading a file, which may be compressed, into `UserError`."""
    kind = _COMPRESSIONS.get(Path(name).suffix.lower())
    damages = [*_DAMAGES, *([_require_zstd(name).ZstdError] if kind == "Zstandard" else ())]
    try:
        yield
    except (*damages, OSError) as error:
        # Those of gzip and bzip2 have no number.
        if isinstance(error, OSError) and (error.errno or not kind):
            raise UserError(f"cannot read {name}: {error.strerror}") from error
        raise UserError(f"{name}: damaged {kind} file ({error}); fetch it again") from error
    except (RuntimeError, NotImplementedError) as error:
        if kind != "ZIP":
            raise
        raise UserError(f"{name} cannot be unpacked here ({error}): unpack it") from error


def _open(path: Path) -> io.BufferedReader:
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if str(path).startswith(_DESCRIPTORS):
        return path.open("rb")
    with prefixed(f"cannot read {path}: "):
        return open_regular(path)


def _require_zstd(path: str) -> Any:
    """Imports the module of Zstandard: of Python from 3.14 on, of a package before."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    with requiring(path, "'flaxformer_mt[data]'"):
        return importlib.import_module(name)


def _arriving(stream: io.BufferedIOBase, enough: int, max_wait: float) -> Iterator[list[bytes]]:
    # Joined only once per group: a single line may span many chunks.
    chunks: list[bytes] = []
    size, deadline = 0, math.inf
    has_lines = False
    while chunk := stream.read1(_CHUNK_BYTES):
        chunks.append(chunk)
        size += len(chunk)
        if not has_lines and b"\n" in chunk:
            has_lines, deadline = True, time.monotonic() + max_wait
        if not has_lines:
            if size > MAX_LINE_BYTES:
                yield [b"".join(chunks)]  # Too long, which is an error.
                return
        elif size >= enough or not _is_waiting(stream, deadline):
            text, _, rest = b"".join(chunks).rpartition(b"\n")
            yield [line + b"\n" for line in text.split(b"\n")]
            chunks, size, has_lines = [rest], len(rest), False
    rest = b"".join(chunks)
    if rest:
        yield [line + b"\n" for line in rest.removesuffix(b"\n").split(b"\n")]


def _is_waiting(stream: io.BufferedIOBase, deadline: float) -> bool:
    pause = min(_PAUSE_SECONDS, deadline - time.monotonic())
    # On Windows, `select` only works on sockets; there, each chunk is a group.
    return os.name != "nt" and pause > 0 and bool(select.select([stream], [], [], pause)[0])


def _valid(lines: Iterable[str | Fault], name: str, first: int = 1) -> Iterator[str]:
    for number, line in enumerate(lines, first):
        if isinstance(line, Fault):
            raise UserError(f"{name}, line {number}: {line}")
        yield line


def _decoded(lines: Iterable[bytes]) -> Iterator[str | Fault]:
    remaining = iter(lines)
    for line in remaining:
        if len(line) > MAX_LINE_BYTES:
            yield Fault(
                f"longer than {MAX_LINE_BYTES:,} bytes",
                advice="separate its sentences by line ends",
            )
            while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = next(remaining, b"")
            continue
        text = decoded(line, "line")
        yield text if isinstance(text, Fault) else text.removesuffix("\n")
