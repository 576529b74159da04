"""Training curves as a self-contained web page, and as HTML for a notebook."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.history import History, Row
from flaxformer_mt.plotting.panels import COLORS, INK, Panels, Style, described

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 3.0, 2.1  # Of a panel, in inches.
# On dark paper, where the others would be too dim.
_ON_DARK = ("#5ab4e8", "#ff8a4c", "#3ddbb0", "#e27fb8", "#f0b429", "#9ad3f5")
_TABLE = ("loss", "perplexity", "accuracy", "bleu", "chrf")


def _variables(colors: Sequence[str]) -> str:
    return " ".join(f"--run-{index}: {color};" for index, color in enumerate(colors))


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --quiet: #59636e; --line: #d8dee4;
  %(light)s }
@media (prefers-color-scheme: dark) { :root { --paper: #111418; --ink: #e6e8eb; --quiet: #9aa4af;
  --line: #2d333b; %(dark)s } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 84rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: break-word; }
"""
_DARK_NOTEBOOKS = '[data-jp-theme-light="false"] .fmt-curves, .vscode-dark .fmt-curves'
FRAGMENT_STYLE = (
    f"{_DARK_NOTEBOOKS} {{ {_variables(_ON_DARK)} }}"
    + """
.fmt-curves { font-variant-numeric: tabular-nums; }
.fmt-curves .panels { display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr)); }
.fmt-curves figure { margin: 0; }
.fmt-curves figcaption { display: flex; justify-content: space-between; gap: 1rem; }
.fmt-curves .unit { color: var(--quiet, inherit); font-size: .85em; }
.fmt-curves svg { display: block; width: 100%; height: auto; }
.fmt-curves .key { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; padding: 0;
  list-style: none; }
.fmt-curves .key svg { display: inline-block; width: 2.2rem; height: 1rem; vertical-align: -.2rem; }
.fmt-curves .key li { overflow-wrap: anywhere; }
.fmt-curves .scroll { overflow-x: auto; margin-top: 1.5rem; }
.fmt-curves table { border-collapse: collapse; }
.fmt-curves th, .fmt-curves td { padding: .2rem .8rem .2rem 0; text-align: right;
  border-bottom: 1px solid var(--line, #8886); background: none; }
.fmt-curves th:first-child { text-align: left; min-width: 6rem; overflow-wrap: anywhere; }
"""
)


def to_page(curves: Panels) -> str:
    """Returns the page: one panel per metric, and a table of the best validations."""
    title = f"Training curves: {', '.join(curves.names())}"
    style = _STYLE % {"light": _variables(COLORS), "dark": _variables(_ON_DARK)}
    return drawing.page(title, style, to_fragment(curves))


def to_fragment(curves: Panels) -> str:
    """Returns the curves as an element of a page, which takes its colours from there."""
    return "\n".join(
        [
            f'<style>{FRAGMENT_STYLE}</style><div class="fmt-curves">',
            *_key(curves),
            '<div class="panels">',
            *(_panel(curves, name) for name in curves.metrics),
            "</div>",
            _table(curves),
            "</div>",
        ]
    )


def _panel(curves: Panels, name: str) -> str:
    figure = drawing.new_figure(_WIDTH, _HEIGHT)
    curves.draw(figure.subplots(), name)
    metric = described(name)
    names = ", ".join(curves.names())
    return (
        f"<figure><figcaption><strong>{escape(metric.title)}</strong>"
        f'<span class="unit">{escape(metric.unit)}</span></figcaption>'
        f"{_svg(figure, f'{names} {name}', f'{metric.title} of {names}')}</figure>"
    )


def _key(curves: Panels) -> Iterator[str]:
    runs = {name: Style.of(index).validation() for index, name in enumerate(curves.names())}
    yield '<ul class="key">'
    for label, style in (*runs.items(), *curves.kinds().items()):
        figure = drawing.new_figure(0.5, 0.2)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        axes.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style)
        yield f"<li>{_svg(figure, label, '')} {escape(label)}</li>"
    yield "</ul>"


def _svg(figure: "Figure", name: str, label: str) -> str:
    colors = {INK: "currentColor", "#ffffff": "var(--paper, #fff)"}
    colors |= {color: f"var(--run-{index}, {color})" for index, color in enumerate(COLORS)}
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return drawing.to_inline_svg(figure, name, colors).replace("<svg", f"<svg {role}", 1)


def _table(curves: Panels) -> str:
    histories = curves.histories
    valid = [name for name in _TABLE if any(name in history.best() for history in histories)]
    test = [name for name in ("bleu", "chrf") if any(name in _test(each) for each in histories)]
    heads = ["run", "steps", *(["best checkpoint"] * bool(valid))]
    heads += [f"valid {described(name).title}" for name in valid]
    heads += [f"test {described(name).title}" for name in test]
    rows = []
    for name, history in zip(curves.names(), histories, strict=True):
        best = history.best()
        cells = [f"{history.last_step:,}"]
        cells += [f"step {history.best_step:,}" if best else "–"] * bool(valid)
        cells += [value_of(best, metric) for metric in valid]
        cells += [value_of(_test(history), metric) for metric in test]
        rows.append([name, *cells])
    return table(heads, rows)


def _test(history: History) -> Row:
    rows = history.of("test")
    return rows[-1] if rows else {}


def value_of(row: Row, name: str) -> str:
    """Returns a metric as a cell of the table."""
    value = row.get(name)
    return "–" if value is None else described(name).format(value)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table that scrolls where it is too wide; the first cell of a row is its head."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(_table_row(*row) for row in rows)
    return (
        '<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _table_row(head: str, *cells: str) -> str:
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(head)}</th>{columns}</tr>\n'
