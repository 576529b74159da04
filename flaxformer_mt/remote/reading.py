"""Local copies of remote files and folders; reading writes and removes nothing in a store.

Each version of an object is downloaded once and kept in the user's private cache folder. A process
reads links to such files, which no other process removes.
"""

import atexit
import contextlib
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from flaxformer_mt import runtime
from flaxformer_mt.errors import UserError, show_as
from flaxformer_mt.remote.index import complete_steps, newest, step_of
from flaxformer_mt.remote.stores import Object, Store
from flaxformer_mt.runs import atomic, layout
from flaxformer_mt.standard_output import progress_bar
from flaxformer_mt.urls import url_of

THREADS = 8
_TRIES = 3

_views: dict[str, Path] = {}
"""The local copies of this process, by URL."""
_open = contextlib.ExitStack()


class _Source(NamedTuple):
    """The object of a file."""

    key: str
    found: Object
    sha256: str = ""


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
        _views[url] = _new_view(Store(url))
    return _views[url]


def local_list(paths: str) -> str:
    """Returns the value of an option, one path or several with commas between, as `local` does."""
    return ",".join(str(local(path)) if url_of(path) else path for path in paths.split(","))


def _new_view(store: Store) -> Path:
    if not _views:
        atexit.register(_open.close)
    parent = _folder("views")
    view = _open.enter_context(atomic.workspace(parent)) / (store.url.rpartition("/")[2] or "root")
    show_as(str(view), store.url)
    fetch(store, view)
    if not view.exists():
        raise UserError(f"{store.url}: there is no such file or folder")
    return view


def fetch(store: Store, target: Path) -> None:
    """Makes links in a new folder, or one link, to the verified files of a URL in the cache.

    Raises:
      UserError: as for `local`.
    """
    problem = "it changes all the time"
    for _ in range(_TRIES):
        sources = _sources(store)
        folder = _folder(f"objects/{_digest(store.url)}")
        files = {name: folder / _digest(repr(source)) for name, source in sources.items()}
        problems = _download_all(store, sources, files)
        # Another process may have removed a version that it did not find any more.
        with contextlib.suppress(FileNotFoundError):
            if not problems:
                atomic.delete(target)
                for name, path in files.items():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, target / name if name else target)
                for old in {*folder.iterdir()}.difference(files.values()):
                    if not atomic.is_workspace_name(old.name):
                        old.unlink(missing_ok=True)
                return
        problem = next(iter(problems), problem)
    raise UserError(f"{store.url} cannot be read: {problem}; try again")


def _download_all(
    store: Store, sources: Mapping[str, _Source], files: Mapping[str, Path]
) -> list[str]:
    """Downloads what is not in the cache; returns descriptions of what could not be."""
    missing = [name for name, path in files.items() if not _is_kept(path, sources[name])]
    total = sum(max(sources[name].found.bytes, 0) for name in missing)
    with progress_bar(f"Reading {store.url}", total, in_bytes=True) as tell:

        def download(name: str) -> str | None:
            problem = _download(store, sources[name], files[name])
            tell(sources[name].found.bytes)
            return problem

        with ThreadPoolExecutor(THREADS) as threads:
            return [*filter(None, threads.map(download, missing))]


def _sources(store: Store) -> dict[str, _Source]:
    """Returns the objects of the files of a URL, by name; of a run without what is not needed."""
    published = newest(store)
    if published.number:
        return {
            name: _Source(key, Object(content.bytes, "", None), content.sha256)
            for name, (key, content) in published.files.items()
        }
    objects = store.find()
    if layout.CONFIG in objects:
        steps = {None, *complete_steps(objects)}
        objects = {
            name: each
            for name, each in objects.items()
            if step_of(name) in steps and not name.startswith(f"{layout.CACHE}/")
        }
    return {name: _Source(name, each) for name, each in objects.items()}


def _download(store: Store, source: _Source, path: Path) -> str | None:
    """Downloads and verifies an object; returns what is wrong with it, None if nothing."""
    with atomic.workspace(path.parent) as folder:
        partial = folder / path.name
        if not store.get(source.key, partial, size=source.found.bytes):
            return f"{source.key} has been removed"
        if partial.stat().st_size != source.found.bytes >= 0:
            return f"{source.key} has {partial.stat().st_size:,} of {source.found.bytes:,} bytes"
        for kind, digest in (("sha256", source.sha256), ("md5", source.found.md5)):
            with partial.open("rb") as file:
                differs = digest and hashlib.file_digest(file, kind).hexdigest() != digest
            if differs and not (kind == "md5" and store.is_encrypted(source.key)):
                return f"{source.key} differs from its checksum"
        partial.chmod(0o600)
        partial.replace(path)
    return None


def _is_kept(path: Path, source: _Source) -> bool:
    return path.is_file() and path.stat().st_size == source.found.bytes


def _folder(name: str) -> Path:
    """Creates a private folder in the user's cache."""
    root = runtime.cache_root()
    if not runtime.is_private(root):
        raise UserError(f"{root} is not a private folder of yours: set XDG_CACHE_HOME to another")
    folder = root / "remote"
    for part in ("", *name.split("/")):
        folder /= part
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
