"""The plot of a learning-rate range test."""

from pathlib import Path

import numpy as np

from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.panels import COLORS, INK
from flaxformer_mt.runs import atomic


def save_rate_range(
    path: Path, rates: np.ndarray, losses: np.ndarray, smoothed: np.ndarray, peak: float
) -> None:
    """Writes losses over learning rates, all [N], with the suggested peak, as a PNG file."""
    figure = drawing.new_figure(5, 3.2)
    axes = figure.subplots()
    axes.plot(rates, losses, color=COLORS[0], alpha=0.3, linewidth=1)
    axes.plot(rates, smoothed, color=COLORS[0], linewidth=1.8)
    axes.axvline(peak, color=INK, linestyle="dashed", linewidth=1)
    axes.annotate(f" {peak:.1e}", (peak, losses.max()), color=INK, fontsize=8)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss, nats per token")
    with atomic.new_file(path) as partial:
        partial.write_bytes(drawing.to_file(figure, "png"))
