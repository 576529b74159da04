"""The report of a comparison, as terminal text, JSON or HTML."""

import collections
import dataclasses
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flaxformer_mt.parity.reports.comparison import Comparison, Row, Section, format_difference
from flaxformer_mt.parity.reports.plots import as_svg
from flaxformer_mt.plotting import drawing

TITLES: dict[Section, str] = {
    "values": "values, in the order of computation",
    "losses": "losses, by convention",
    "gradients": "gradients, relative to the largest",
    "steps": "optimizer steps, each at its worst",
}

_STYLES = {"agrees": "", "accepted": "yellow", "differs": "red"}


# The range of the logarithmic bars: from float64's resolution to a difference of 100%.
_SMALLEST, _LARGEST = 1e-17, 1.0

_COLUMNS = {
    "site": "",
    "shape": 'data-name="shape"',
    "difference": 'data-name="difference"',
    "relative": 'data-name="relative"',
    "1e-17 to 1": 'class="scale {result}"',
    "tolerance": 'data-name="tolerance"',
    "result": 'class="{result}"',
}
"""The headings, and the attributes of their cells."""


class Report(Comparison):
    """A comparison that can be printed and written."""

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, verbose: bool = False, width: int = 100, color: bool = False) -> str:
        """Returns a table for the terminal; unless `verbose`, one line per layer that agrees."""
        output = io.StringIO()
        console = Console(
            file=output, width=width, force_terminal=color, no_color=not color, highlight=False
        )
        console.print(Text(self.headline(), style="bold green" if self.passed else "bold red"))
        console.print(_table(self, verbose))
        explanation = [] if self.passed else [self.explanation()]
        for sentence in (
            *explanation,
            *self.further(),
            *self.remarks(),
            self.closing(),
        ):
            console.print(Text(f"\n{sentence}"))
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def to_html(self) -> str:
        """Returns a self-contained HTML page with all rows and a plot of the steps, if any."""
        title = f"Parity: {self.family}, {self.dtype}"
        style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
        parts = *_opening(self), *_plot(self), *_tables(self)
        return drawing.page(title, style, *parts)

    def to_junit(self) -> str:
        """Returns JUnit XML: one test case per value."""
        name = f"parity of {self.family} in {self.dtype}"
        root = ElementTree.Element("testsuites", name=name)
        settings = self.settings
        if settings:
            suite = _suite(root, "settings", {"tests": len(settings), "failures": len(settings)})
            for each in settings:
                case = _case(suite, "settings", each.name)
                ElementTree.SubElement(case, "failure", message=str(each))
        for section, members in itertools.groupby(self.rows, key=lambda row: row.section):
            rows = list(members)
            verdicts = collections.Counter(row.verdict for row in rows)
            failures, skipped = verdicts["differs"], verdicts["accepted"]
            counts = {"tests": len(rows), "failures": failures, "skipped": skipped}
            suite = _suite(root, section, counts)
            for row in rows:
                case = _case(suite, section, row.site)
                if row.verdict == "accepted":
                    ElementTree.SubElement(case, "skipped", message=f"accepted: {row.accepted}")
                elif row.verdict == "differs":
                    numbers = map(format_difference, (row.max_abs, row.max_rel, row.tolerance))
                    message = "difference {}, relative {}, tolerance {}".format(*numbers)
                    failure = ElementTree.SubElement(case, "failure", message=message)
                    if row is self.first_divergence:
                        failure.text = self.explanation()
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

    def to_json(self) -> str:
        """Returns all rows and the summary as JSON; non-finite numbers are strings."""
        first, steps = self.first_divergence, self.trajectory
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "passed": self.passed,
            "summary": self.summary,
            "first_divergence": first and first.site,
            "rows": [
                row._asdict() | {"section": row.section, "passed": row.passed} for row in self.rows
            ],
            "trajectory": steps
            and {
                "tolerance": steps.tolerance,
                "first_divergence": steps.first_divergence,
                "ours": steps.ours,
                "theirs": steps.theirs,
                "relative_differences": steps.differences(),
            },
        }
        return json.dumps(json_values(values), indent=2, allow_nan=False) + "\n"


def json_values(value: Any) -> Any:
    """Replaces named tuples and arrays, and numbers that JSON lacks by "inf", "-inf" and "nan"."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: json_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [json_values(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


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


def _opening(comparison: Comparison) -> Iterator[str]:
    kind = "agrees" if comparison.passed else "differs"
    yield f'<p class="{kind}"><strong>{_breakable(comparison.headline())}</strong></p>'
    first = comparison.first_divergence
    if comparison.settings:
        yield f"<p>{_breakable(comparison.explanation())}</p>"
    elif first is not None:
        link = f'<a href="#first-divergence">{_breakable(first.site)}</a>'
        yield f"<p>First difference: {link}. {_breakable(comparison.explanation())}</p>"
    introduction, *others = comparison.further() or [""]
    if introduction:
        yield f"<p>{_breakable(introduction)}</p>"
    if others:
        yield f"<ul>{''.join(f'<li>{_breakable(sentence)}</li>' for sentence in others)}</ul>"
    for sentence in (*comparison.remarks(), comparison.closing()):
        yield f'<p class="quiet">{_breakable(sentence)}</p>'


def _plot(comparison: Comparison) -> Iterator[str]:
    if comparison.trajectory is not None:
        yield "<h2>Training side by side</h2>"
        yield '<div class="plot" role="region" aria-label="Training side by side" tabindex="0">'
        yield f"{as_svg(comparison.trajectory)}</div>"


def _tables(comparison: Comparison) -> Iterator[str]:
    for section, rows in itertools.groupby(comparison.rows, key=lambda row: row.section):
        # Roles: on a phone, where rows are grids, browsers forget that there is a table.
        yield f'<h2>{escape(TITLES[section].capitalize())}</h2>\n<table role="table">'
        heads = "".join(
            f'<th role="columnheader"{" class=scale" * ("scale" in attributes)}>{name}</th>'
            for name, attributes in _COLUMNS.items()
        )
        yield f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead><tbody role="rowgroup">'
        for row in rows:
            yield _row(row, row is comparison.first_divergence)
        yield "</tbody></table>"


def _row(row: Row, is_first: bool) -> str:
    contents = (
        _breakable(row.site),
        "×".join(map(str, row.shape)),
        format_difference(row.max_abs),
        format_difference(row.max_rel),
        f'<span class="bar" style="width: {_width(row.max_rel):.0f}%"></span>',
        format_difference(row.tolerance),
        f"{row.verdict}{' first' if is_first else ''}",
    )
    cells = (
        f'<td role="cell" {attributes.format(result=row.verdict)}>{content}</td>'
        for attributes, content in zip(_COLUMNS.values(), contents, strict=True)
    )
    mark = ' id="first-divergence"' if is_first else ""
    return f'<tr role="row"{mark}>{"".join(cells)}</tr>'


def _breakable(text: str) -> str:
    return re.sub(
        r"(?<=\w/)(?=\w)|(?<=[A-Za-z]\.|\d\.)(?=[A-Za-z])|(?<=\w)(?=_\w)", "<wbr>", escape(text)
    )


def _width(relative: float) -> float:
    if not math.isfinite(relative):
        return 100.0
    inside = min(max(relative, _SMALLEST), _LARGEST)
    return 100 * math.log(inside / _SMALLEST) / math.log(_LARGEST / _SMALLEST)


def _suite(root: ElementTree.Element, name: str, counts: dict[str, int]) -> ElementTree.Element:
    attributes = {"failures": 0, "errors": 0, "skipped": 0} | counts
    numbers = {key: str(count) for key, count in attributes.items()}
    return ElementTree.SubElement(root, "testsuite", {"name": name} | numbers)


def _case(suite: ElementTree.Element, section: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=f"parity.{section}", name=name)
