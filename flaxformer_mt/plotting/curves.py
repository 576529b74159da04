"""Training curves of runs: what is plotted, as a picture, a file or a web page."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.history import Axis, History, Row, read_history
from flaxformer_mt.plotting.panels import COLORS, INK, METRICS, Panels, Style, described
from flaxformer_mt.runs.folder import read_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 3.0, 2.1  # Of a panel, in inches.
# On dark paper, where the others would be too dim.
_ON_DARK = ("#5ab4e8", "#ff8a4c", "#3ddbb0", "#e27fb8", "#f0b429", "#9ad3f5")
_SHOWN_ROWS = 20
_COLUMNS = (*METRICS[:1], "perplexity", *METRICS[1:])
_TABLE = ("loss", "perplexity", "accuracy", "bleu", "chrf")


def _variables(colors: Sequence[str]) -> str:
    return " ".join(f"--run-{index}: {color};" for index, color in enumerate(colors))


_FRAGMENT_STYLE = drawing.filled("curves.css", dark=_variables(_ON_DARK))


class Curves(Panels, drawing.Picture):
    """Curves of runs; in a notebook they show as a picture.

    curves = run.plot(smoothing=0.6)
    curves.save("curves.svg")
    """

    def __repr__(self) -> str:
        return f"Curves({', '.join(self.names())}: {', '.join(self.metrics)})"

    def to_html(self) -> str:
        """Returns the web page: one panel per metric, and a table of the best validations."""
        title = f"Training curves: {', '.join(self.names())}"
        colors = {"light": _variables(COLORS), "dark": _variables(_ON_DARK)}
        style = "\n" + drawing.filled("curves_page.css", **colors)
        return drawing.page(title, style, to_fragment(self))

    def to_image(self, kind: str) -> bytes:
        """Returns an image of all panels."""
        return drawing.to_file(self.figure(), kind)

    def _repr_png_(self) -> bytes:
        return self.to_image("png")


def plot_curves(
    folders: Sequence[str | Path],
    metrics: Sequence[str] = (),
    axis: Axis = "steps",
    smoothing: float = 0.0,
) -> Curves:
    """Returns the curves of runs, to be saved or shown; arguments and errors as of `Run.plot`.

    `metrics` are by default `METRICS`, as far as the runs have them; `axis` is what it calls `x`.
    """
    if not folders:
        raise UserError("there are no curves to plot: name at least one run folder")
    if axis not in get_args(Axis):
        raise UserError(f"x={axis!r}: choose {', '.join(get_args(Axis))}")
    if not isinstance(smoothing, int | float):
        raise TypeError(f"smoothing must be a number, not {type(smoothing).__name__}")
    if not 0 <= smoothing < 1:
        raise UserError(f"smoothing={smoothing:g}: give a number from 0 to below 1")
    histories = [read_history(folder) for folder in folders]
    known = {name for history in histories for name in history.metrics()}
    for name in metrics:
        if name not in known:
            hint = suggestion(name, known) or f"; there are {', '.join(sorted(known))}"
            raise UserError(f"no run has the metric {name}{hint}")
    chosen = list(dict.fromkeys(metrics)) or [name for name in METRICS if name in known]
    curves = Curves(histories, chosen, axis, smoothing)
    for history in histories:
        history.positions(np.zeros(1), axis)  # Raises now what `figure` would raise.
    return curves


def run_summary(folder: Path) -> str:
    """Returns what notebooks show of a run, as HTML: its configuration in short, and its curves.

    Instead of curves it has the reason why there are none: no metrics, or no matplotlib.
    """
    lines = [
        f"<p><strong>{escape(str(folder))}</strong>: {escape(_described(read_config(folder)))}"
    ]
    try:
        lines.append(to_fragment(plot_curves([folder])))
    except UserError as error:
        lines.append(f"<p>{escape(str(error))}")
    return "\n".join(lines)


def _described(config: ExperimentConfig) -> str:
    data, model = config.data, config.model
    layers = f"{model.num_encoder_layers} + {model.num_decoder_layers} layers"
    languages = f"{data.source_language} to {data.target_language}, "
    return f"{languages * model.has_inputs}{layers} of width {model.d_model}"


def to_fragment(curves: Panels) -> str:
    """Returns the curves as an element of a page, which takes its colours from there."""
    return "\n".join(
        [
            f'<style>{_FRAGMENT_STYLE}</style><div class="fmt-curves">',
            *_key(curves),
            '<div class="panels">',
            *(_panel(curves, name) for name in curves.metrics),
            "</div>",
            _best_validations(curves),
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


def _best_validations(curves: Panels) -> str:
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
        cells += [_value(best, metric) for metric in valid]
        cells += [_value(_test(history), metric) for metric in test]
        rows.append([name, *cells])
    return _table(heads, rows)


def _test(history: History) -> Row:
    rows = history.of("test")
    return rows[-1] if rows else {}


def _value(row: Row, name: str) -> str:
    """Returns a metric as a cell of the table."""
    value = row.get(name)
    return "–" if value is None else described(name).format(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
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


def rows_table(rows: Sequence[Row]) -> str:
    """Returns lines of `metrics.jsonl` as an HTML table; of many, the last ones."""
    names = [name for name in _COLUMNS if any(name in row for row in rows)]
    shown = rows[-_SHOWN_ROWS:]
    cells = [
        [f"{row['step']:,}", row["split"], *(_value(row, name) for name in names)] for row in shown
    ]
    omitted = len(rows) - len(shown)
    note = f"<p>the last {len(shown)} of {len(rows):,} rows" if omitted else ""
    heads = ["step", "split", *(described(name).title for name in names)]
    table = _table(heads, cells)
    return f'<style>{_FRAGMENT_STYLE}</style><div class="fmt-curves">{table}{note}</div>'
