"""Standard output, standard error and files, as the commands write them."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flaxformer_mt import atomic
from flaxformer_mt.errors import shown

_Group = TypeVar("_Group")


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines as UTF-8 in every locale, with a newline character as line end."""
    sys.stdout.buffer.writelines(f"{shown(line)}\n".encode() for line in lines)
    sys.stdout.buffer.flush()


def print_json(values: Mapping[str, Any]) -> None:
    """Prints an indented JSON object."""
    print_lines([json.dumps(values, indent=2)])


def print_note(line: str) -> None:
    """Prints a note to standard error."""
    print(f"flaxformer-mt: note: {shown(line)}", file=sys.stderr)


def prompted(groups: Iterable[_Group], instructions: str) -> Iterator[_Group]:
    """Yields groups of lines that a user types, each after a prompt on standard error."""
    print_note(instructions)
    remaining = iter(groups)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            yield next(remaining)
        except StopIteration:
            print(file=sys.stderr)  # The prompt's line ends.
            return


@contextlib.contextmanager
def line_writer(path: Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """Yields a function that appends lines to a file, which is renamed to `path` on success."""
    with atomic.new_file(path) as partial, partial.open("wb") as file:

        def write(lines: Iterable[str]) -> None:
            file.writelines(f"{line}\n".encode() for line in lines)
            file.flush()  # `path` may be a pipe.

        yield write


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current activity on the terminal, if there is one."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update
