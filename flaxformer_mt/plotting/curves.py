"""Training curves of runs: what is plotted, as a picture, a file or a web page."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import get_args

import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.curves_page import to_fragment, to_page
from flaxformer_mt.plotting.history import Axis, read_history
from flaxformer_mt.plotting.panels import METRICS, Panels
from flaxformer_mt.runs.folder import read_config


class Curves(Panels, drawing.Picture):
    """Curves of runs; in a notebook they show as a picture.

    curves = run.plot(smoothing=0.6)
    curves.save("curves.svg")
    """

    def __repr__(self) -> str:
        return f"Curves({', '.join(self.names())}: {', '.join(self.metrics)})"

    def to_html(self) -> str:
        """Returns the web page: one panel per metric, and a table of the best validations."""
        return to_page(self)

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
