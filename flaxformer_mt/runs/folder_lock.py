"""Advisory locks on folders, which keep a folder in use from being removed.

The lock is on the folder itself, so that nothing is written into it, and a folder that may only be
read can be locked as well. The operating system releases it when the process ends, however it ends.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

# Errors of file systems that do not lock, or do not lock folders (NFS: EBADF).
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}


@contextlib.contextmanager
def held(folder: Path, *, exclusive: bool = False, wait: bool = True) -> Iterator[bool]:
    """Locks a folder while the block runs.

    Args:
      folder: the folder.
      exclusive: whether no other process may hold it at the same time; otherwise none may hold it
        exclusively.
      wait: whether to wait for the others.

    Yields:
      Whether the folder is there and no other process has it: always, as long as it is there, on a
      file system without locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        yield _lock(descriptor, kind if wait else kind | fcntl.LOCK_NB) and _is(descriptor, folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is(descriptor: int, folder: Path) -> bool:
    """Whether the folder still has its name, after waiting for the lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
