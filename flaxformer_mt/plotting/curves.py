"""Training curves of runs: what is plotted, as a picture, a file or a web page."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.curves_page import to_page
from flaxformer_mt.plotting.history import Axis, read_history
from flaxformer_mt.plotting.panels import Panels
from flaxformer_mt.runs import atomic

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


class Curves(Panels):
    """Curves of runs; in a notebook they show as a picture.

    curves = run.plot(smoothing=0.6)
    curves.save("curves.svg")
    """

    def __repr__(self) -> str:
        return f"Curves({', '.join(self.names())}: {', '.join(self.metrics)})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the curves to a file: .png, .svg, .pdf, or .html for a self-contained web page.

        Raises:
          UserError: the suffix is another one, the file cannot be written, or matplotlib is not
            installed.
        """
        path = Path(path)
        suffix = drawing.format_of(path)
        if suffix == "html":
            atomic.write_text(path, to_page(self))
            return
        figure = self.figure()
        with atomic.new_file(path) as partial:
            figure.savefig(partial, format=suffix, dpi=drawing.DOTS_PER_INCH)

    def _repr_png_(self) -> bytes:
        return drawing.to_png(self.figure())


def plot_curves(
    folders: Sequence[str | Path],
    metrics: Sequence[str] = (),
    axis: Axis = "steps",
    smoothing: float = 0.0,
) -> Curves:
    """Returns the curves of runs, to be saved or shown.

    Args:
      folders: run folders.
      metrics: names of metrics in `metrics.jsonl`, one panel each; by default `METRICS`, as far as
        the runs have them.
      axis: what the curves are plotted over.
      smoothing: weight of the previous average in the moving average of training metrics, from 0
        to below 1; the curves themselves are drawn faintly behind it.

    Raises:
      TypeError: `smoothing` is not a number.
      UserError: a folder has no metrics, a metric is unknown, or the metrics were written by an
        earlier version and lack what the axis needs.
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
