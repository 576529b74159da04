"""Proof that a folder still is what was written: the size and SHA-256 of each of its files.

Neither the file system nor Orbax notices a flipped bit; a manifest does. It is written last, so a
folder without one was not finished.
"""

import concurrent.futures
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from flaxformer_mt.runs import atomic

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Writes `manifest.json`; all files are on the disk, not only on their way, on return."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        paths = _files(folder)
        entries = dict(
            zip((_name(folder, path) for path in paths), pool.map(_synced, paths), strict=True)
        )
    atomic.write_text(folder / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")
    for path in filter(Path.is_dir, folder.rglob("*")):
        atomic.sync_folder(path)


def damage(folder: Path) -> str | None:
    """What is wrong with a folder, in words; None if all its files are as they were written.

    Files that the manifest does not know are not looked at.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_bytes())["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was not finished, or the file was deleted"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
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
    """The entry of a file, which is on the disk from here on."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _difference(path: Path, name: str, size: int, digest: str) -> str | None:
    """How a file differs from its entry, in words; None if it does not."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            length = file.tell()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if length != size:
        verb = "is truncated: it has" if length < size else "has grown: it has"
        return f"{name} {verb} {length:,} of {size:,} bytes"
    return (
        None
        if found == digest
        else f"{name} differs from its manifest: a bit flipped, or it was changed"
    )
