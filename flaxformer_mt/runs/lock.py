"""One process a run folder: two that train in the same one would destroy each other's work."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from flaxformer_mt.errors import UserError

_FILE = "lock"
# What a file system says that knows no locks, or whose server keeps none.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextlib.contextmanager
def locked(run_folder: str | Path, announce: Callable[[str], None] = print) -> Iterator[None]:
    """Keeps other processes from training in a run folder.

    The operating system ends the lock with the process, however that dies; only the file `lock`,
    which means nothing by itself, stays.

    Args:
      run_folder: made if missing.
      announce: is told if the file system knows no locks. Then there is none.

    Raises:
      UserError: another process holds the lock, or the folder cannot be written to.
    """
    run_folder = Path(run_folder)
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_folder / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
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
                f"process {owner} is training in {run_folder} already: wait for it, end it, or "
                "give another --workdir"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            announce(
                f"{run_folder} is on a file system without locks: see to it that only one process "
                "trains in it"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
