"""An output file that a later process continues where an earlier one was interrupted.

Until `out.txt` is complete, `out.txt.partial` beside it grows by whole lines.
`out.txt.settings.json` says what the output is of, and remains.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import read_json
from flaxformer_mt.runs import atomic

_SECONDS_UNTIL_FLUSH = 1.0
_COMPLETE = "complete"


@contextlib.contextmanager
def resumed_writer(
    output: Path, settings: Mapping[str, Any], inputs: int, lines_each: int
) -> Iterator[tuple[int, Callable[[Iterable[str]], None]]]:
    """Continues an output file.

    Args:
      output: the file.
      settings: what determines the output, as JSON values by their names in messages.
      inputs: the number of input lines.
      lines_each: the number of output lines of an input line.

    Yields:
      The number of input lines whose output is there, and a function that appends lines.

    Raises:
      UserError: the output was begun with other settings, another process writes it, or a file
        cannot be written.
    """
    # Tuples become lists, as in the file that they are compared with.
    settings = json.loads(json.dumps(settings))
    atomic.remove_leftovers(output.absolute().parent)
    partial = output.with_name(f"{output.name}.partial")
    if partial.exists() and not _settings_file(output).exists():
        raise UserError(f"{partial} is not of this command: rename it, or give another --output")
    if _is_complete(output, settings):
        yield inputs, _refuse
        return
    with atomic.explained(partial), _opened(partial) as file:
        done = _keep_whole(file, lines_each)
        yield done, _writer(file)
        file.seek(0)
        # Copied: after a kill from here on, the partial file still has all lines.
        with atomic.new_file(output) as new, new.open("wb") as whole:
            shutil.copyfileobj(file, whole)
    _record(output, settings, is_complete=True)
    partial.unlink()


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
            f"{file.name} and {output.name}.partial to translate anew"
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
    raise ValueError("the output is complete")
