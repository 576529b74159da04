"""Reads files that others wrote: what they claim is checked before memory is allocated for it.

Opening a named pipe would wait for its writer, and a device such as /dev/zero has no end: only
regular files are read. JSON may nest deeper than Python's stack, or have numbers too long to print.
A schema, a type with annotations that msgspec understands, says what a JSON file has to hold.
"""

import collections
import gzip
import io
import json
import os
import re
import stat
import sys
import typing
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.remote.reading import local

MAX_SETTINGS_BYTES = 2**24
"""Limit of the size of configurations, metadata and vocabularies in JSON."""
MAX_MODEL_BYTES = 2**28
"""Limit of the size of tokenizer models and of lexical tables, also after decompression."""
_MAX_EXPANSION, _SMALL = 100, 2**20
_MAX_DEPTH = 100

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""In schemas: an integer that is not negative."""
Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""In schemas: a number that is neither infinite nor NaN."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# Windows has no named pipes among its files, but a mode for text.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_GZIP_MAGIC = b"\x1f\x8b"
_POINTER = b"version https://git-lfs."


def first_present(folder: Path, names: Sequence[str]) -> Path:
    """Returns the first of some files that a folder has; `UserError` if it has none of them."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise UserError(f"{folder} has no {' and no '.join(names)}")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a regular file, or a link to one; `UserError`, without its name, for all others.

    A pointer that Git LFS puts in the place of a large file is refused, too. Of a URL it opens a
    local copy.
    """
    try:
        descriptor = os.open(local(path), _FLAGS)
    except FileNotFoundError as error:
        raise UserError("there is no such file") from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # A path from a file may contain a null character.
        raise UserError(f"cannot be read: {error}") from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise UserError(f"{_KINDS.get(kind, 'a special file')}, not a file")
    file = os.fdopen(descriptor, "rb")
    if file.read(len(_POINTER)) == _POINTER:
        file.close()
        raise UserError("a pointer of Git LFS, not the file itself: run git lfs pull in its folder")
    file.seek(0)
    return file


def require_regular_files(folder: str | os.PathLike[str]) -> None:
    """Raises `UserError` if a folder that a library will read holds a pipe or a device."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            kind = stat.S_IFMT(os.stat(path).st_mode) if os.path.exists(path) else stat.S_IFREG
            if kind != stat.S_IFREG:
                raise UserError(f"{path}: {_KINDS.get(kind, 'a special file')}, not a file")


def max_content(size: int) -> int:
    """Returns the limit of the bytes that a file of `size` bytes may stand for.

    A compressed or sparse file, and one that describes arrays or shares them, may ask for any
    amount of memory and time: all readers of files that others wrote have this one limit.
    """
    return _MAX_EXPANSION * size + _SMALL


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_SETTINGS_BYTES) -> bytes:
    """Reads a regular file of at most `limit` bytes; `UserError`, with its name, for all others."""
    try:
        with prefixed(f"{path}: "), open_regular(path) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > limit:
        raise UserError(f"{path} has more than {limit:,} bytes: it is not what it should be")
    return content


def read_text(path: str | os.PathLike[str], limit: int = MAX_SETTINGS_BYTES) -> str:
    """Reads a UTF-8 text file of at most `limit` bytes."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: byte {error.start + 1} is not UTF-8") from error


def read_json(path: str | os.PathLike[str], kind: Any = Any) -> Any:
    """Reads a JSON file of at most `MAX_SETTINGS_BYTES`; see `parse_json`."""
    return parse_json(read_bytes(path), str(path), kind)


def parse_json(content: bytes | str, name: str, kind: Any = Any) -> Any:
    """Parses a JSON value of a kind; see `checked`.

    `UserError` if it is not JSON, is not of this kind, nests too deep, has two values of one name,
    or a number or a string that Python cannot print. `name` is where it comes from, for messages.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        values = json.loads(text, object_pairs_hook=_unique)
        _check_depth(values)
        if "\\ud" in text.lower():  # Only an escape can result in a lone surrogate.
            json.dumps(values, ensure_ascii=False).encode()
    except UserError as error:
        raise UserError(f"{name} is damaged: {error}") from error
    except RecursionError as error:
        raise UserError(f"{name} is damaged: {_TOO_DEEP}") from error
    except ValueError as error:  # Includes errors of JSON and of UTF-8, and numbers too long.
        raise UserError(f"{name} is damaged: {_reason(error)}") from error
    return checked(values, f"{name} is", kind)


def checked(values: Any, subject: str, kind: Any) -> Any:
    """Returns JSON values as a kind: a dataclass, a list of strings, ...

    A `TypedDict` checks the members that it names, and keeps the others.

    Raises:
      UserError: the values are of another kind; it names `subject` ("FILE is") and the member.
    """
    try:
        found = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{subject} damaged: {_in_words(str(error))}") from error
    return values if typing.is_typeddict(kind) else found


def decompressed(content: bytes, limit: int) -> bytes:
    """Decompresses gzip data; other data are returned unchanged.

    Raises:
      ValueError: the data are damaged, or have more than `limit` bytes when decompressed.
    """
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        with gzip.open(io.BytesIO(content)) as file:
            result = file.read(limit + 1)
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"damaged gzip file: {error}") from error
    if len(result) > limit:
        raise ValueError(f"it has more than {limit:,} bytes when decompressed")
    return result


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise UserError(f"{counts.most_common(1)[0][0]!r} occurs twice")
    return values


_TOO_DEEP = "its JSON is nested too deeply"


def _check_depth(values: Any) -> None:
    level = [values] if isinstance(values, dict | list) else []
    for _ in range(_MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for each in inner for value in each if isinstance(value, dict | list)]
    if level:
        raise UserError(_TOO_DEEP)


_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false",
    "array": "a list", "object": "an object",
}  # fmt: skip


def _in_words(error: str) -> str:
    """Rewrites a message of msgspec, "Expected `int`, got `str` - at `$.files[...].bytes`"."""
    error = error.replace(" - at `key` in `$", " as a name - at `$")
    problem, _, location = error.partition(" - at `$")
    problem = re.sub(r"Object (?:missing|contains) (required|unknown) field", r"\1 field", problem)
    problem = problem.replace("required field", "there is no field")
    problem = problem.replace("Invalid enum value", "unknown value")
    problem = re.sub(r" [<>]= -?1\.79\S+", " that is finite", problem)
    kinds = re.compile("`([a-z]+(?: [|] [a-z]+)*)`(?=,|$| [<>]| of length| that is| matching)")
    problem = kinds.sub(
        lambda found: " or ".join(_WORDS.get(kind, kind) for kind in found[1].split(" | ")), problem
    )
    location = location.strip(".`")
    return f"{location + ': ' if location else ''}{problem[0].lower()}{problem[1:]}"


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeError):
        return "it has characters that are not valid Unicode"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    return "it has a number of too many digits"
