"""Publishing: what a run folder holds is copied to a store, and what it does not hold is removed.

A publisher first claims the URL by writing an index (see `index`), and each of its later changes is
one more index. If another process has written an index since, its number is taken, and the first
publisher stops. No clock is read, and requests may be carried out late: a late object has a name
that nobody else uses, and a late index has a number that is taken, or is not the highest.

Objects are named in an index before they are written. They are removed when the newest index does
not publish them, and are named in indexes until then.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from flaxformer_mt import atomic, run_layout
from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import reading
from flaxformer_mt.remote.index import Entry, Index, complete_steps, newest, numbers, read, step_of
from flaxformer_mt.remote.stores import Content, Store, StoreError, require_name
from flaxformer_mt.standard_output import progress_bar

_SECONDS, _MAX_SECONDS = 5.0, 300.0
"""The pause between two looks at the folder, and the longest one while a store does not answer."""
_log = logging.getLogger(__name__)


class Conflict(StoreError):
    """Another process, or an earlier request of this one, has written the next index."""


class Publisher:
    """Publishes one run folder to one URL; `sync` can be called as often as wanted."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store = folder, store
        self._id = uuid.uuid4().hex
        self._index: Index | None = None
        """The newest one, which this publisher wrote; None if that is not known."""
        self._number = 0
        """Of the first index that this publisher tried to write."""
        self._written: dict[tuple[str, Content], str] = {}
        """The object of each content of each file; "" if the file differs from its manifest."""
        self._counts: collections.Counter[str] = collections.Counter()
        self._certain: set[str] = set()
        """Objects of which no write can still be carried out."""
        self._gone: set[str] = set()
        self._is_clean = False

    def claim(self) -> Index:
        """Makes this the publisher of the URL, unless it is.

        `UserError` if the URL has foreign objects, another run, a newer state of this one, or
        another publisher by now; `StoreError` if a request failed, and this may be called again.
        """
        while self._index is None:
            found = newest(self._store)
            is_own = found.publisher == self._id
            if self._number and not is_own and found.number >= self._number:
                raise UserError(f"another process publishes to {self._store.url}: this one stops")
            if not is_own:
                self._require_own(found)
                self._number = found.number + 1
                self._certain |= found.keys
                run = self._run() or uuid.uuid4().hex
                found = dataclasses.replace(found, run=run, publisher=self._id)
            try:
                # Also fences writes of this publisher that failed, and may still be carried out.
                self._replace(found, found.files)
            except Conflict:
                self._number = self._number if is_own else 0
        return self._index

    def sync(self, shows_progress: bool = False) -> bool:
        """Publishes what has changed, and removes what is gone; returns whether there is anything.

        A run is published from its first checkpoint on. Raises what `claim` does.
        """
        local = _contents(self._folder)
        if not complete_steps(local):
            return False
        index = self.claim()
        if self._run() is None:
            atomic.write_text(self._folder / run_layout.PUBLICATION, json.dumps({"run": index.run}))
            local = _contents(self._folder)
        for name, entry in index.files.items():
            self._written.setdefault((name, entry.content), entry.key)
        new = {
            name: self._new_key(name) for name in local if (name, local[name]) not in self._written
        }
        if new:
            index = self._replace(index, index.files, new.values())
            self._upload(new, local, shows_progress)
        keys = {name: self._written.get((name, content)) for name, content in local.items()}
        partial = {step_of(name) for name, key in keys.items() if not key} - {None}
        files = {
            name: Entry(key, local[name])
            for name, key in sorted(keys.items())
            if key and step_of(name) not in partial
        }
        if run_layout.CONFIG not in files or not complete_steps(files):
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
            raise UserError(f"{url} has objects that are not of a published run: give another URL")
        if index.files and index.run != self._run():
            raise UserError(f"{url} has another run: give another URL")
        own = complete_steps(_contents(self._folder))
        ahead = [step for step in complete_steps(index.files) if step > max([-1, *own])]
        if ahead:
            raise UserError(
                f"{url} has step {max(ahead)} of this run, which is newer than {self._folder}: "
                "give another URL, or continue the run in an empty workdir"
            )

    def _run(self) -> str | None:
        """Returns what identifies the run of the folder; None if it was never published."""
        path = self._folder / run_layout.PUBLICATION
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
        is_new = self._store.create(index.name, msgspec.json.encode(index))
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
        self._counts[name] += 1
        return f"{self._id}/{name}" + (f"~{self._counts[name]}" if self._counts[name] > 1 else "")

    def _upload(self, keys: Mapping[str, str], local: Mapping[str, Content], shows: bool) -> None:
        """Writes new objects, but those of files that were removed or replaced in the meantime."""

        def put(name: str) -> None:
            with contextlib.suppress(FileNotFoundError), (self._folder / name).open("rb") as file:
                found = self._store.put(keys[name], file, size=local[name].bytes)
                self._written[name, local[name]] = keys[name] if found == local[name] else ""
            self._certain.add(keys[name])
            tell(local[name].bytes)

        total = sum(local[name].bytes for name in keys) if shows else None
        with (
            progress_bar(f"Publishing to {self._store.url}", total, in_bytes=True) as tell,
            ThreadPoolExecutor(reading.THREADS) as threads,
        ):
            collections.deque(threads.map(put, keys), maxlen=0)

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
    publisher, stop = Publisher(folder, Store(url)), threading.Event()
    try:
        publisher.claim()
    except StoreError as error:
        if not complete_steps(_contents(folder)):
            raise
        _log.warning(_TRIED_AGAIN, error)
    thread = threading.Thread(target=_publish_until, args=(stop, publisher, folder, url))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


_TRIED_AGAIN = "%s; training goes on, and publishing is tried again"


def _publish_until(stop: threading.Event, publisher: Publisher, folder: Path, url: str) -> None:
    pause, last_tries = _SECONDS, 2
    problem: Exception | None = None
    while last_tries:
        is_last = stop.wait(pause)
        last_tries -= is_last
        try:
            publisher.sync(shows_progress=is_last)
        except (StoreError, OSError) as error:
            if pause == _SECONDS and not is_last:
                _log.warning(_TRIED_AGAIN, error)
            problem, pause = error, min(2 * pause, _MAX_SECONDS)
        except UserError as error:
            _log.warning("%s; the run in %s goes on", error, folder)
            return
        else:
            pause = _SECONDS
            if is_last:
                return
    message = "%s; the run is complete in %s. To publish it: flaxformer-mt publish %s %s"
    _log.warning(message, problem, folder, folder, url)


def is_published(url: str) -> bool:
    """Returns whether there is a published run at a URL."""
    return bool(newest(Store(url)).files)


def continue_from(url: str, folder: Path) -> None:
    """Downloads a published run to a folder that is empty, or missing.

    Does nothing if the folder holds a run, or if none is published.

    Raises:
      UserError: the folder holds something else, or the store cannot be used.
    """
    if (folder / run_layout.CONFIG).exists() or not is_published(url):
        return
    atomic.make_folder(folder)
    with atomic.workspace(folder) as workspace:
        if {*folder.iterdir()} - {workspace}:
            raise UserError(
                f"{folder} holds other files than a run: give an empty workdir to continue the "
                f"run of {url}"
            )
        copy, run = reading.local(url, as_it_is_now=True), workspace / "run"
        shutil.copytree(copy, run)
        atomic.sync_tree(run)
        for path in sorted(run.iterdir(), key=lambda path: path.name == run_layout.CONFIG):
            atomic.rename(path, folder / path.name)


def _contents(folder: Path) -> dict[str, Content]:
    """Returns the contents of the files to publish, by name: those of complete checkpoints first.

    Later lines of `metrics.jsonl` than those of the newest checkpoint do no harm.
    """
    contents: dict[str, Content] = {}
    for path in (folder / run_layout.CHECKPOINTS).glob("[0-9]*"):
        prefix = f"{run_layout.CHECKPOINTS}/{path.name}"
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            manifest = (path / run_layout.MANIFEST).read_bytes()
            own = {
                require_name(f"{prefix}/{name}", prefix): Content(each["bytes"], each["sha256"])
                for name, each in json.loads(manifest)["files"].items()
            }
            contents |= own | {f"{prefix}/{run_layout.MANIFEST}": _content_of(manifest)}
    for name in run_layout.CONTENT - {run_layout.CACHE, run_layout.LOCK, run_layout.CHECKPOINTS}:
        path = folder / name
        for file in [path] if path.is_file() else path.rglob("*"):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                contents[file.relative_to(folder).as_posix()] = _content_of(file.read_bytes())
    return contents


def _content_of(data: bytes) -> Content:
    return Content(len(data), hashlib.sha256(data).hexdigest())
