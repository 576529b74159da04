"""Panels of training curves: small multiples, one per metric, with several runs in each."""

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.history import Axis, History, smoothed
from flaxformer_mt.runs.changes import SPLIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2328"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa3377", "#e69f00", "#56b4e9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINES = ("solid", "dashed", "dotted", "dashdot")
_AXES = {"steps": "step", "tokens": "target tokens", "hours": "hours of training steps"}
_PANEL = 2.75, 2.1  # Width and height in inches.
_MAX_COLUMNS = 4
_LOG_RATIO = 20.0
_NAME_WIDTH = 30  # Characters of a line in the legend.


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


class Style(NamedTuple):
    """How the curves of a run look, so that runs are told apart also without colours."""

    color: str
    """Told apart with all common kinds of colour blindness (Okabe and Ito 2008; the purple is
    darker, after Tol 2021)."""
    line: str
    marker: str
    """Of validations."""

    @classmethod
    def of(cls, index: int) -> "Style":
        """Returns the style of the run of that index; after six, lines are dashed."""
        line = _LINES[index // len(COLORS) % len(_LINES)]
        return cls(COLORS[index % len(COLORS)], line, _MARKERS[index % len(_MARKERS)])

    def training(self) -> dict[str, Any]:
        """Returns how matplotlib draws the training metrics."""
        return {"color": self.color, "linestyle": self.line, "linewidth": 1.0, "alpha": 0.8}

    def validation(self) -> dict[str, Any]:
        """Returns how matplotlib draws the validation metrics."""
        edge = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.6}
        line = {"color": self.color, "linestyle": self.line, "linewidth": 1.8}
        return {**line, "marker": self.marker, **edge}


_BEST: dict[str, Any] = {
    "linestyle": "none", "marker": "o", "markersize": 9.0, "markerfacecolor": "none",
    "markeredgecolor": INK, "markeredgewidth": 0.9,
}  # fmt: skip


_CHANGED: dict[str, Any] = {"color": INK, "linestyle": ":", "linewidth": 0.9, "alpha": 0.7}


@dataclasses.dataclass(frozen=True)
class Panels:
    """The panels of some metrics."""

    histories: Sequence[History]
    metrics: Sequence[str]
    """One panel each."""
    axis: Axis
    smoothing: float

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
        grid = list(figure.subplots(num_rows, columns, squeeze=False).flat)
        for index, (axes, name) in enumerate(zip(grid, self.metrics, strict=False)):
            metric = described(name)
            axes.set_title(metric.title, loc="left", fontsize=9, fontweight="bold", color=INK)
            axes.set_title(metric.unit, loc="right", fontsize=7.5, color=INK)
            has_label = index + columns >= len(self.metrics)  # No other panel is below.
            self.draw(axes, name, has_label)
        for axes in grid[len(self.metrics) :]:
            axes.axis("off")
        self._draw_legend(grid[len(self.metrics)])
        return figure

    def draw(self, axes: "Axes", name: str, has_label: bool = True) -> None:
        """Draws the panel of a metric, without its title."""
        metric = described(name)
        for index, history in enumerate(self.histories):
            style = Style.of(index)
            x, y = history.curve(name, "train", self.axis)
            y = _shown(y, metric)
            if self.smoothing and metric.is_noisy:
                axes.plot(x, y, **{**style.training(), "alpha": 0.25})
                y = smoothed(y, self.smoothing)
            axes.plot(x, y, **style.training())
            x, y = history.curve(name, "valid", self.axis)
            axes.plot(x, _shown(y, metric), **style.validation())
            is_best = x == history.positions(np.array([history.best_step or np.nan]), self.axis)
            axes.plot(x[is_best], _shown(y[is_best], metric), zorder=3, **_BEST)
            changed = np.array([row["step"] for row in history.of(SPLIT)], float)
            for position in history.positions(changed, self.axis):
                axes.axvline(position, **_CHANGED)
        low, high = axes.dataLim.intervaly
        if metric.is_log and high > _LOG_RATIO * low:
            axes.set_yscale("log")
        elif metric.starts_at_0:
            axes.set_ylim(bottom=0)
        ends = (each.positions(np.array([each.last_step]), self.axis) for each in self.histories)
        axes.set_xlim(0, 1.05 * np.concatenate(list(ends)).max() or 1)
        _finish(axes, _AXES[self.axis] if has_label else "")

    def _draw_legend(self, axes: "Axes") -> None:
        from matplotlib.lines import Line2D

        # The space: matplotlib leaves out labels that begin with an underscore.
        handles = []
        for index, (name, history) in enumerate(zip(self.names(), self.histories, strict=True)):
            lines = [*textwrap.wrap(name, _NAME_WIDTH), *best_of(history)]
            label = "\n".join(f" {line}" for line in lines)
            handles.append(Line2D([], [], label=label, **Style.of(index).validation()))
        for label, drawn in self.kinds().items():
            handles.append(Line2D([], [], label=f" {label}", **drawn))
        legend = axes.legend(
            handles=handles, loc="center left", bbox_to_anchor=(0, 0.5), frameon=False,
            fontsize=8, labelcolor=INK, handlelength=2.2, labelspacing=0.7,
        )  # fmt: skip
        for text in legend.get_texts():
            text.set_parse_math(False)  # Names of folders may have dollars.

    def kinds(self) -> dict[str, dict[str, Any]]:
        """Returns the kinds of curves that there are, and how matplotlib draws them."""
        neutral = Style(INK, "solid", "o")
        kinds = {"training": neutral.training()}
        if any(history.of("valid") for history in self.histories):
            kinds["validation"] = neutral.validation()
        if any(history.best_step is not None for history in self.histories):
            kinds["best checkpoint"] = _BEST
        if any(history.of(SPLIT) for history in self.histories):
            kinds["options changed"] = _CHANGED
        return kinds


def best_of(history: History) -> list[str]:
    """Returns what to say of the best checkpoint; nothing without one."""
    value = history.best().get(history.best_metric)
    if value is None:
        return []
    metric = described(history.best_metric)
    return [f"{metric.title} {metric.format(value)} at step {history.best_step:,}"]


def _shown(values: np.ndarray, metric: Metric) -> np.ndarray:
    """Returns values in the unit of the panel; those that a logarithmic axis lacks are NaN."""
    scaled = values * metric.scale
    return np.where(scaled > 0, scaled, np.nan) if metric.is_log else scaled


def _finish(axes: "Axes", label: str) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    round_numbers = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=round_numbers))
    axes.xaxis.set_major_formatter(_number)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=round_numbers))
    axes.yaxis.set_major_formatter(_number)
    axes.set_xlabel(label, fontsize=8, color=INK)
    axes.tick_params(labelsize=7.5, labelcolor=INK, color=INK, length=2.5, width=0.6)
    axes.grid(color=INK, alpha=0.12, linewidth=0.5)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=INK, linewidth=0.6)


def _number(value: float, position: float | None = None) -> str:
    for lowest, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= lowest:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
