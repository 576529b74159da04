"""Training curves of runs: one panel per metric, as a picture, a file or a web page."""

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from flaxformer_mt import atomic
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.history import Axis, History, Row, read_history, smoothed
from flaxformer_mt.runs.folder import read_config
from flaxformer_mt.runs.metrics_file import CHANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2328"
# Told apart with all common kinds of color blindness (Okabe and Ito 2008; the purple is darker,
# after Tol 2021).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa3377", "#e69f00", "#56b4e9")
# On dark paper, where the others would be too dim.
_ON_DARK = ("#5ab4e8", "#ff8a4c", "#3ddbb0", "#e27fb8", "#f0b429", "#9ad3f5")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINES = ("solid", "dashed", "dotted", "dashdot")
_AXES = {"steps": "step", "tokens": "target tokens", "hours": "hours of training steps"}
_PANEL = 2.75, 2.1  # Width and height in inches.
_MAX_COLUMNS = 4
_LOG_RATIO = 20.0
_NAME_WIDTH = 30  # Characters of a line in the legend.
_SHOWN_ROWS = 20
_STYLE: dict[Any, Any] = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "grid.color": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5,
    "axes.labelsize": 8, "legend.fontsize": 8, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.12, "grid.linewidth": 0.5,
    "text.parse_math": False,  # Names of folders may have dollars.
}  # fmt: skip


class Metric(NamedTuple):
    """How a metric is plotted."""

    title: str
    unit: str = ""
    scale: float = 1.0
    """Factor from the metric to the unit."""
    is_log: bool = False
    """Whether the axis is logarithmic if the values are far apart."""
    starts_at_0: bool = False
    is_noisy: bool = True
    """Whether it is smoothed."""

    def format(self, value: float) -> str:
        """Returns a value with four digits, in the unit of the panel."""
        number = value * self.scale
        if abs(number) >= 10_000:
            return f"{number:,.0f}"
        return f"{number:.4g}{'%' if self.unit.startswith('%') else ''}"


METRICS = (
    "loss",
    "accuracy",
    "bleu",
    "chrf",
    "learning_rate",
    "gradient_norm",
    "target_tokens_per_second",
)
"""The metrics that are plotted unless others are asked for, as far as a run has them."""

_COLUMNS = (*METRICS[:1], "perplexity", *METRICS[1:])
_TABLE = ("loss", "perplexity", "accuracy", "bleu", "chrf")
_SPECIAL = {
    "loss": Metric("loss", "nats per token"),
    "cross_entropy": Metric("cross-entropy", "nats per token"),
    "perplexity": Metric("perplexity", is_log=True),
    "accuracy": Metric("accuracy", "% of tokens", 100),
    "bleu": Metric("BLEU"),
    "chrf": Metric("chrF"),
    "seq2seq_acc": Metric("seq2seq_acc", "% of positions", 100),
    "teacher_forced_bleu": Metric("teacher-forced BLEU"),
    "learning_rate": Metric("learning rate", starts_at_0=True, is_noisy=False),
    "gradient_norm": Metric("gradient norm", is_log=True),
    "target_tokens_per_second": Metric("speed", "target tokens/s", starts_at_0=True),
    "target_tokens_per_second_per_device": Metric(
        "speed per device", "target tokens/s", starts_at_0=True
    ),
    "mfu": Metric("model flops utilization", "%", 100),
    "padding_fraction": Metric("padding", "% of positions", 100),
    "data_wait_fraction": Metric("waiting for data", "% of the time", 100),
    "memory_bytes": Metric("memory", "GiB", 2.0**-30, starts_at_0=True),
}


def described(name: str) -> Metric:
    """Returns how a metric is plotted."""
    return _SPECIAL.get(name, Metric(name.replace("_", " ")))


_BEST: dict[str, Any] = {
    "linestyle": "none", "marker": "o", "markersize": 9.0, "markerfacecolor": "none",
    "markeredgecolor": INK, "markeredgewidth": 0.9,
}  # fmt: skip
_CHANGED: dict[str, Any] = {"color": INK, "linestyle": ":", "linewidth": 0.9, "alpha": 0.7}
_TRAINING: dict[str, Any] = {"marker": "", "linewidth": 1.0, "alpha": 0.8}
"""What differs between the training curve of a run and that of its validations."""


def _style(index: int) -> dict[str, Any]:
    """Returns how the validations of a run are drawn, so that runs differ also without colors."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": _LINES[index // len(COLORS) % len(_LINES)],
        "linewidth": 1.8,
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


@dataclasses.dataclass(frozen=True, repr=False)
class Curves(drawing.Picture):
    """Curves of runs; in a notebook they show as a picture.

    curves = run.plot(smoothing=0.6)
    curves.save("curves.svg")
    """

    histories: Sequence[History]
    metrics: Sequence[str]
    """One panel each."""
    axis: Axis
    smoothing: float

    def __repr__(self) -> str:
        return f"Curves({', '.join(self.names())}: {', '.join(self.metrics)})"

    def names(self) -> list[str]:
        """Returns a name of each run: that of its folder, or its path if names are equal."""
        names = [history.folder.resolve().name for history in self.histories]
        return [
            name if names.count(name) == 1 else str(history.folder)
            for name, history in zip(names, self.histories, strict=True)
        ]

    def figure(self) -> "Figure":
        """Returns all panels as a figure of matplotlib."""
        cells = len(self.metrics) + 1  # The last one is for the legend.
        num_rows = math.ceil(cells / _MAX_COLUMNS)
        columns = math.ceil(cells / num_rows)
        figure = drawing.new_figure(_PANEL[0] * columns, _PANEL[1] * num_rows)
        from matplotlib import rc_context

        with rc_context(_STYLE):
            grid = list(figure.subplots(num_rows, columns, squeeze=False).flat)
            for index, (axes, name) in enumerate(zip(grid, self.metrics, strict=False)):
                self._draw(axes, name)
                if index + columns >= len(self.metrics):  # No other panel is below.
                    axes.set_xlabel(_AXES[self.axis])
            for axes in grid[len(self.metrics) :]:
                axes.axis("off")
            self._draw_legend(grid[len(self.metrics)])
        return figure

    def _draw(self, axes: "Axes", name: str) -> None:
        metric = described(name)
        axes.set_title(metric.title, loc="left", fontsize=9, fontweight="bold")
        axes.set_title(metric.unit, loc="right", fontsize=7.5)
        for index, history in enumerate(self.histories):
            style = _style(index)
            x, y = history.curve(name, "train", self.axis)
            y = _shown(y, metric)
            if self.smoothing and metric.is_noisy:
                axes.plot(x, y, **{**style, **_TRAINING, "alpha": 0.25})
                y = smoothed(y, self.smoothing)
            axes.plot(x, y, **{**style, **_TRAINING})
            x, y = history.curve(name, "valid", self.axis)
            axes.plot(x, _shown(y, metric), **style)
            is_best = x == history.positions(np.array([history.best_step or np.nan]), self.axis)
            axes.plot(x[is_best], _shown(y[is_best], metric), zorder=3, **_BEST)
            changed = np.array([row["step"] for row in history.of(CHANGE)], float)
            for position in history.positions(changed, self.axis):
                axes.axvline(position, **_CHANGED)
        low, high = axes.dataLim.intervaly
        if metric.is_log and high > _LOG_RATIO * low:
            axes.set_yscale("log")
        elif metric.starts_at_0:
            axes.set_ylim(bottom=0)
        ends = (each.positions(np.array([each.last_step]), self.axis) for each in self.histories)
        axes.set_xlim(0, 1.05 * np.concatenate(list(ends)).max() or 1)
        axes.xaxis.set_major_formatter(_number)
        axes.yaxis.set_major_formatter(_number)
        axes.yaxis.set_minor_formatter("")

    def _draw_legend(self, axes: "Axes") -> None:
        from matplotlib.lines import Line2D

        kinds: list[tuple[str, dict[str, Any]]] = []
        for index, (name, history) in enumerate(zip(self.names(), self.histories, strict=True)):
            lines = textwrap.wrap(name, _NAME_WIDTH)
            value = history.best().get(history.best_metric)
            if value is not None:
                metric = described(history.best_metric)
                lines.append(f"{metric.title} {metric.format(value)} at step {history.best_step:,}")
            kinds.append(("\n ".join(lines), _style(index)))
        neutral = {**_style(0), "color": INK}
        kinds.append(("training", {**neutral, **_TRAINING}))
        if any(history.of("valid") for history in self.histories):
            kinds.append(("validation", neutral))
        if any(history.best_step is not None for history in self.histories):
            kinds.append(("best checkpoint", _BEST))
        if any(history.of(CHANGE) for history in self.histories):
            kinds.append(("options changed", _CHANGED))
        # The space: matplotlib leaves out labels that begin with an underscore.
        axes.legend(
            handles=[Line2D([], [], label=f" {label}", **drawn) for label, drawn in kinds],
            loc="center left", bbox_to_anchor=(0, 0.5), handlelength=2.2, labelspacing=0.7,
        )  # fmt: skip

    def to_html(self) -> str:
        """Returns the web page: one panel per metric, and a table of the best validations."""
        title = f"Training curves: {', '.join(self.names())}"
        style = drawing.filled(
            "curves_page.css", light=_variables(COLORS), dark=_variables(_ON_DARK)
        )
        return drawing.page(title, f"\n{style}", _fragment(self))

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
    return Curves(histories, chosen, axis, smoothing)


def save_rate_range(
    path: Path, rates: np.ndarray, losses: np.ndarray, smoothed: np.ndarray, peak: float
) -> None:
    """Writes the plot of a learning-rate range test as a PNG file.

    It has losses over learning rates, all [N], and the suggested peak.
    """
    figure = drawing.new_figure(5, 3.2)
    axes = figure.subplots()
    axes.plot(rates, losses, color=COLORS[0], alpha=0.3, linewidth=1)
    axes.plot(rates, smoothed, color=COLORS[0], linewidth=1.8)
    axes.axvline(peak, color=INK, linestyle="dashed", linewidth=1)
    axes.annotate(f" {peak:.1e}", (peak, losses.max()), color=INK, fontsize=8)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss, nats per token")
    atomic.write_bytes(path, drawing.to_file(figure, "png"))


def _shown(values: np.ndarray, metric: Metric) -> np.ndarray:
    """Returns values in the unit of the panel; those that a logarithmic axis lacks are NaN."""
    scaled = values * metric.scale
    return np.where(scaled > 0, scaled, np.nan) if metric.is_log else scaled


def _number(value: float, position: float | None = None) -> str:
    for lowest, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= lowest:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def run_summary(folder: Path) -> str:
    """Returns what notebooks show of a run, as HTML: its configuration in short, and its curves.

    Instead of curves it has the reason why there are none: no metrics, or no matplotlib.
    """
    summary = (
        f"<p><strong>{escape(str(folder))}</strong>: {escape(_described(read_config(folder)))}\n"
    )
    try:
        return summary + _fragment(plot_curves([folder]))
    except UserError as error:
        return f"{summary}<p>{escape(str(error))}"


def _described(config: ExperimentConfig) -> str:
    data, model = config.data, config.model
    layers = f"{model.num_encoder_layers} + {model.num_decoder_layers} layers"
    languages = f"{data.source_language} to {data.target_language}, "
    return f"{languages * model.has_inputs}{layers} of width {model.d_model}"


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
    return _element(_table(heads, cells) + note)


def _fragment(curves: Curves) -> str:
    """Returns the curves as an element of a page, which takes its colors from there."""
    names = ", ".join(curves.names())
    colors = {INK: "currentColor", "#ffffff": "var(--paper, #fff)"}
    colors |= {color: f"var(--run-{index}, {color})" for index, color in enumerate(COLORS)}
    svg = drawing.to_inline_svg(curves.figure(), names, colors)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(f"Curves of {names}")}"', 1)
    return _element(f'<div class="scroll">{svg}</div>\n{_best_validations(curves)}')


def _element(content: str) -> str:
    style = drawing.filled("curves.css", dark=_variables(_ON_DARK))
    return f'<style>{style}</style><div class="fmt-curves">{content}</div>'


def _variables(colors: Sequence[str]) -> str:
    return " ".join(f"--run-{index}: {color};" for index, color in enumerate(colors))


def _best_validations(curves: Curves) -> str:
    histories = curves.histories
    tests = [next(reversed(history.of("test")), {}) for history in histories]
    valid = [name for name in _TABLE if any(name in history.best() for history in histories)]
    tested = [name for name in ("bleu", "chrf") if any(name in test for test in tests)]
    heads = ["run", "steps", *(["best checkpoint"] * bool(valid))]
    heads += [f"valid {described(name).title}" for name in valid]
    heads += [f"test {described(name).title}" for name in tested]
    rows = []
    for name, history, test in zip(curves.names(), histories, tests, strict=True):
        best = history.best()
        cells = [name, f"{history.last_step:,}"]
        cells += [f"step {history.best_step:,}" if best else "–"] * bool(valid)
        cells += [_value(best, metric) for metric in valid]
        rows.append([*cells, *(_value(test, metric) for metric in tested)])
    return _table(heads, rows)


def _value(row: Row, name: str) -> str:
    """Returns a metric as a cell of the table."""
    value = row.get(name)
    return "–" if value is None else described(name).format(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table that scrolls where it is too wide; the first cell of a row is its head."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for first, *cells in rows
    )
    return (
        '<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )
