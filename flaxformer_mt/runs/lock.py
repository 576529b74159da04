"""A lock that keeps two processes from training in the same run folder."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import LOCK


@contextlib.contextmanager
def locked(run_folder: str | Path, announce: Callable[[str], None] = print) -> Iterator[None]:
    """Locks a run folder against other processes that train.

    The operating system releases the lock when the process ends, however it ends. The file `lock`
    remains; it has no meaning by itself.

    Args:
      run_folder: created if missing.
      announce: called with a warning if the file system does not support locks; the folder is then
        not locked.

    Raises:
      UserError: another process holds the lock, or the folder cannot be written to.
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
