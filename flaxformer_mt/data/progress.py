"""A line on the terminal that counts what passes, for streams whose length nobody knows."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

_EVERY = 1000  # Items between two updates.

_Item = TypeVar("_Item")


def counted(items: Iterable[_Item], doing: str) -> Iterator[_Item]:
    """The same items; where standard error is a terminal, a line there counts them meanwhile.

    Args:
      items: the stream.
      doing: what the line says before the number: "writing train".
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed:,} pairs", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(doing, total=None)
        for number, item in enumerate(items, start=1):
            yield item
            if number % _EVERY == 0:
                progress.update(task, completed=number)
