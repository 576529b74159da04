"""Atomic writes: a file or folder appears under its name complete and durable, or not at all.

Content is written to `<name>.partial` beside the destination, flushed to disk and renamed; then the
parent folder is flushed, so that a power cut can neither lose the new name nor leave it on empty
files. A process that is killed leaves at most a `.partial` behind, which the next write replaces.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flaxformer_mt.errors import UserError

SUFFIX = ".partial"
"""Appended to the name of what is not complete yet."""


def partial_path(path: Path) -> Path:
    """Where the content of `path` is written before it is complete."""
    return path.with_name(path.name + SUFFIX)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Creates or replaces a file atomically.

    Yields:
      The path to write to. If the block raises, it is removed, and `path` is as it was.

    Raises:
      UserError: the folder does not exist, or the file cannot be written.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: {path.parent} is not a folder")
    partial = partial_path(path)
    with explained(path):
        try:
            yield partial
            sync_file(partial)
            rename(partial, path, replace=True)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path, *, replace: bool = False, parents: bool = False) -> Iterator[Path]:
    """Creates a folder atomically.

    Args:
      path: the folder.
      replace: whether a folder of that name is replaced; otherwise it must not exist.
      parents: whether missing parents are created; otherwise the parent must exist.

    Yields:
      An empty folder to fill. If the block raises, it is removed.

    Raises:
      UserError: `path` or its parent is not as required, or the folder cannot be written.
    """
    if not replace:
        require_absent(path)
    if not parents and not path.absolute().parent.is_dir():
        raise UserError(f"{path} cannot be written: {path.parent} is not a folder")
    partial = partial_path(path)
    with explained(path):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=parents)
            yield partial
            sync_tree(partial)
            rename(partial, path, replace=replace)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def require_absent(path: Path) -> None:
    """Checks that an output does not exist yet.

    Raises:
      UserError: it does.
    """
    if path.exists():
        raise UserError(f"{path} exists: remove it, or choose another folder for the output")


def write_text(path: Path, text: str) -> None:
    """Creates or replaces a UTF-8 text file; errors as in `new_file`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Creates or replaces a file; errors as in `new_file`."""
    with new_file(path) as partial:
        partial.write_bytes(content)


def append_text(path: Path, text: str) -> None:
    """Appends UTF-8 text to a file and flushes it to disk.

    Raises:
      UserError: the file cannot be written.
    """
    with explained(path), path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def rename(source: Path, target: Path, *, replace: bool = False) -> Path:
    """Renames a file or folder in its parent folder, and flushes the parent to disk.

    Args:
      source: the present name.
      target: the new name, in the same folder; returned.
      replace: whether a folder of that name is removed first. (A file is replaced atomically.)
    """
    if replace and target.is_dir():
        shutil.rmtree(target)
    source.replace(target)
    sync_folder(target.parent)
    return target


def sync_tree(folder: Path) -> None:
    """Flushes a folder with all its files and folders to disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
    sync_folder(folder)


def sync_file(path: Path) -> None:
    """Flushes the content of a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk: those created, changed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Reports errors of the operating system as errors of writing `path`.

    Raises:
      UserError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be written: {reason}") from error
