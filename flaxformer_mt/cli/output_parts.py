"""An output file that processes write in parts, and that later processes continue.

A part is the output of consecutive input lines. Beside `out.txt` there are, until it is complete,
`out.txt.0-of-2.partial`, which grows by whole lines, and `out.txt.0-of-2`, a part that is complete;
`out.txt.settings.json` says what all parts are of, and remains.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import read_json
from flaxformer_mt.runs import atomic

_SECONDS_UNTIL_FLUSH = 1.0
_COMPLETE = "complete"


@dataclasses.dataclass(frozen=True)
class OutputPart:
    """One of `count` parts of a file, with nearly equal numbers of lines."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "i/N" with 0 <= i < N; errors are `UserError`."""
        found = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
        index, count = map(int, found.groups()) if found else (0, 0)
        if index >= count:
            raise UserError(f"--shard={text}: give i/N, such as 0/4, 1/4, 2/4 and 3/4 for 4 shards")
        return cls(index, count)

    def lines(self, total: int) -> range:
        """Returns the numbers, from 0, of its lines in a file of `total` lines."""
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)

    def path(self, output: Path) -> Path:
        """Returns where this part of `output` is written."""
        return output.with_name(f"{output.name}.{self.index}-of-{self.count}")


@contextlib.contextmanager
def part_writer(
    output: Path, shard: OutputPart, settings: Mapping[str, Any], inputs: range, lines_each: int
) -> Iterator[tuple[range, Callable[[Iterable[str]], None]]]:
    """Continues a part; the process that completes the last part joins all to `output`.

    Args:
      output: the file that is written in parts.
      shard: the part.
      settings: what determines the output, as JSON values by their names in messages.
      inputs: the numbers of the input lines of the part.
      lines_each: number of output lines of an input line.

    Yields:
      The numbers of the input lines whose output is missing, and a function that appends lines.

    Raises:
      UserError: there are parts of other settings, another process writes the part, or a file
        cannot be written.
    """
    # Tuples become lists, as in the file that they are compared with.
    settings = json.loads(json.dumps({**settings, "shards": shard.count}))
    part = shard.path(output)
    is_complete = _is_complete(output, settings)
    if is_complete or part.exists():
        atomic.remove_leftovers(output.absolute().parent)
        yield inputs[len(inputs) :], _refuse
    else:
        partial = part.with_name(f"{part.name}.partial")
        with atomic.explained(partial), _opened(partial) as file:
            done = _keep_whole(file, lines_each)
            yield inputs[done:], _writer(file)
            file.flush()
            os.fsync(file.fileno())
            atomic.rename(partial, part)
    parts = [OutputPart(index, shard.count).path(output) for index in range(shard.count)]
    if is_complete or _join(output, parts, settings):
        for part in parts:
            part.unlink(missing_ok=True)


def _settings_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.settings.json")


def _is_complete(output: Path, settings: Mapping[str, Any]) -> bool:
    """Checks or records the settings; returns whether `output` is complete."""
    file = _settings_file(output)
    if not file.exists():
        _record(output, settings, is_complete=False)
    found: dict[str, Any] = read_json(file, dict[str, Any])
    if others := [name for name in settings if found.get(name) != settings[name]]:
        raise UserError(
            f"{output} was begun with other {', '.join(others)}: give another --output, or delete "
            f"{file.name} and the parts of {output.name} to translate anew"
        )
    return bool(found.get(_COMPLETE)) and output.exists()


def _record(output: Path, settings: Mapping[str, Any], is_complete: bool) -> None:
    text = json.dumps({_COMPLETE: is_complete, **settings}, indent=2, ensure_ascii=False)
    atomic.write_text(_settings_file(output), f"{text}\n")


@contextlib.contextmanager
def _opened(partial: Path) -> Iterator[BinaryIO]:
    with os.fdopen(atomic.open_own(partial, os.O_RDWR | os.O_CREAT), "r+b") as file:
        try:
            atomic.lock(file.fileno())
        except BlockingIOError as error:
            raise UserError(f"{partial}: another process is writing it") from error
        yield file


def _keep_whole(file: BinaryIO, lines_each: int) -> int:
    """Removes what does not belong to a whole input line; returns the number of whole ones."""
    done = end = position = 0
    for number, line in enumerate(file, start=1):
        # After a power cut, zeros are in place of what was not flushed, even before other lines.
        if b"\0" in line:
            break
        position += len(line)
        if line.endswith(b"\n") and number % lines_each == 0:
            done, end = number // lines_each, position
    file.seek(end)
    file.truncate()
    return done


def _writer(file: BinaryIO) -> Callable[[Iterable[str]], None]:
    flushed = time.monotonic()

    def write(lines: Iterable[str]) -> None:
        nonlocal flushed
        file.writelines(f"{line}\n".encode() for line in lines)
        if time.monotonic() > flushed + _SECONDS_UNTIL_FLUSH:
            file.flush()
            os.fsync(file.fileno())
            flushed = time.monotonic()

    return write


def _refuse(lines: Iterable[str]) -> None:
    raise ValueError("the part is complete")


def _join(output: Path, parts: Sequence[Path], settings: Mapping[str, Any]) -> bool:
    """Joins the parts, and returns whether they are all complete."""
    with contextlib.ExitStack() as stack:
        try:
            files = [stack.enter_context(part.open("rb")) for part in parts]
        except FileNotFoundError:
            return False  # One is missing, or another process has joined them.
        with atomic.new_file(output) as partial, partial.open("wb") as joined:
            for file in files:
                shutil.copyfileobj(file, joined)
    _record(output, settings, is_complete=True)
    return True
