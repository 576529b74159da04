"""Publishing: what a run folder holds is copied to a store, and what it does not hold is removed.

A publisher first claims the URL by writing an index (see `index`), and each of its later changes is
one more index. If another process has written an index since, its number is taken, and the first
publisher stops. No clock is read, and requests may be carried out late: a late object has a name
that nobody else uses, and a late index has a number that is taken, or is not the highest.

Objects are named in an index before they are written. They are removed when the newest index does
not publish them, and are named in indexes until then.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import reading
from flaxformer_mt.remote.index import Entry, Index, complete_steps, newest, numbers, read, step_of
from flaxformer_mt.remote.stores import Content, Store, StoreError
from flaxformer_mt.runs import atomic, layout
from flaxformer_mt.standard_output import progress_bar

_SECONDS, _MAX_SECONDS = 5.0, 300.0
"""The pause between two looks at the folder, and the longest one while a store does not answer."""
_log = logging.getLogger(__name__)


class Conflict(StoreError):
    """Another process, or an earlier request of this one, has written the next index."""


def new_id() -> str:
    """Returns the name of a run or a publisher, which nobody else has."""
    return uuid.uuid4().hex


class Publisher:
    """Publishes one run folder to one URL; `sync` can be called as often as wanted."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store = folder, store
        self._id = new_id()
        self._index: Index | None = None
        """The newest one, which this publisher wrote; None if that is not known."""
        self._number = 0
        """Of the first index that this publisher tried to write."""
        self._written: dict[tuple[str, Content], str] = {}
        self._damaged: dict[tuple[str, Content], str] = {}
        """Names of objects, by name and content of their files: what was written, and what could
        not be, since a file of a checkpoint differs from its manifest."""
        self._used: set[str] = set()
        self._certain: set[str] = set()
        """Objects of which no write can still be carried out."""
        self._gone: set[str] = set()
        self._is_clean = False

    def claim(self) -> Index:
        """Makes this the publisher of the URL, unless it is.

        Raises:
          UserError: the URL has foreign objects, another run, or a newer state of this one; or
            another process has become its publisher.
          StoreError: a request failed; this may be called again.
        """
        while self._index is None:
            found = newest(self._store)
            is_own = found.publisher == self._id
            if self._number and not is_own and found.number >= self._number:
                raise UserError(
                    f"another process publishes to {self._store.url} now: nothing more is "
                    "published from here"
                )
            if not is_own:
                self._require_own(found)
                self._number = found.number + 1
                self._certain |= found.keys
                run = self._run() or new_id()
                found = dataclasses.replace(found, run=run, publisher=self._id)
            try:
                # Also fences writes of this publisher that failed, and may still be carried out.
                self._replace(found, found.files)
            except Conflict:
                self._number = self._number if is_own else 0
        return self._index

    def sync(self, shows_progress: bool = False) -> bool:
        """Publishes what has changed, and removes what is gone; returns whether there is anything.

        A run is published from its first checkpoint on.

        Raises:
          UserError: as for `claim`.
          StoreError: a request failed; the next call does what is left.
        """
        local = _contents(self._folder)
        if not complete_steps(local):
            return False
        index = self.claim()
        if self._run() is None:
            atomic.write_text(self._folder / layout.PUBLICATION, json.dumps({"run": index.run}))
            local = _contents(self._folder)
        for name, entry in index.files.items():
            self._written.setdefault((name, entry.content), entry.key)
        new = {
            name: self._new_key(name)
            for name in local
            if (name, local[name]) not in self._written | self._damaged
        }
        if new:
            index = self._replace(index, index.files, new.values())
            self._upload(new, local, shows_progress)
        missing = {name for name in local if (name, local[name]) not in self._written}
        partial = {step_of(name) for name in missing} - {None}
        files = {
            name: Entry(self._written[name, content], content)
            for name, content in sorted(local.items())
            if name not in missing and step_of(name) not in partial
        }
        if layout.CONFIG not in files or not complete_steps(files):
            return False  # They were removed in the meantime.
        if files != index.files:
            index = self._replace(index, files)
        if not self._is_clean:
            self._clean(index)
        return True

    def _require_own(self, index: Index) -> None:
        """Raises `UserError` if the URL cannot become that of this run without a loss."""
        url = self._store.url
        if not self._store.is_publishable:
            raise UserError(f"{url}: only s3://, gs:// and file:// can be published to")
        if not index.number and self._store.names():
            raise UserError(
                f"{url} has objects that are not of a published run: give another URL, such as "
                f"{url}/run"
            )
        if index.files and index.run != self._run():
            raise UserError(f"{url} has another run: give another URL")
        own = complete_steps(_contents(self._folder))
        ahead = [step for step in complete_steps(index.files) if step > max([-1, *own])]
        if ahead:
            raise UserError(
                f"{url} has the checkpoint of step {max(ahead)} of this run, which is newer than "
                f"those in {self._folder}: give another URL, or continue it in an empty --workdir"
            )

    def _run(self) -> str | None:
        """Returns what identifies the run of the folder; None if it was never published."""
        path = self._folder / layout.PUBLICATION
        try:
            return str(json.loads(path.read_bytes())["run"])
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is damaged: restore it, or remove it") from error

    def _replace(self, index: Index, files: dict[str, Entry], new: Collection[str] = ()) -> Index:
        """Writes the next index, with these files, which also names all other objects."""
        others = index.others.union(index.keys, new) - {entry.key for entry in files.values()}
        index = dataclasses.replace(
            index, number=index.number + 1, files=files, others=frozenset(others - self._gone)
        )
        self._index = None
        is_new = self._store.create(index.name, index.encoded())
        found = numbers(self._store.names())
        # A process that was stopped for long may use a number that was removed in the meantime.
        if not is_new or found[-1:] != [index.number]:
            raise Conflict(f"another process publishes to {self._store.url}")
        for number in found[:-1]:
            if read(self._store, number):  # It is an index.
                self._store.remove(Index(number).name)
        self._index, self._is_clean = index, False
        return index

    def _new_key(self, name: str) -> str:
        key = f"{self._id}/{name}"
        while key in self._used:
            key += "~"
        self._used.add(key)
        return key

    def _upload(self, keys: Mapping[str, str], local: Mapping[str, Content], shows: bool) -> None:
        """Writes new objects, but those of files that were removed or replaced in the meantime."""
        failed = threading.Event()

        def put(name: str) -> None:
            if failed.is_set():
                return
            try:
                with (self._folder / name).open("rb") as file:
                    found = self._store.put(keys[name], file, size=local[name].bytes)
                if found == local[name]:
                    self._written[name, found] = keys[name]
                elif step_of(name) is not None:
                    self._damaged[name, local[name]] = keys[name]
                    _log.warning("%s is not published: it differs from its manifest", name)
            except FileNotFoundError:
                pass
            except BaseException:
                failed.set()
                raise
            self._certain.add(keys[name])
            tell(local[name].bytes)

        total = sum(local[name].bytes for name in keys) if shows else None
        title = f"Publishing to {self._store.url}"
        with (
            progress_bar(title, total, in_bytes=True) as tell,
            ThreadPoolExecutor(reading.THREADS) as threads,
        ):
            for _ in threads.map(put, keys):
                pass

    def _clean(self, index: Index) -> None:
        """Removes objects that are not published, again and again if they may come back."""
        self._written = {
            file: key for file, key in self._written.items() if key not in index.others
        }
        for key in index.others - self._gone:
            self._store.remove(key)
            if key in self._certain:
                self._gone.add(key)
        self._is_clean = True


def publish(folder: Path, url: str) -> None:
    """Publishes a run folder.

    Raises:
      UserError: it has no checkpoint, the URL has other objects, or the store cannot be used.
    """
    if not Publisher(folder, Store(url)).sync(shows_progress=True):
        raise UserError(f"{folder} has no complete checkpoint: there is nothing to publish")


@contextlib.contextmanager
def publishing(folder: Path, url: str) -> Iterator[None]:
    """Publishes a run folder while the block runs, and at its end, also after an exception.

    If the store does not answer, this is tried again, and a warning says so. The block runs on.

    Raises:
      UserError: the URL has other objects; or the store cannot be used, and the run is new.
    """
    publisher, stop, lost = Publisher(folder, Store(url)), threading.Event(), threading.Event()
    try:
        publisher.claim()
    except StoreError as error:
        if not complete_steps(_contents(folder)):
            raise
        _log.warning(_TRIED_AGAIN, error)
    thread = threading.Thread(target=_publish_regularly, args=(publisher, stop, lost))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if not lost.is_set():
            _publish_last(publisher, folder, url)


_TRIED_AGAIN = "%s; training goes on, and publishing is tried again"


def _publish_regularly(publisher: Publisher, stop: threading.Event, lost: threading.Event) -> None:
    pause = _SECONDS
    while not (lost.is_set() or stop.wait(pause)):
        try:
            publisher.sync()
            pause = _SECONDS
        except (StoreError, OSError) as error:
            if pause == _SECONDS:
                _log.warning(_TRIED_AGAIN, error)
            pause = min(2 * pause, _MAX_SECONDS)
        except UserError as error:
            _log.warning("%s; training goes on", error)
            lost.set()


def _publish_last(publisher: Publisher, folder: Path, url: str) -> None:
    try:
        try:
            publisher.sync(shows_progress=True)
        except StoreError:  # What has failed may have been carried out, or another has published.
            publisher.sync(shows_progress=True)
    except (UserError, OSError) as error:
        _log.warning(
            "%s; the run is complete in %s. To publish it: flaxformer-mt publish %s %s",
            error, folder, folder, url,
        )  # fmt: skip


def is_published(url: str) -> bool:
    """Returns whether there is a published run at a URL."""
    return bool(newest(Store(url)).files)


def continue_from(url: str, folder: Path) -> None:
    """Downloads a published run to a folder that is empty, or missing.

    Does nothing if the folder holds a run, or if none is published.

    Raises:
      UserError: the folder holds something else, or the store cannot be used.
    """
    if (folder / layout.CONFIG).exists() or not is_published(url):
        return
    atomic.make_folder(folder)
    with atomic.workspace(folder) as workspace:
        if {*folder.iterdir()} - {workspace}:
            raise UserError(
                f"{folder} holds other files than a run: give an empty --workdir to continue the "
                f"run of {url}"
            )
        copy, run = reading.local(url, as_it_is_now=True), workspace / "run"
        shutil.copytree(copy, run, copy_function=_link_or_copy)
        atomic.sync_tree(run)
        for path in sorted(run.iterdir(), key=lambda path: path.name == layout.CONFIG):
            atomic.rename(path, folder / path.name)


def _link_or_copy(source: str, target: str) -> None:
    """Links files of checkpoints, which never change, if the cache is on the same disk."""
    if layout.CHECKPOINTS in Path(target).parts:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _contents(folder: Path) -> dict[str, Content]:
    """Returns the contents of the files to publish, by name: those of complete checkpoints first.

    Later lines of `metrics.jsonl` than those of the newest checkpoint do no harm.
    """
    contents: dict[str, Content] = {}
    for path in (folder / layout.CHECKPOINTS).glob("[0-9]*"):
        prefix = f"{layout.CHECKPOINTS}/{path.name}"
        with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            manifest = (path / layout.MANIFEST).read_bytes()
            own = {
                f"{prefix}/{name}": Content(int(each["bytes"]), str(each["sha256"]))
                for name, each in json.loads(manifest)["files"].items()
            }
            contents |= own | {f"{prefix}/{layout.MANIFEST}": _content_of(manifest)}
    for name in layout.CONTENT - {layout.CACHE, layout.LOCK, layout.CHECKPOINTS}:
        path = folder / name
        for file in [path] if path.is_file() else path.rglob("*"):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                contents[file.relative_to(folder).as_posix()] = _content_of(file.read_bytes())
    return contents


def _content_of(data: bytes) -> Content:
    return Content(len(data), hashlib.sha256(data).hexdigest())
