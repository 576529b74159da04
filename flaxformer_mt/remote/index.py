"""The index of a published run, which alone says what is published, and what may be removed.

Each index is a new object with the next number. If two publishers write the same number, the store
refuses one of them. The index with the highest number counts. It names the object of each file, so
that one request publishes many files at once. It also names all other objects that publishers wrote
or are about to write. Every object has a new name, which begins with that of its publisher.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from flaxformer_mt import run_layout
from flaxformer_mt.errors import UserError
from flaxformer_mt.remote.stores import Content, Store, StoreError, require_name

_NAME = re.compile(r"flaxformer_mt-index-(\d{9,})\.json")
_KEY = re.compile(r"[0-9a-f]{32}/.+", re.DOTALL)
_TRIES = 5


class Entry(NamedTuple):
    """A published file."""

    key: str
    """The name of its object."""
    content: Content


@dataclasses.dataclass(frozen=True)
class Index:
    """What an index says; by default that of a folder without one."""

    number: int = 0
    run: str = ""
    """Identifies the run."""
    publisher: str = ""
    """The process that wrote it, and the folder of its objects."""
    files: dict[str, Entry] = dataclasses.field(default_factory=dict)
    others: frozenset[str] = frozenset()
    """Names of objects that may exist, and are not published, or not any more."""

    @property
    def name(self) -> str:
        """The name of its object."""
        return f"flaxformer_mt-index-{self.number:09}.json"

    @property
    def keys(self) -> set[str]:
        """The names of the objects that are published."""
        return {entry.key for entry in self.files.values()}


def numbers(names: Iterable[str]) -> list[int]:
    """Returns the numbers of indexes among names of objects, in ascending order."""
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def newest(store: Store) -> Index:
    """Reads the index of a folder; one with number 0 if there is none.

    Raises:
      UserError: it is damaged, or a request failed.
    """
    for _ in range(_TRIES):
        found = numbers(store.names()) if store.is_publishable else []
        if not found:
            return Index()
        if index := read(store, found[-1]):
            return index
    raise StoreError(f"{store.url}: its index changes all the time")


def read(store: Store, number: int) -> Index | None:
    """Reads the index with a number, which may have been removed; errors as in `newest`."""
    name = Index(number).name
    content = store.read(name)
    if content is None:
        return None
    try:
        index = msgspec.json.decode(content, type=Index)
        # Nothing is written here, or removed there, outside of the folders for this.
        for file in (*index.files, *index.keys, *index.others):
            require_name(file, store.url)
        if index.number == number and all(map(_KEY.fullmatch, index.keys | index.others)):
            return index
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, UserError):
        pass
    raise UserError(f"{store.url}/{name} is damaged: publish the run to another URL")


def step_of(name: str) -> int | None:
    """Returns the step of the checkpoint that a file of a run belongs to; None if to none."""
    parts = name.split("/")
    is_file = len(parts) > 2 and parts[0] == run_layout.CHECKPOINTS
    return int(parts[1]) if is_file and parts[1].isdecimal() else None


def complete_steps(names: Iterable[str]) -> set[int]:
    """Returns the steps of the checkpoints that have a manifest among the names of files."""
    steps = (step_of(name) for name in names if name.endswith(f"/{run_layout.MANIFEST}"))
    return {step for step in steps if step is not None}
