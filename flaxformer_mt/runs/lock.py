"""Locks: one process trains in a run folder, and what a process reads is not removed.

The operating system releases a lock when its process ends, however it ends.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import LOCK


@contextlib.contextmanager
def locked(run_folder: str | Path, announce: Callable[[str], None] = print) -> Iterator[None]:
    """Locks a run folder, created if missing, against other processes that train.

    `UserError` if one does. On a file system without locks, `announce` is called with a warning.
    """
    run_folder = Path(run_folder)

    def refuse(owner: str) -> NoReturn:
        raise UserError(
            f"{owner} is training in {run_folder} already: wait for it, stop it, or "
            "give another --workdir"
        )

    with contextlib.ExitStack() as stack:
        try:
            run_folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"{run_folder} is not a folder: give another --workdir") from error
        except OSError as error:
            raise UserError(
                f"{run_folder} cannot be written to: {error.strerror}; give another --workdir"
            ) from error
        with atomic.explained(run_folder / LOCK):
            is_supported = stack.enter_context(atomic.locked(run_folder / LOCK, refuse))
        if not is_supported:
            announce(
                f"{run_folder} is on a file system without locks: make sure that only one process "
                "trains in it"
            )
        yield


@contextlib.contextmanager
def held(folder: Path, *, exclusive: bool = False, wait: bool = True) -> Iterator[bool]:
    """Locks a folder, which keeps it from being removed while the block runs.

    The lock is on the folder itself, so that a folder that may only be read can be locked as well.

    Several processes may hold it, but only one if `exclusive`. Yields whether the folder exists
    and, unless this waits for them, no other process holds it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        try:
            atomic.lock(descriptor, wait, shared=not exclusive)
            # It may have lost its name while this process waited.
            is_held = os.path.samestat(os.fstat(descriptor), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)
