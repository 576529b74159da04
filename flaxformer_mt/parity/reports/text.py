"""Renders a comparison as a table for the terminal."""

import collections
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flaxformer_mt.parity.reports.comparison import (
    Comparison,
    Row,
    Section,
    format_difference,
)

TITLES: dict[Section, str] = {
    "values": "values, in the order of computation",
    "losses": "losses, by convention",
    "gradients": "gradients, relative to the largest",
    "steps": "optimizer steps, each at its worst",
}

_STYLES = {"agrees": "", "accepted": "yellow", "differs": "red"}


class Line(NamedTuple):
    """One line of the table: a single row, or all rows of a layer."""

    where: str
    row: Row
    verdict: str
    style: str


def to_text(comparison: Comparison, verbose: bool, width: int, color: bool) -> str:
    """Returns the comparison as text.

    Unless `verbose`, layers have one line each, except for the one with the first divergence.
    """
    output = io.StringIO()
    console = Console(
        file=output, width=width, force_terminal=color, no_color=not color, highlight=False
    )
    console.print(
        Text(comparison.headline(), style="bold green" if comparison.passed else "bold red")
    )
    console.print(_table(comparison, verbose))
    if not comparison.passed:
        console.print(Text(f"\n{comparison.explanation()}"))
    for sentence in comparison.further():
        console.print(Text(f"\n{sentence}"))
    for remark in comparison.remarks():
        console.print(Text(f"\n{remark}"))
    console.print(Text(f"\n{comparison.closing()}"))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _table(comparison: Comparison, verbose: bool) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for heading in ("difference", "relative", "tolerance", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for section, rows in itertools.groupby(comparison.rows, key=lambda row: row.section):
        table.add_section()
        table.add_row(Text(TITLES[section], style="bold"))
        for line in _lines(list(rows), comparison.first_divergence, verbose):
            row = line.row
            table.add_row(
                Text(line.where),
                format_difference(row.max_abs),
                format_difference(row.max_rel),
                format_difference(row.tolerance),
                line.verdict,
                style=line.style,
            )
    return table


def _lines(rows: Sequence[Row], first: Row | None, verbose: bool) -> Iterator[Line]:
    for name, members in itertools.groupby(rows, key=group_of):
        group = list(members)
        if verbose or len(group) == 1 or first in group:
            for row in group:
                yield _line(row, first)
        else:
            yield _summary_of(name, group)


def _line(row: Row, first: Row | None) -> Line:
    if row is first:
        return Line(_name(row), row, "DIFFERS FIRST", "bold red")
    return Line(_name(row), row, row.verdict, _STYLES[row.verdict])


def _summary_of(name: str, group: Sequence[Row]) -> Line:
    worst = max(group, key=lambda row: row.excess)
    below = _name(worst).removeprefix(name).lstrip("/.") or name
    where = f"{name} ({len(group)}), worst {below}"
    counts = collections.Counter(row.verdict for row in group)
    if counts["differs"]:
        return Line(where, worst, f"{counts['differs']} differ", _STYLES["differs"])
    if counts["accepted"]:
        return Line(where, worst, f"{counts['accepted']} accepted", _STYLES["accepted"])
    return Line(where, worst, "agree", _STYLES["agrees"])


def group_of(row: Row) -> str:
    """Returns the layer of a row or, outside of the layers, the first component of its name."""
    name = _name(row)
    layer = re.match(r".*?[/.]\d+(?=[/.]|$)", name)
    return layer[0] if layer else re.split("[/.]", name)[0]


def _name(row: Row) -> str:
    return row.site.removeprefix("gradient/").removeprefix("steps/")
