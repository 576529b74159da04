"""Plots two training runs side by side."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.trajectories import Curves, Trajectory
from flaxformer_mt.plotting import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Visible on white and on black backgrounds; the text of a page's plot has the color of its text.
_OURS, _THEIRS, _INK = "#3b82f6", "#d97706", "#767676"

# Where the logarithmic axis shows a difference of 0: below float64's resolution.
_FLOOR = 1e-17


def plot_trajectory(trajectory: Trajectory, path: str | os.PathLike[str]) -> None:
    """Writes a plot of losses, gradient norms and differences: .png, .svg or .pdf, or UserError."""
    path = Path(path)
    suffix = path.suffix.removeprefix(".")
    if suffix not in drawing.IMAGES:
        formats = ", ".join(drawing.IMAGES)
        raise UserError(f"{path}: the name of a plot must end in one of {formats}")
    figure = _figure(trajectory)
    with atomic.new_file(path) as partial:
        figure.savefig(partial, format=suffix)


def as_svg(trajectory: Trajectory) -> str:
    """Returns the same plot as a transparent inline `<svg>` element."""
    return drawing.to_inline_svg(_figure(trajectory), "trajectory", {_INK: "currentColor"})


def _figure(trajectory: Trajectory) -> "Figure":
    figure = drawing.new_figure(9, 6)
    loss, norm, differences = figure.subplot_mosaic([["loss", "norm"], ["both", "both"]]).values()
    steps = np.arange(1, len(trajectory.ours.loss) + 1)
    for axes, name in ((loss, "loss"), (norm, "gradient_norm")):
        theirs, ours = getattr(trajectory.theirs, name), getattr(trajectory.ours, name)
        axes.plot(steps, theirs, color=_THEIRS, linewidth=4, alpha=0.6, label="reference")
        axes.plot(steps, ours, color=_OURS, linewidth=1.2, label="ours")
        axes.set_title(name.replace("_", " "))
        axes.legend(labelcolor=_INK, framealpha=0)
    for name, relative in zip(Curves._fields, trajectory.differences(), strict=True):
        # Non-finite values leave a gap.
        visible = np.where(np.isfinite(relative), np.maximum(relative, _FLOOR), np.nan)
        differences.plot(steps, visible, linewidth=1.2, label=name.replace("_", " "))
    differences.axhline(trajectory.tolerance, color="#dc2626", linestyle="--", label="tolerance")
    differences.set_yscale("log")
    differences.set_title("relative difference")
    figure.legend(
        *differences.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(Curves._fields) + 1,
        labelcolor=_INK,
        framealpha=0,
    )
    for axes in (loss, norm, differences):
        axes.set_xlabel("step", color=_INK)
        axes.title.set_color(_INK)
        axes.tick_params(which="both", color=_INK, labelcolor=_INK)
        for spine in axes.spines.values():
            spine.set_color(_INK)
    return figure
