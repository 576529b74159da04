"""A progress line on the terminal for streams of unknown length."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

_EVERY = 1000  # Items between updates.

_Item = TypeVar("_Item")


def counted(items: Iterable[_Item], activity: str) -> Iterator[_Item]:
    """Yields the items of a stream, and counts them on standard error if it is a terminal.

    Args:
      items: the stream.
      activity: text before the count, such as "writing train".
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
        task = progress.add_task(activity, total=None)
        for number, item in enumerate(items, start=1):
            yield item
            if number % _EVERY == 0:
                progress.update(task, completed=number)
