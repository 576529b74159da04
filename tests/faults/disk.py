"""What a disk may hold after a loss of power, from a record of the calls that changed it.

Until a folder is flushed, a prefix of the changes of names in it may have reached the disk; until a
file is flushed, all, a part or none of what was written to it since.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

EXCHANGE = 2  # The flag of renameat2(2).

Tree = dict[str, "Tree | bytes"]
"""Names with files or folders."""


@dataclasses.dataclass
class Call:
    """A call of `calls.c`, see there."""

    letter: str
    inode: int
    number: int
    path: Path
    other: Path
    data: bytes


def calls(log: Path) -> Iterator[Call]:
    """Yields the calls of a record."""
    with log.open("rb") as file:
        while line := file.readline().split():
            letter, inode, number, *sizes = line[0].decode(), *map(int, line[1:])
            first, second, data = (file.read(size) for size in sizes)
            yield Call(letter, inode, number, Path(first.decode()), Path(second.decode()), data)


class File:
    """A file: its content, and what of it was flushed."""

    def __init__(self, content: bytes = b"") -> None:
        self.content, self.flushed = content, content

    def variants(self) -> tuple[bytes, bytes, bytes]:
        """Returns its content with none, a half and all of what was not flushed."""
        written = self.content
        torn = written[: (len(self.flushed) + len(written)) // 2]
        return self.flushed, written if written == self.flushed else torn, written


class Folder:
    """A folder; its names are in `Disk.changes`."""


Node = File | Folder
Change = list[tuple[Folder, str, Node | None]]


class Disk:
    """A folder of a disk, to which calls are applied in turn."""

    def __init__(self, root: Path) -> None:
        self._path = root
        self.root = Folder()
        self._names: dict[Folder, dict[str, Node]] = {self.root: {}}
        self._nodes: dict[int, Node] = {}
        self._changes: list[Change] = []
        self._pending: list[int] = []
        """Changes of names that were not flushed."""
        self._read(root, self.root)
        self._pending.clear()
        for node in self._nodes.values():
            if isinstance(node, File):
                node.flushed = node.content

    def _read(self, path: Path, folder: Folder) -> None:
        self._nodes[path.stat().st_ino] = folder
        for each in path.iterdir():
            node = self._new(each, Folder() if each.is_dir() else File(each.read_bytes()))
            if isinstance(node, Folder):
                self._read(each, node)
            else:
                self._nodes[each.stat().st_ino] = node

    def _new(self, path: Path, node: Node) -> Node:
        if isinstance(node, Folder):
            self._names[node] = {}
        self._change([(self._folder(path), path.name, node)])
        return node

    def _folder(self, path: Path) -> Folder:
        return self._at(path.parent)

    def _at(self, path: Path) -> Node:
        node: Node = self.root
        for name in path.relative_to(self._path).parts:
            node = self._names[node][name]
        return node

    def _change(self, change: Change) -> None:
        _apply(change, self._names)
        self._pending.append(len(self._changes))
        self._changes.append(change)

    def apply(self, call: Call) -> None:
        """Applies a call."""
        match call.letter:
            case "o" | "m":
                node = File() if call.letter == "o" else Folder()
                self._nodes[call.inode] = self._new(call.path, node)
            case "u":
                self._change([(self._folder(call.path), call.path.name, None)])
            case "r":
                replaced = self._at(call.other) if call.number == EXCHANGE else None
                node = self._nodes[call.inode]
                self._complete(call.path, node)
                self._change(
                    [
                        (self._folder(call.other), call.other.name, node),
                        (self._folder(call.path), call.path.name, replaced),
                    ]
                )
            case "w":
                file = self._nodes[call.inode]
                before = file.content[: call.number].ljust(call.number, b"\0")
                file.content = before + call.data + file.content[call.number + len(call.data) :]
            case "t":
                file = self._nodes[call.inode]
                file.content = file.content[: call.number].ljust(call.number, b"\0")
            case "f":
                self._flush(self._nodes[call.inode])

    def _complete(self, path: Path, node: Node) -> None:
        """Repeats a change of name that was not recorded, as safetensors makes it without libc."""
        folder = self._folder(path)
        [before] = [name for name, each in self._names[folder].items() if each is node]
        if before != path.name:
            self._change([(folder, path.name, node), (folder, before, None)])

    def _flush(self, node: Node) -> None:
        if isinstance(node, File):
            node.flushed = node.content
        else:
            # A change of two folders is whole if one of them was flushed, as journals have it.
            self._pending = [
                number
                for number in self._pending
                if all(node is not folder for folder, _, _ in self._changes[number])
            ]

    def states(self) -> Iterator[Tree]:
        """Yields what may be found after a loss of power at this moment.

        The last one has all changes.
        """
        for kept in range(len(self._pending) + 1):
            lost = set(self._pending[kept:])
            names: dict[Folder, dict[str, Node]] = {self.root: {}}
            for number, change in enumerate(self._changes):
                if number not in lost:
                    _apply(change, names)
            for variant in range(3):
                yield _tree(self.root, names, variant)


def _apply(change: Change, names: dict[Folder, dict[str, Node]]) -> None:
    for folder, name, node in change:
        entries = names.setdefault(folder, {})
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


def _tree(folder: Folder, names: dict[Folder, dict[str, Node]], variant: int) -> Tree:
    return {
        name: node.variants()[variant] if isinstance(node, File) else _tree(node, names, variant)
        for name, node in sorted(names.get(folder, {}).items())
    }


def read(folder: Path) -> Tree:
    """Returns the files of a folder."""
    return {
        path.name: read(path) if path.is_dir() else path.read_bytes()
        for path in sorted(folder.iterdir())
    }


def write(folder: Path, tree: Tree) -> None:
    """Writes files into an empty folder."""
    for name, content in tree.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
            write(folder / name, content)
        else:
            (folder / name).write_bytes(content)


def losses(disk: Disk, log: Path) -> Iterator[Tree]:
    """Yields each state that a loss of power may leave at any moment of a record, once."""
    seen = set()
    for call in calls(log):
        disk.apply(call)
        for state in disk.states():
            key = hashlib.sha256(repr(state).encode()).digest()
            if key not in seen:
                seen.add(key)
                yield state
