"""Local copies of remote files and folders; reading writes and removes nothing in a store.

Each version of an object is downloaded once to the user's private cache. A process reads links to
such files, which no other process removes.
"""

import atexit
import contextlib
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flaxformer_mt import atomic, run_layout, runtime
from flaxformer_mt.errors import UserError, show_as
from flaxformer_mt.remote.index import complete_steps, newest, step_of
from flaxformer_mt.remote.stores import Object, Store
from flaxformer_mt.standard_output import progress_bar
from flaxformer_mt.urls import url_of

THREADS = 8
_TRIES = 3
_views: dict[str, Path] = {}
"""The local copies of this process, by URL."""
_open = contextlib.ExitStack()
atexit.register(_open.close)


def local(path: str | os.PathLike[str], as_it_is_now: bool = False) -> Path:
    """Returns a local path as it is, and for a URL that of a copy, which is not to be changed.

    A copy is made once in a process, or each time if it has to be `as_it_is_now`. Messages name
    the URL. Checkpoints without a manifest are left out.

    Raises:
      UserError: there is nothing at the URL, the store cannot be used, an object is damaged, or
        the cache cannot be written.
    """
    url = url_of(path)
    if url is None:
        return Path(path)
    if as_it_is_now or url not in _views:
        store = Store(url)
        parent = _open.enter_context(atomic.workspace(_folder("views")))
        view = parent / (store.url.rpartition("/")[2] or "root")
        show_as(str(view), store.url)
        fetch(store, view)
        if not view.exists():
            raise UserError(f"{url}: there is no such file or folder")
        _views[url] = view
    return _views[url]


def local_list(paths: str) -> str:
    """Returns the value of an option, one path or several with commas between, as `local` does."""
    return ",".join(str(local(path)) if url_of(path) else path for path in paths.split(","))


def fetch(store: Store, target: Path) -> None:
    """Makes links, at a path where nothing is, to the verified files of a URL in the cache.

    Raises:
      UserError: as for `local`.
    """
    problem = "it changes all the time"
    for _ in range(_TRIES):
        objects = _objects(store)
        folder = _folder(f"objects/{_digest(store.url)}")
        paths = {name: folder / _digest(repr(each)) for name, each in objects.items()}
        problems = _download_all(store, objects, paths)
        # Another process may have removed a version that it did not find any more.
        with contextlib.suppress(FileNotFoundError):
            if not problems:
                atomic.delete(target)
                for name, path in paths.items():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, target / name if name else target)
                for old in {*folder.iterdir()}.difference(paths.values()):
                    if not atomic.is_workspace_name(old.name):
                        old.unlink(missing_ok=True)
                return
        problem = next(iter(problems), problem)
    raise UserError(f"{store.url} cannot be read: {problem}; try again")


def _objects(store: Store) -> dict[str, Object]:
    """Returns the objects of the files of a URL, by name; of a run only what readers need."""
    index = newest(store)
    if index.number:
        return {
            name: Object(key, content.bytes, sha256=content.sha256)
            for name, (key, content) in index.files.items()
        }
    found = store.find()
    steps = {None, *complete_steps(found)}
    return {
        name: each
        for name, each in found.items()
        if run_layout.CONFIG not in found
        or (step_of(name) in steps and not name.startswith(f"{run_layout.CACHE}/"))
    }


def _download_all(
    store: Store, objects: Mapping[str, Object], paths: Mapping[str, Path]
) -> list[str]:
    """Downloads what is not in the cache; returns descriptions of what could not be."""
    missing = [name for name, path in paths.items() if not path.exists()]
    total = sum(max(objects[name].bytes, 0) for name in missing)
    with (
        progress_bar(f"Reading {store.url}", total, in_bytes=True) as tell,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        problems = threads.map(lambda name: _download(store, objects[name], paths[name]), missing)
        for name, problem in zip(missing, problems, strict=True):
            if problem:
                return [problem]
            tell(objects[name].bytes)
    return []


def _download(store: Store, source: Object, path: Path) -> str | None:
    """Downloads and verifies an object; returns what is wrong with it, None if nothing."""
    with atomic.workspace(path.parent) as folder:
        partial = folder / path.name
        if not store.get(source.key, partial, size=source.bytes):
            return f"{source.key} has been removed"
        if partial.stat().st_size != source.bytes >= 0:
            return f"{source.key} has {partial.stat().st_size:,} of {source.bytes:,} bytes"
        for kind, digest in (("sha256", source.sha256), ("md5", source.md5)):
            with partial.open("rb") as file:
                differs = digest and hashlib.file_digest(file, kind).hexdigest() != digest
            if differs and not (kind == "md5" and store.is_encrypted(source.key)):
                return f"{source.key} differs from its checksum"
        partial.chmod(0o600)
        partial.replace(path)
    return None


def _folder(name: str) -> Path:
    """Creates a private folder in the user's cache."""
    folder = runtime.cache_root()
    if not runtime.is_private(folder):
        raise UserError(f"{folder} is not a private folder of yours: set XDG_CACHE_HOME to another")
    for part in ("remote", *name.split("/")):
        folder /= part
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
