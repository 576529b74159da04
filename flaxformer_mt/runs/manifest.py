"""Manifests, which detect damaged folders: the size and SHA-256 of every file.

Neither the file system nor Orbax detects a flipped bit. The manifest is written last, so a folder
without one is incomplete.
"""

import concurrent.futures
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from flaxformer_mt import input_files
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import MANIFEST


def write_manifest(folder: Path) -> None:
    """Writes `manifest.json`, after flushing all files and folders to disk."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        paths = _files(folder)
        entries = dict(
            zip((_name(folder, path) for path in paths), pool.map(_synced, paths), strict=True)
        )
    atomic.write_text(folder / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")
    for path in filter(Path.is_dir, folder.rglob("*")):
        atomic.sync_folder(path)


def damage(folder: Path, kind: str = "checkpoint") -> str | None:
    """Verifies a folder against its manifest; files not listed there are ignored.

    Files are hashed in parallel: in some 0.6 s per GB and core by a processor with instructions for
    SHA-256, in about three times as long by one without.

    Args:
      folder: the folder.
      kind: what it is called in descriptions.

    Returns:
      A description of the first difference, or None if there is none.
    """
    if not os.path.lexists(folder / MANIFEST):
        return f"{MANIFEST} is missing: the {kind} is incomplete, or the file was deleted"
    try:
        with input_files.open_regular(folder / MANIFEST) as file:
            entries = input_files.parse_json(file.read(), MANIFEST)["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (UserError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        names = list(expected)
        causes = pool.map(lambda name: _difference(folder / name, name, *expected[name]), names)
        return next(filter(None, causes), None)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _synced(path: Path) -> dict[str, Any]:
    """Flushes a file to disk and returns its entry."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _difference(path: Path, name: str, size: int, digest: str) -> str | None:
    """Describes how a file differs from its entry; None if it does not."""
    if not os.path.lexists(path):
        return f"{name} is missing"
    try:
        with input_files.open_regular(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            length = file.tell()
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except UserError as error:
        return f"{name}: {error}"
    if length != size:
        verb = "is truncated: it has" if length < size else "has grown: it has"
        return f"{name} {verb} {length:,} of {size:,} bytes"
    return (
        None
        if found == digest
        else f"{name} differs from its manifest: it is corrupted or was changed"
    )
