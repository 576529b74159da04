"""Standard output whose reader is gone, or whose disk is full; progress bars on standard error.

Imports the standard library only, but for a progress bar that is shown.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_PROXIED = "rich_proxied_file"
"""Attribute of the standard output that rich installs below a status line: the one before."""


def discard_output() -> None:
    """Makes standard output a stream whose writes always succeed."""
    with contextlib.suppress(io.UnsupportedOperation):  # A notebook's has no file descriptor.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class BestEffortOutput:
    """Standard output that a program can do without; a file for `rich.console.Console`.

    The first error of writing is reported on standard error, with `consequence`, and all text from
    then on is discarded.
    """

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._failed: TextIO | None = None

    def write(self, text: str) -> int:
        """Writes text, if possible; returns its length.

        Characters that standard output cannot encode are written as escapes.
        """
        encoding = sys.stdout.encoding or "utf-8"
        self._attempt("write", text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes standard output, if possible."""
        self._attempt("flush")

    def __getattr__(self, name: str) -> Any:
        if name == _PROXIED:  # Rich would write there, past this object.
            raise AttributeError(name)
        return getattr(sys.stdout, name)

    def _attempt(self, method: str, *arguments: str) -> None:
        stdout = getattr(sys.stdout, _PROXIED, sys.stdout)
        if stdout is self._failed:
            return
        try:
            getattr(stdout, method)(*arguments)
        except OSError as error:
            self._failed = stdout
            discard_output()
            with contextlib.suppress(OSError):
                print(
                    f"standard output cannot be written ({error.strerror}): {self._consequence}",
                    file=sys.stderr,
                )


@contextlib.contextmanager
def progress_bar(
    title: str, total: int | None, in_bytes: bool = False
) -> Iterator[Callable[[int], object]]:
    """Shows a progress bar, if its total is known, not 0, and standard error a terminal.

    Yields a function to call with the number of steps made, which may come from any thread.
    """
    if not total or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )  # fmt: skip

    own = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (*Progress.get_default_columns(), *own, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
