"""The progress of a run in a notebook: one output with a bar, the last metrics and curves."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.training.reporting.console import Sample, formatted, some_of
from flaxformer_mt.training.reporting.trackers import Tracker

_WIDTH, _HEIGHT = 480, 120
_COLORS = {"train": "#3f51b5", "valid": "#e65100"}


class NotebookProgress(Tracker):
    """Shows the progress of a run in the output of a cell, which it updates."""

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._num_steps = config["train"]["num_steps"]
        self._metrics: dict[str, list[str]] = {}
        self._losses: dict[str, list[tuple[int, float]]] = {split: [] for split in _COLORS}
        self._samples: Sequence[Sample] = ()
        self._output = display(HTML(""), display_id=True)

    def rewind(self, step: int) -> None:
        for points in self._losses.values():
            points[:] = [point for point in points if point[0] <= step]
        self._show(step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for split, points in self._losses.items():
            values = {
                name.removeprefix(f"{split}/"): value
                for name, value in numbers.items()
                if name.startswith(f"{split}/")
            }
            if values:
                self._metrics[split] = formatted(values)
            if "loss" in values:
                points.append((step, values["loss"]))
        self._show(step)

    def translated(self, step: int, samples: Sequence[Sample]) -> None:
        self._samples = some_of(samples)

    def _show(self, step: int) -> None:
        lines = [
            f"<progress value={step} max={self._num_steps} style='width: {_WIDTH}px'></progress>",
            f"step {step:,}/{self._num_steps:,}",
            *(
                f"<span style='color: {_COLORS[split]}'>{split}</span> {'  '.join(parts)}"
                for split, parts in self._metrics.items()
            ),
            _curves(self._losses),
            *(
                f"<small>{label}: {html.escape(text)}</small>"
                for sample in self._samples
                for label, text in sample.rows()
            ),
        ]
        self._output.update(self._html("<br>".join(filter(None, lines))))


def _curves(losses: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Returns the losses over the steps, as SVG."""
    everything = [point for points in losses.values() for point in points]
    if len(everything) < 2:
        return ""
    last = max(step for step, _ in everything)
    values = [value for _, value in everything]
    lowest, span = min(values), max(values) - min(values) or 1.0
    lines = []
    for split, points in losses.items():
        coordinates = " ".join(
            f"{_WIDTH * step / last:.1f},{_HEIGHT * (1 - (value - lowest) / span):.1f}"
            for step, value in points
        )
        lines.append(f"<polyline points='{coordinates}' fill='none' stroke='{_COLORS[split]}'/>")
    return (
        f"<svg viewBox='0 -4 {_WIDTH} {_HEIGHT + 8}' width='{_WIDTH}'>{''.join(lines)}</svg>"
        f"<br><small>loss, {lowest:.3f} to {max(values):.3f}</small>"
    )
