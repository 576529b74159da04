"""Errors of Orbax and TensorStore as `UserError`."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.runs import step_folders


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
