"""Renders a comparison as a table for the terminal."""

import collections
import io
import itertools
import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flaxformer_mt.parity.reports.comparison import Comparison, Row, Section, format_difference

TITLES: dict[Section, str] = {
    "values": "values, in the order of computation",
    "losses": "losses, by convention",
    "gradients": "gradients, relative to the largest",
    "steps": "optimizer steps, each at its worst",
}

_STYLES = {"agrees": "", "accepted": "yellow", "differs": "red"}


def to_text(comparison: Comparison, verbose: bool, width: int, color: bool) -> str:
    """Returns the comparison as text; unless `verbose`, with one line for a layer that agrees."""
    output = io.StringIO()
    console = Console(
        file=output, width=width, force_terminal=color, no_color=not color, highlight=False
    )
    console.print(
        Text(comparison.headline(), style="bold green" if comparison.passed else "bold red")
    )
    console.print(_table(comparison, verbose))
    explanation = [] if comparison.passed else [comparison.explanation()]
    for sentence in (
        *explanation,
        *comparison.further(),
        *comparison.remarks(),
        comparison.closing(),
    ):
        console.print(Text(f"\n{sentence}"))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _table(comparison: Comparison, verbose: bool) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for heading in ("difference", "relative", "tolerance", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for section, rows in itertools.groupby(comparison.rows, key=lambda row: row.section):
        table.add_section()
        table.add_row(Text(TITLES[section], style="bold"))
        for name, members in itertools.groupby(rows, key=group_of):
            for where, row, words, style in _lines(
                name, list(members), comparison.first_divergence, verbose
            ):
                numbers = map(format_difference, (row.max_abs, row.max_rel, row.tolerance))
                table.add_row(Text(where), *numbers, words, style=style)
    return table


def _lines(
    name: str, group: Sequence[Row], first: Row | None, verbose: bool
) -> Iterator[tuple[str, Row, str, str]]:
    """Yields (name, row, result, style) for each row of a layer, or once for all of them."""
    if verbose or len(group) == 1 or first in group:
        for row in group:
            if row is first:
                yield _name(row), row, "DIFFERS FIRST", "bold red"
            else:
                yield _name(row), row, row.verdict, _STYLES[row.verdict]
        return
    worst = max(group, key=lambda row: row.excess)
    below = _name(worst).removeprefix(name).lstrip("/.") or name
    counts = collections.Counter(row.verdict for row in group)
    words, style = "agree", _STYLES["agrees"]
    if counts["differs"]:
        words, style = f"{counts['differs']} differ", _STYLES["differs"]
    elif counts["accepted"]:
        words, style = f"{counts['accepted']} accepted", _STYLES["accepted"]
    yield f"{name} ({len(group)}), worst {below}", worst, words, style


def group_of(row: Row) -> str:
    """Returns the layer of a row or, outside of the layers, the first component of its name."""
    name = _name(row)
    layer = re.match(r".*?[/.]\d+(?=[/.]|$)", name)
    return layer[0] if layer else re.split("[/.]", name)[0]


def _name(row: Row) -> str:
    return row.site.removeprefix("gradient/").removeprefix("steps/")
