"""Errors of Orbax and TensorStore as `UserError`, and what is checked before they read or write."""

import contextlib
import errno
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.input_files import max_content
from flaxformer_mt.runs import state_items, step_folders
from flaxformer_mt.runs.state_items import Shapes


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of Orbax into `UserError`: a manifest may fit files that are not its own."""
    try:
        yield
    except (UserError, jax.errors.JaxRuntimeError):  # The latter: there is not enough memory.
        raise
    except Exception as error:
        reason = _system_error(error)
        if reason:
            raise UserError(f"{path} cannot be read: {reason}") from error
        raise UserError(
            f"{path} is damaged, or not a checkpoint ({first_line(error)}); "
            f"{step_folders.advice(path)}"
        ) from error


def check_size(folder: Path, shapes: Shapes) -> None:
    """Checks that the files of an item may hold arrays of these shapes."""
    there = sum(file.stat().st_size for file in folder.rglob("*"))
    if 4 * sum(map(math.prod, shapes.values())) > max_content(there):
        raise UserError("damaged: its arrays are far larger than its files")


def check_chunks(path: Path, stored: Any) -> None:
    """Checks that no array is read in chunks that are larger than itself."""
    for name, leaf in state_items.named(stored):
        chunk = leaf.storage.chunk_shape if leaf.storage else leaf.shape
        if any(ours > max(size, 1) for ours, size in zip(chunk, leaf.shape, strict=True)):
            raise UserError(
                f"{path}: damaged: {name} is an array {list(leaf.shape)} in chunks {list(chunk)}"
            )


@contextlib.contextmanager
def explained(problem: str, consequence: str = "") -> Iterator[None]:
    """Turns errors of the operating system into `UserError`, also those of TensorStore."""
    try:
        yield
    except Exception as error:
        reason = _system_error(error)
        if reason is None:
            raise
        raise UserError(f"{problem} {reason}{consequence}") from error


def require_writable_name(folder: Path) -> None:
    """Orbax reads some names as patterns, and cannot write to such a folder."""
    atomic.require_utf8(folder)
    for name in folder.absolute().parts:
        if re.search(r"\[.*\]|\\", name):
            raise UserError(
                f"checkpoints cannot be written below {name!r}: use a name without brackets and "
                "backslashes"
            )


def _system_error(error: BaseException | None) -> str | None:
    """Returns "No space left on device" or the like; None for errors of other kinds."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        # TensorStore, which writes for Orbax, has its own exceptions.
        number = re.search(r"os_error_code='(\d+)'", str(error))
        if number:
            return os.strerror(int(number[1]))
        if isinstance(error, MemoryError) or "can't start new thread" in str(error):
            return os.strerror(errno.ENOMEM)
        error = error.__cause__ or error.__context__
    return None
