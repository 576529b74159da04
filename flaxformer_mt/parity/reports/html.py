"""Renders a comparison as a self-contained HTML page."""

import itertools
import math
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from flaxformer_mt.parity.reports.comparison import Comparison, Row, format_difference
from flaxformer_mt.parity.reports.plots import as_svg
from flaxformer_mt.parity.reports.text import TITLES
from flaxformer_mt.plotting import drawing

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


def to_html(comparison: Comparison) -> str:
    """Returns the page; its bars are logarithmic, from 1e-17 to 1."""
    title = f"Parity: {comparison.family}, {comparison.dtype}"
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    parts = *_opening(comparison), *_plot(comparison), *_tables(comparison)
    return drawing.page(title, style, *parts)


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
