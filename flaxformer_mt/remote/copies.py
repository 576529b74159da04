"""Local copies of remote files and folders, private to a process, and what it changes published.

Each version of a remote file is downloaded once and kept in the user's cache folder. Files of
checkpoints and of the token store, which never change, are links to there.
"""

import atexit
import contextlib
import hashlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flaxformer_mt import runtime
from flaxformer_mt.errors import UserError
from flaxformer_mt.remote.stores import Store, url_of
from flaxformer_mt.runs import atomic, layout

LEASE = "lease.json"
"""Name of the file that a process keeps in a run folder while it trains there."""
_LINKED = (f"{layout.CHECKPOINTS}/", f"{layout.CACHE}/")
_THREADS = 8
_TRIES = 5
_SHOWN_BYTES = 2**26

_State = tuple[int, int, int]


class Copy:
    """A local copy of a remote file or folder."""

    def __init__(self, store: Store, local: Path) -> None:
        self.store = store
        self.local = local
        self._published: dict[str, _State | None] = {}
        """The state of each file, by its relative name, when it equalled the remote one; None of
        files that are left of an upload that was killed, and were not downloaded."""

    def download(self) -> None:
        """Fills the copy with what is remote, but for checkpoints that are not complete.

        Raises:
          UserError: the store cannot be used, or the disk is full.
        """
        for _ in range(_TRIES):
            if self._download(self.store.list()):
                return
        raise UserError(f"{self.store.url} changes all the time: try again, or copy it")

    def _download(self, files: dict[str, tuple[str, int]]) -> bool:
        """Returns False if a file has been removed in the meantime."""
        files.pop(LEASE, None)
        complete = {name for name in files if _is_complete(name, files)}
        self._published = dict.fromkeys(files.keys() - complete)
        kept = runtime.cache_root() / "remote" / "objects" / _digest(self.store.url)
        objects = {name: kept / _digest(f"{name}\n{files[name]}") for name in complete}
        missing = [name for name in complete if not objects[name].exists()]

        def fetch(name: str) -> bool:
            with atomic.new_file(objects[name]) as partial:
                return self.store.get(name, partial) or bool(partial.write_bytes(b""))

        with (
            _progress(f"Reading {self.store.url}", sum(files[name][1] for name in missing)) as tell,
            ThreadPoolExecutor(_THREADS) as threads,
        ):
            for name, is_there in zip(missing, threads.map(fetch, missing), strict=True):
                if not is_there:
                    objects[name].unlink()
                    return False
                tell(files[name][1])
        for name, source in objects.items():
            target = self._path(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if name.startswith(_LINKED):
                os.link(source, target)
            else:
                shutil.copyfile(source, target)
            self._published[name] = _state(target)
        if kept.is_dir():
            for old in {*kept.iterdir()}.difference(objects.values()):
                if not old.name.startswith("."):
                    old.unlink(missing_ok=True)
        return True

    def forget_unfinished(self) -> None:
        """Removes what the first upload of a run that was killed has left, but for its tokens."""
        if (self.local / layout.CONFIG).exists():
            return
        for path in [*self.local.glob("*")]:
            if path.name != layout.CACHE:
                atomic.delete(path)

    def upload(self) -> None:
        """Publishes the files that have changed, and removes those that are gone.

        A checkpoint, and a run, is published once the file that completes it is there: it is
        written last, and removed first. After a kill, what is remote is thus complete, though it
        may be older.

        Raises:
          UserError: the store cannot be used.
        """
        local = dict(self._files())
        changed = {name for name, state in local.items() if state != self._published.get(name)}
        for name in sorted(self._published.keys() - local.keys(), key=_rank, reverse=True):
            self.store.remove(name)
            del self._published[name]
        for name in changed & self._published.keys():
            if name.endswith(layout.MANIFEST):
                self.store.remove(name)
        with ThreadPoolExecutor(_THREADS) as threads:
            for names in self._in_order(changed):
                put = threads.map(lambda name: self.store.put(name, self._path(name)), names)
                for name, is_there in zip(names, put, strict=True):
                    if is_there:
                        self._published[name] = local[name]

    def _in_order(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yields groups of files, each of which is uploaded after those before."""
        # The configuration marks a new run; that of a continued one holds for what follows.
        first = {layout.CONFIG} & self._published.keys()

        def place(name: str) -> tuple[bool, int]:
            return name not in first, _rank(name)

        for _, group in itertools.groupby(sorted(names, key=place), place):
            yield [*group]

    def _files(self) -> Iterator[tuple[str, _State]]:
        if self.local.is_file():
            yield "", _state(self.local)
        for parent, folders, names in os.walk(self.local):
            folders[:] = [name for name in folders if not atomic.is_workspace_name(name)]
            for name in names:
                path = Path(parent, name)
                relative = path.relative_to(self.local).as_posix()
                if relative != LEASE and not name.endswith(layout.LOCK) and path.is_file():
                    with contextlib.suppress(FileNotFoundError):  # It was removed just now.
                        yield relative, _state(path)

    def _path(self, name: str) -> Path:
        return self.local / name if name else self.local


def _is_complete(name: str, files: dict[str, tuple[str, int]]) -> bool:
    folder = _step_folder(name)
    return not folder or f"{folder}/{layout.MANIFEST}" in files


def _step_folder(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == layout.CHECKPOINTS and len(parts) > 2 else ""


def _rank(name: str) -> int:
    """Returns the place of a file in the order of uploads; see `Copy.upload`."""
    order = (layout.MANIFEST, layout.DATA, layout.CONFIG)
    base = name.rpartition("/")[2] if _step_folder(name) else name
    return order.index(base) + 1 if base in order else 0


def _state(path: Path) -> _State:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


_copies: dict[str, Copy] = {}
_urls: dict[str, str] = {}
"""Those of all copies, by their local paths."""
_open = contextlib.ExitStack()


def local(path: str | os.PathLike[str], as_it_is_now: bool = False) -> Path:
    """Returns a local path as it is, and for a remote one that of a copy.

    A copy is made once in a process, or each time if it has to be `as_it_is_now`, and deleted when
    the process ends. If there is nothing remote, there is nothing at the path that is returned, and
    `publish` uploads what is written to it.

    Raises:
      UserError: the store cannot be used.
    """
    url = url_of(path)
    if url is None:
        return Path(path)
    if as_it_is_now or url not in _copies:
        copy = _open.enter_context(new_copy(url))
        copy.download()
        if copy.store.is_read_only and not copy.local.exists():
            raise UserError(f"there is no {url}, and nothing can be written there")
        _copies[url] = copy
        atexit.register(_open.close)
    return _copies[url].local


def local_list(paths: str) -> str:
    """Returns the value of an option, one path or several with commas between, as `local` does."""
    return ",".join(str(local(path)) if url_of(path) else path for path in paths.split(","))


def publish() -> None:
    """Uploads what has changed in all copies that `local` has made.

    Raises:
      UserError: a store cannot be used; the message says where the files are.
    """
    for copy in _copies.values():
        upload_or_keep(copy)


def upload_or_keep(copy: Copy) -> None:
    """Uploads a copy; if that fails, what is local is kept, and the message says where."""
    try:
        copy.upload()
    except UserError as error:
        kept = copy.local.parent.with_name(f"kept-{copy.local.parent.name.strip('.')}")
        kept.mkdir(exist_ok=True)
        copy.local.rename(kept / copy.local.name)
        raise UserError(f"{error}; what could not be uploaded is in {kept}") from error


@contextlib.contextmanager
def new_copy(url: str) -> Iterator[Copy]:
    """Yields an empty copy, which is deleted at the end."""
    store = Store(url)
    folder = runtime.cache_root() / "remote" / "copies"
    atomic.make_folder(folder)
    with atomic.workspace(folder) as parent:
        copy = Copy(store, parent / (store.url.rpartition("/")[2] or "root"))
        _urls[str(copy.local)] = store.url
        yield copy


def with_urls(text: str) -> str:
    """Returns a message with the remote paths in place of those of their copies."""
    for name, url in _urls.items():
        text = text.replace(name, url)
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], object]]:
    if total < _SHOWN_BYTES or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
