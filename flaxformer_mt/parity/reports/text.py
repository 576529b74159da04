"""A report as a table for the terminal."""

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flaxformer_mt.parity.reports.report import Report, Row, Section, figure

TITLES: dict[Section, str] = {
    "values": "values, in the order of computation",
    "losses": "losses, by convention",
    "gradients": "gradients, relative to the largest",
    "steps": "optimizer steps, each at its worst",
}
"""What the sections of a report are called."""


class Line(NamedTuple):
    """A line of the table: one row of the report, or several of one layer."""

    where: str
    row: Row
    """The worst of them."""
    verdict: str
    style: str


def to_text(report: Report, verbose: bool, width: int, color: bool) -> str:
    """The report for a terminal.

    Args:
      report: what to show.
      verbose: every row has a line; otherwise rows of a layer share one, unless the first
        divergence is among them.
      width: columns of the terminal.
      color: whether the terminal understands ANSI colors.
    """
    output = io.StringIO()
    console = Console(
        file=output, width=width, force_terminal=color, no_color=not color, highlight=False
    )
    console.print(Text(report.headline(), style="bold green" if report.passed else "bold red"))
    console.print(_table(report, verbose))
    if not report.passed:
        console.print(Text(f"\n{report.explanation()}"))
    for remark in report.remarks():
        console.print(Text(f"\n{remark}"))
    console.print(Text(f"\n{report.closing()}"))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _table(report: Report, verbose: bool) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for heading in ("difference", "relative", "tolerance", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for section, rows in itertools.groupby(report.rows, key=lambda row: row.section):
        table.add_section()
        table.add_row(Text(TITLES[section], style="bold"))
        for line in _lines(list(rows), report.first_divergence, verbose):
            row = line.row
            table.add_row(
                Text(line.where),
                figure(row.max_abs),
                figure(row.max_rel),
                figure(row.tolerance),
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
    if row.passed:
        return Line(_name(row), row, "agrees", "")
    return Line(_name(row), row, "differs", "red")


def _summary_of(name: str, group: Sequence[Row]) -> Line:
    worst = max(group, key=lambda row: row.excess)
    below = _name(worst).removeprefix(name).lstrip("/.") or name
    where = f"{name} ({len(group)}), worst {below}"
    failed = sum(not row.passed for row in group)
    if failed:
        return Line(where, worst, f"{failed} differ", "red")
    return Line(where, worst, "agree", "")


def group_of(row: Row) -> str:
    """The layer that a row belongs to; outside of layers, the first part of its name."""
    name = _name(row)
    layer = re.match(r".*?[/.]\d+(?=[/.]|$)", name)
    return layer[0] if layer else re.split("[/.]", name)[0]


def _name(row: Row) -> str:
    return row.site.removeprefix("gradient/").removeprefix("steps/")
