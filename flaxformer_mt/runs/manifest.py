"""Manifests, which detect damaged folders: the size and SHA-256 of every file.

Neither the file system nor Orbax detects a flipped bit. The manifest is written last, so a folder
without one is incomplete.
"""

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from flaxformer_mt import input_files
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import MANIFEST

_ORIGIN = "origin.json"
_Content = TypeVar("_Content")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a manifest records of a file."""

    bytes: input_files.Count
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Manifest:
    files: dict[str, Entry]


def entry_of(content: bytes) -> Entry:
    """Returns the entry of a file with this content."""
    return Entry(len(content), hashlib.sha256(content).hexdigest())


def write_manifest(folder: Path, known: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Writes `manifest.json`, after flushing all files and folders to disk.

    `known` are entries of files that another process has read and flushed.
    """
    files = dict(sorted({**entries(folder, known), **known}.items()))
    atomic.write_text(folder / MANIFEST, json.dumps({"files": files}, indent=1) + "\n")
    for path in filter(Path.is_dir, folder.rglob("*")):
        atomic.sync(path)


def entries(
    path: Path, but: Collection[str] = (), pattern: str = "**/*"
) -> dict[str, dict[str, Any]]:
    """Returns the entry of each file below a folder but manifests, or of one file, by name.

    The files are flushed to disk. Of a folder, `but` are names to leave out, and only files that
    the glob `pattern` matches are read.
    """
    folder, paths = (path, sorted(path.glob(pattern))) if path.is_dir() else (path.parent, [path])
    files = {
        name: each
        for each in paths
        if (name := each.relative_to(folder).as_posix()) not in but
        and each.is_file()
        and each.name != MANIFEST
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(_synced, files.values()), strict=True))


def listed(folder: Path) -> dict[str, Entry]:
    """Returns the entries of a folder's manifest; `UserError` or `OSError` if it cannot be read."""
    with input_files.open_regular(folder / MANIFEST) as file:
        return input_files.parse_json(file.read(), MANIFEST, _Manifest).files


def damage(
    folder: Path, kind: str = "checkpoint", names: Sequence[str] | None = None
) -> str | None:
    """Describes the first difference of a folder from its manifest; None if there is none.

    Files are hashed in parallel: in some 0.6 s per GB and core by a processor with instructions for
    SHA-256, in about three times as long by one without.

    Args:
      folder: the folder; files that are not listed are ignored.
      kind: what it is called in descriptions.
      names: files that must be listed, and are the only ones to verify; by default, all listed.

    Raises:
      UserError: a file cannot be opened for a reason that may pass, such as missing permission.
    """
    if not os.path.lexists(folder / MANIFEST):
        return f"{MANIFEST} is missing: the {kind} is incomplete, or the file was deleted"
    try:
        files = listed(folder)
    except OSError as error:
        _require_damage(error, folder / MANIFEST)
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except UserError as error:
        return str(error)
    for name in names or ():
        if name not in files:
            return f"{MANIFEST} is damaged: it does not list {name}"
    entries = {name: files[name] for name in (files if names is None else names)}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        causes = pool.map(lambda name: difference(folder / name, entries[name], name), entries)
        return next(filter(None, causes), None)


def made_once(
    folder: Path,
    origin: str,
    activity: str,
    make: Callable[[Path], None],
    load: Callable[[Path], _Content],
) -> _Content:
    """Makes a folder unless there is one of this origin that is not damaged, and loads it.

    Several processes can do so at the same time: one makes it, and the others wait.

    Args:
      folder: the folder; one of another origin is replaced.
      origin: identifies all that it depends on.
      activity: for the message of those that wait: "learning a vocabulary".
      make: writes its files to another folder, which takes its place.
      load: reads its files; a process that makes a folder of another origin waits for the end.

    Raises:
      UserError: the folder cannot be written, or `make` raises it.
    """

    def announce(owner: str) -> None:
        _log.warning("waiting for %s, which is %s in %s", owner, activity, folder.parent)

    atomic.make_folder(folder.parent)
    with atomic.locked(folder.with_name(f"{folder.name}.lock"), announce):
        damaged = damage(folder, "folder") if folder.exists() else None
        if damaged:
            _log.warning("%s: %s: it is made again", folder, damaged)
        file = folder / _ORIGIN
        if damaged or not file.is_file() or file.read_text(encoding="utf-8") != origin:
            with atomic.new_folder(folder, replace=True) as partial:
                make(partial)
                (partial / _ORIGIN).write_text(origin, encoding="utf-8")
                write_manifest(partial)
        return load(folder)


_PASSING = {errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that say nothing about the content of a file."""


def _require_damage(error: OSError, path: Path) -> None:
    if error.errno in _PASSING:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _synced(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return dataclasses.asdict(Entry(file.tell(), digest))


def difference(path: Path, entry: Entry, name: str) -> str | None:
    """Describes how a file, called `name`, differs from its entry; None if it does not."""
    if not os.path.lexists(path):
        return f"{name} is missing"
    try:
        with input_files.open_regular(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            length = file.tell()
    except OSError as error:
        _require_damage(error, path)
        return f"{name} cannot be read: {error.strerror}"
    except UserError as error:
        return f"{name}: {error}"
    if length != entry.bytes:
        verb = "is truncated: it has" if length < entry.bytes else "has grown: it has"
        return f"{name} {verb} {length:,} of {entry.bytes:,} bytes"
    return (
        None
        if found == entry.sha256
        else f"{name} differs from its manifest: it is corrupted or was changed"
    )
