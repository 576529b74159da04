"""Renders a comparison as a self-contained HTML page."""

import itertools
import math
import re
from collections.abc import Iterator
from html import escape

from flaxformer_mt.parity.reports.comparison import Comparison, Row, format_difference
from flaxformer_mt.parity.reports.plots import as_svg
from flaxformer_mt.parity.reports.text import TITLES
from flaxformer_mt.plotting import drawing

# The range of the logarithmic bars: from float64's resolution to a difference of 100%.
_SMALLEST, _LARGEST = 1e-17, 1.0

_HEADS = (
    ("site", ""),
    ("shape", ""),
    ("difference", ""),
    ("relative", ""),
    ("1e-17 to 1", ' class="scale"'),
    ("tolerance", ""),
    ("result", ""),
)

_STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#fdfcfa, #13161b);
  --ink: light-dark(#1c2230, #e9e7e2); --quiet: light-dark(#59616f, #a0a8b5);
  --line: light-dark(#e2ded6, #2e343d); --good: light-dark(#15703a, #5ad38b);
  --bad: light-dark(#b42318, #ff9c92); --accepted: light-dark(#8a4b08, #f0b35e);
  --first: light-dark(#fdeae7, #3d1d1b); }
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  max-width: 76rem; margin: 0 auto; padding: 1.25rem clamp(1rem, 4vw, 2.5rem) 3rem;
  -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.25rem; margin: 0 0 .5rem; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
h1, p { overflow-wrap: break-word; max-width: 60rem; } p { margin: .5rem 0; }
.quiet { color: var(--quiet); font-size: .875rem; }
.agrees { color: var(--good); } .differs { color: var(--bad); }
.accepted { color: var(--accepted); }
a { color: inherit; } :focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: baseline; white-space: nowrap; }
th { color: var(--quiet); font-weight: normal; position: sticky; top: 0; background: var(--paper); }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal;
  overflow-wrap: break-word; }
td:first-child { font: .8125rem/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
th:last-child, td:last-child { padding-right: 0; }
.scale, th.scale { width: 9rem; text-align: left; }
.bar { display: block; height: .5rem; min-width: 1px; background: currentColor;
  border-radius: 2px; }
#first-divergence td { background: var(--first); font-weight: 600; }
#first-divergence td:first-child { box-shadow: -.5rem 0 var(--first); }
#first-divergence td:last-child { box-shadow: .5rem 0 var(--first); }
.plot { overflow-x: auto; } .plot svg { display: block; width: 100%; min-width: 40rem;
  height: auto; }
@media (max-width: 48rem) {
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)) auto; gap: 0 .75rem;
    padding: .5rem 0; border-bottom: 1px solid var(--line); }
  td { padding: 0; border: 0; text-align: left; min-width: 0; }
  td:first-child { grid-column: 1 / -2; order: -2; }
  td:last-child { order: -1; text-align: right; }
  td[data-name]::before { content: attr(data-name); display: block; color: var(--quiet);
    font-size: .75rem; font-weight: normal; }
  .scale { order: 1; grid-column: 1 / -1; width: auto; padding-top: .3rem; }
  #first-divergence { background: var(--first); margin: 0 -.5rem; padding: .5rem; }
}
"""


def to_html(comparison: Comparison) -> str:
    """Returns the page; its bars are logarithmic, from 1e-17 to 1."""
    title = f"Parity: {comparison.family}, {comparison.dtype}"
    parts = *_opening(comparison), *_plot(comparison), *_tables(comparison)
    return drawing.page(title, _STYLE, *parts)


def _opening(comparison: Comparison) -> Iterator[str]:
    kind = "agrees" if comparison.passed else "differs"
    yield f'<p class="{kind}"><strong>{_breakable(comparison.headline())}</strong></p>'
    first = comparison.first_divergence
    if comparison.settings:
        yield f"<p>{_breakable(comparison.explanation())}</p>"
    elif first is not None:
        link = f'<a href="#first-divergence">{_breakable(first.site)}</a>'
        yield f"<p>First difference: {link}. {_breakable(comparison.explanation())}</p>"
    yield from _findings(comparison)
    for sentence in (*comparison.remarks(), comparison.closing()):
        yield f'<p class="quiet">{_breakable(sentence)}</p>'


def _findings(comparison: Comparison) -> Iterator[str]:
    introduction, *others = comparison.further() or [""]
    if introduction:
        yield f"<p>{_breakable(introduction)}</p>"
    if others:
        yield f"<ul>{''.join(f'<li>{_breakable(sentence)}</li>' for sentence in others)}</ul>"


def _plot(comparison: Comparison) -> Iterator[str]:
    if comparison.trajectory is not None:
        plot = as_svg(comparison.trajectory)
        yield "<h2>Training side by side</h2>"
        yield '<div class="plot" role="region" aria-label="Training side by side" tabindex="0">'
        yield f"{plot}</div>"


def _tables(comparison: Comparison) -> Iterator[str]:
    for section, rows in itertools.groupby(comparison.rows, key=lambda row: row.section):
        # Roles: on a phone, where rows are grids, browsers forget that there is a table.
        yield f'<h2>{escape(TITLES[section].capitalize())}</h2>\n<table role="table">'
        heads = "".join(f'<th role="columnheader"{mark}>{name}</th>' for name, mark in _HEADS)
        yield f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead><tbody role="rowgroup">'
        for row in rows:
            yield _row(row, row is comparison.first_divergence)
        yield "</tbody></table>"


def _row(row: Row, is_first: bool) -> str:
    word = row.verdict
    shape = "×".join(map(str, row.shape))
    bar = f'<span class="bar" style="width: {_width(row.max_rel):.0f}%"></span>'
    cells = [
        _cell(_breakable(row.site)),
        _cell(shape, 'data-name="shape"'),
        _cell(format_difference(row.max_abs), 'data-name="difference"'),
        _cell(format_difference(row.max_rel), 'data-name="relative"'),
        _cell(bar, f'class="scale {word}"'),
        _cell(format_difference(row.tolerance), 'data-name="tolerance"'),
        _cell(f"{word}{' first' if is_first else ''}", f'class="{word}"'),
    ]
    mark = ' id="first-divergence"' if is_first else ""
    return f'<tr role="row"{mark}>{"".join(cells)}</tr>'


def _cell(content: str, attributes: str = "") -> str:
    return f'<td role="cell" {attributes}>{content}</td>'


def _breakable(text: str) -> str:
    return re.sub(
        r"(?<=\w/)(?=\w)|(?<=[A-Za-z]\.|\d\.)(?=[A-Za-z])|(?<=\w)(?=_\w)", "<wbr>", escape(text)
    )


def _width(relative: float) -> float:
    if not math.isfinite(relative):
        return 100.0
    inside = min(max(relative, _SMALLEST), _LARGEST)
    return 100 * math.log(inside / _SMALLEST) / math.log(_LARGEST / _SMALLEST)
