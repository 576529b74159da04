"""A lock that keeps two processes from training in the same run folder."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.layout import LOCK

# Errors of file systems that do not support locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


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
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"{run_folder} cannot be written to: {error.strerror}; give another --workdir"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 100, 0).decode().strip()
            raise UserError(
                f"process {owner} is training in {run_folder} already: wait for it, stop it, or "
                "give another --workdir"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            announce(
                f"{run_folder} is on a file system without locks: make sure that only one process "
                "trains in it"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
