"""Atomic writes: a file or folder appears under its name complete and durable, or not at all.

Content is written in a workspace, flushed to disk and renamed to its destination; then the parent
folder is flushed, so that a power cut can neither lose the new name nor leave it on empty files.

A workspace is a private folder beside the destination. Its name is unpredictable, and it holds a
marker file that its process keeps locked. The workspace of a process that was killed is deleted by
the next write to the same folder: only if it has the marker, and no process holds the lock. Nothing
else is deleted, and no file is opened through a symbolic link.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.urls import require_local

MARKER = ".flaxformer_mt"
"""Name of the file that marks a workspace."""

_PREFIX, _SUFFIX = ".flaxformer_mt-", ".partial"
_MARK = (
    b"Temporary files of flaxformer_mt. The next write to the parent folder deletes leftovers.\n"
)
_REPLACED = MARKER + "-replaced"
_OWNER = re.compile(rb"(\d+ on [\w.-]+)?\n?")
# Errors of file systems that do not lock, or do not lock folders (NFS: EBADF). The descriptor is
# open, so a refusal (EACCES, EPERM) is of locks as such.
_NO_LOCKS = {
    errno.EACCES, errno.EBADF, errno.EINVAL, errno.EIO, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP,
    errno.EOPNOTSUPP, errno.EPERM,
}  # fmt: skip
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and the flag of renameat2(2).


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Creates or replaces a file atomically: yields the path to write to.

    Missing parent folders are created. A symbolic link is replaced; its target stays as it is. A
    device, a pipe or an open descriptor (`/dev/null`, `/dev/stdout`) is written to directly. If the
    block raises, `path` is unchanged.

    Raises:
      UserError: the file cannot be written.
    """
    if _is_stream(path):
        with explained(path):
            yield path
        return
    if os.path.isdir(path) and not path.is_symlink():
        raise UserError(f"{path} cannot be written: it is a folder")
    with explained(path), _parent_of(path) as parent, workspace(parent) as folder:
        partial = folder / path.name
        yield partial
        sync(partial)
        rename(partial, path)


@contextlib.contextmanager
def new_folder(path: Path, *, replace: bool | Callable[[Path], None] = False) -> Iterator[Path]:
    """Creates a folder atomically: yields an empty one to fill; if the block raises, there is none.

    Missing parent folders are created. A function as `replace` raises `UserError` unless what is at
    `path` may be deleted. It is called before the block, and again when the new folder is complete.

    Raises:
      UserError: the folder exists and is not to be replaced, or cannot be written.
    """
    with staged_folder(path, replace=replace) as partial:
        partial.mkdir()
        yield partial


@contextlib.contextmanager
def staged_folder(path: Path, *, replace: bool | Callable[[Path], None] = False) -> Iterator[Path]:
    """Does what `new_folder` does, but the block itself creates the folder at the yielded path."""
    check = replace if callable(replace) else require_absent
    if replace is not True:
        check(path)
    with explained(path), _parent_of(path) as parent, workspace(parent) as folder:
        partial = folder / path.name
        yield partial
        sync_tree(partial)
        if replace is not True:  # Others may have written there in the meantime.
            check(path)
        (put if replace else rename)(partial, path)


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents durably, unless they exist."""
    if folder.is_dir():
        return
    require_local(folder)
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    sync(folder.parent)


@contextlib.contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """Yields a private temporary folder, which is deleted at the end with its content.

    It lies in `parent`, so that its content can be renamed to there. Workspaces that processes left
    behind when they were killed are deleted first.
    """
    remove_leftovers(parent)
    folder, descriptor = _new_workspace(parent)
    try:
        yield folder
    finally:
        _delete_workspace(folder, descriptor)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a workspace in the system's folder for temporary files (TMPDIR).

    What cannot be deleted yet, such as files on NFS that are mapped, is deleted by a later call.
    """
    parent = Path(tempfile.gettempdir())
    remove_leftovers(parent)
    folder, descriptor = _new_workspace(parent)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            _delete_workspace(folder, descriptor)


def _new_workspace(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        # Until the marker is locked, another process may take the folder for a leftover.
        with (
            contextlib.suppress(FileNotFoundError, BlockingIOError),
            contextlib.ExitStack() as undo,
        ):
            undo.callback(delete, folder)
            descriptor = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            undo.callback(os.close, descriptor)
            lock(descriptor)
            os.write(descriptor, _MARK)
            os.fsync(descriptor)  # After a loss of power it is found with all content, or without.
            if os.path.samestat(os.stat(folder / MARKER), os.fstat(descriptor)):
                undo.pop_all()
                return folder, descriptor


def is_workspace_name(name: str) -> bool:
    """Returns whether a folder has the name of a workspace."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def remove_leftovers(parent: Path) -> None:
    """Deletes the workspaces in a folder whose processes have ended."""
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        # Others may be alive, have ended just now, or be foreign.
        with contextlib.suppress(OSError):
            if not folder.is_symlink():
                _remove_leftover(folder)


def _remove_leftover(folder: Path) -> None:
    if not os.listdir(folder):  # A process was killed before or after there was a marker.
        folder.rmdir()
        return
    with contextlib.ExitStack() as stack:
        descriptor = open_own(folder / MARKER, os.O_RDWR)
        stack.callback(os.close, descriptor)
        mark = os.pread(descriptor, len(_MARK) + 1, 0)
        # Its process may have been killed before it had written the mark, and nothing else.
        is_begun = _MARK.startswith(mark) and os.listdir(folder) == [MARKER]
        is_workspace = mark == _MARK or is_begun
        if is_workspace and lock(descriptor):
            stack.pop_all()
            _delete_workspace(folder, descriptor)


def require_absent(path: Path) -> None:
    """Raises `UserError` if an output exists already.

    The process that wrote it may have been killed before it had deleted its workspace.
    """
    if os.path.lexists(path):
        remove_leftovers(path.parent)
        raise UserError(f"{path} exists: remove it, or choose another folder for the output")


def require_utf8(folder: Path) -> None:
    """Raises `UserError` for a name that is not UTF-8, to which Orbax cannot write."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{str(folder)!a} is not UTF-8: give a folder with another name, or set a UTF-8 locale"
        ) from error


def require_writable(folder: Path) -> None:
    """Raises `UserError` unless a folder can be written to or created; writes nothing."""
    require_local(folder)
    with explained(folder):
        folder = folder.absolute()
        for existing in (folder, *folder.parents):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                existing.lstat()
                break
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a folder")
        try:
            os.close(os.open(existing, os.O_TMPFILE | os.O_RDWR))  # A file without a name.
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            # Not all file systems have such files; /proc and the like have no space for any.
            if not (os.access(existing, os.W_OK | os.X_OK) and os.statvfs(existing).f_blocks):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error


def write_text(path: Path, text: str) -> None:
    """Creates or replaces a UTF-8 text file; errors as in `new_file`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Creates or replaces a file; errors as in `new_file`."""
    with new_file(path) as partial:
        partial.write_bytes(content)


def append_text(path: Path, text: str) -> None:
    """Appends UTF-8 text to a file and flushes it to disk, all of it or nothing."""
    with explained(path), os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b", 0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            # Unbuffered, so that closing the file does not write again.
            remaining = memoryview(text.encode())
            while remaining:
                remaining = remaining[file.write(remaining) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[bool]:
    """Holds a lock against other processes; yields False if the file system has no locks.

    The lock file is created if missing, and remains. It names the process, unless it holds other
    text. `busy` is called with the process that holds the lock ("process 3 on host"), before
    waiting for it, and may raise instead.
    """
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            is_supported = lock(descriptor)
        except BlockingIOError:
            owner = _OWNER.fullmatch(os.pread(descriptor, 100, 0))
            busy(f"process {owner[1].decode()}" if owner and owner[1] else "another process")
            is_supported = lock(descriptor, wait=True)
        if _OWNER.fullmatch(os.pread(descriptor, 100, 0)):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield is_supported
    finally:
        os.close(descriptor)


def lock(descriptor: int, wait: bool = False, shared: bool = False) -> bool:
    """Locks an open file until it is closed; returns False if the file system has no locks.

    Raises:
      BlockingIOError: another process has locked it, and `wait` is False.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def open_own(path: Path, flags: int) -> int:
    """Opens a regular file of the program itself; OSError if it is a link or something else."""
    # Opening a pipe waits for its other end.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def rename(source: Path, target: Path) -> Path:
    """Renames a file or folder and flushes the new parent folder to disk; returns `target`."""
    source.replace(target)
    sync(target.parent)
    return target


def put(partial: Path, path: Path) -> None:
    """Gives a complete folder of a workspace its name, durably, at which there may be another.

    The other is deleted with the workspace. Where the file system can exchange two names, one of
    the two has the name at any moment. Elsewhere neither has it for a moment; if the process is
    killed then, the next write to the parent folder, or `remove_leftovers`, completes this.

    Args:
      partial: the folder, with the name that it will have.
      path: its name, in the parent folder of the workspace.
    """
    if os.path.lexists(path):
        if _exchange(partial, path):
            sync(path.parent)
            return
        path.rename(partial.with_name(_REPLACED))
    rename(partial, path)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names; returns False if the system or the file system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        return False
    return exchange(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _RENAME_EXCHANGE) == 0


def delete(path: Path) -> None:
    """Deletes a file, a folder, or a symbolic link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Flushes a folder with all its files and folders to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Flushes the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Converts errors of the operating system into a `UserError` about writing `path`."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            reason = "it is a symbolic link; remove it"
        else:
            reason = error.strerror or first_line(error)
        raise UserError(f"{path} cannot be written: {reason}") from error


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:  # It does not exist, or cannot be written to anyway.
        return False
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return True
    # A redirected standard output is a regular file behind the link /dev/stdout.
    links = [path, *([path.parent / path.readlink()] if path.is_symlink() else [])]
    return any(link.parent.resolve().match("/proc/*/fd") for link in links)


@contextlib.contextmanager
def _parent_of(path: Path) -> Iterator[Path]:
    """Yields the parent folder; if the block raises, the folders that were created are removed."""
    parent = path.absolute().parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        try:
            make_folder(parent)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"{path} cannot be written: {path.parent} is not a folder") from error
        yield parent
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # Others have put something into it.
                folder.rmdir()
        raise


def _delete_workspace(folder: Path, descriptor: int) -> None:
    """Deletes a workspace, its marker last, so that an interrupted deletion can be repeated."""
    try:
        names = set(os.listdir(folder)) - {MARKER}
        if _REPLACED in names:
            for name in names - {_REPLACED}:
                if not os.path.lexists(folder.parent / name):
                    rename(folder / name, folder.parent / name)
                    names.remove(name)
        # What was replaced goes last: it tells that the rest is complete.
        for name in sorted(names, key=lambda name: name == _REPLACED):
            delete(folder / name)
    finally:
        os.close(descriptor)
    # Now that the lock is released, another process may do the same.
    with contextlib.suppress(FileNotFoundError):
        (folder / MARKER).unlink()
        folder.rmdir()
