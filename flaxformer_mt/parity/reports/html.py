"""Renders a comparison as a self-contained HTML page."""

import itertools
import math
from collections.abc import Iterator
from html import escape

from flaxformer_mt.parity.reports.comparison import Comparison, Row, format_difference
from flaxformer_mt.parity.reports.plots import as_svg
from flaxformer_mt.parity.reports.text import TITLES

# The range of the logarithmic bars: from float64's resolution to a difference of 100%.
_SMALLEST, _LARGEST = 1e-17, 1.0

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1917; --quiet: #6b7280;
  --line: #e5e7eb; --good: #15803d; --bad: #b91c1c; --first: #fee2e2; }
@media (prefers-color-scheme: dark) { :root { --paper: #111418; --ink: #e7e5e4; --quiet: #9ca3af;
  --line: #2b3138; --good: #4ade80; --bad: #f87171; --first: #451a1a; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.quiet { color: var(--quiet); } .agrees { color: var(--good); } .differs { color: var(--bad); }
a { color: inherit; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere;
  font-family: ui-monospace, monospace; }
.scale { width: 10rem; } .bar { display: block; height: .6rem; background: currentColor; }
#first-divergence { background: var(--first); font-weight: bold; }
svg { max-width: 100%; height: auto; }
"""


def to_html(comparison: Comparison) -> str:
    """Returns the page; its bars are logarithmic, from 1e-17 to 1.

    Raises:
      UserError: the comparison has optimizer steps, and matplotlib is not installed.
    """
    title = f"Parity: {comparison.family}, {comparison.dtype}"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">',
            f'<head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head>",
            f"<body><h1>{escape(title)}</h1>",
            *_opening(comparison),
            *_plot(comparison),
            *_tables(comparison),
            "</body></html>\n",
        ]
    )


def _opening(comparison: Comparison) -> Iterator[str]:
    kind = "agrees" if comparison.passed else "differs"
    yield f'<p class="{kind}"><strong>{escape(comparison.headline())}</strong></p>'
    first = comparison.first_divergence
    if comparison.settings:
        yield f"<p>{escape(comparison.explanation())}</p>"
    elif first is not None:
        link = f'<a href="#first-divergence">{escape(first.site)}</a>'
        yield f"<p>First difference: {link}. {escape(comparison.explanation())}</p>"
    for sentence in (*comparison.remarks(), comparison.closing()):
        yield f'<p class="quiet">{escape(sentence)}</p>'


def _plot(comparison: Comparison) -> Iterator[str]:
    if comparison.trajectory is not None:
        yield f"<h2>Training side by side</h2>\n{as_svg(comparison.trajectory)}"


def _tables(comparison: Comparison) -> Iterator[str]:
    for section, rows in itertools.groupby(comparison.rows, key=lambda row: row.section):
        yield f"<h2>{escape(TITLES[section].capitalize())}</h2>\n<table>"
        yield (
            "<thead><tr><th>site</th><th>shape</th><th>difference</th><th>relative</th>"
            '<th class="scale">1e-17 to 1</th><th>tolerance</th><th>result</th></tr></thead><tbody>'
        )
        for row in rows:
            yield _row(row, row is comparison.first_divergence)
        yield "</tbody></table>"


def _row(row: Row, is_first: bool) -> str:
    word = "agrees" if row.passed else "accepted" if row.accepted else "differs"
    shape = "×".join(map(str, row.shape))
    cells = [
        f"<td>{escape(row.site)}</td><td>{shape}</td>",
        f"<td>{format_difference(row.max_abs)}</td><td>{format_difference(row.max_rel)}</td>",
        f'<td class="scale {word}"><span class="bar" style="width: {_width(row.max_rel):.0f}%">',
        f"</span></td><td>{format_difference(row.tolerance)}</td>",
        f'<td class="{word}">{word}{" first" if is_first else ""}</td>',
    ]
    mark = ' id="first-divergence"' if is_first else ""
    return f"<tr{mark}>{''.join(cells)}</tr>"


def _width(relative: float) -> float:
    """Returns the width of a bar in percent: 0 for no difference, 100 for a non-finite one."""
    if not math.isfinite(relative):
        return 100.0
    inside = min(max(relative, _SMALLEST), _LARGEST)
    return 100 * math.log(inside / _SMALLEST) / math.log(_LARGEST / _SMALLEST)
