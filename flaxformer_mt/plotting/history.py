"""The metrics of a run over its steps, as numbers to plot."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from flaxformer_mt.errors import UserError
from flaxformer_mt.run_layout import METRICS
from flaxformer_mt.runs import step_folders
from flaxformer_mt.runs.folder import read_config, require_run
from flaxformer_mt.runs.metrics_file import read_metrics

Axis: TypeAlias = Literal["steps", "tokens", "hours"]
"""What curves are plotted over: training steps, target tokens, or hours of training steps."""
Row: TypeAlias = Mapping[str, Any]
"""A line of `metrics.jsonl`: "step", "split" and metrics; None is a value that was not finite."""

_TOKENS, _SPEED = "target_tokens", "target_tokens_per_second"


@dataclasses.dataclass(frozen=True)
class History:
    """The metrics of a run."""

    folder: Path
    rows: Sequence[Row]
    """All lines of `metrics.jsonl`."""
    best_metric: str
    """The validation metric that ranks checkpoints."""
    best_step: int | None
    """The step of the best checkpoint; None without a checkpoint that was validated."""

    @property
    def last_step(self) -> int:
        """The last step of which there are metrics."""
        return max(row["step"] for row in self.rows)

    def of(self, split: str) -> list[Row]:
        """Returns the lines of a split."""
        return [row for row in self.rows if row["split"] == split]

    def metrics(self) -> list[str]:
        """Returns the names of all metrics that are numbers."""
        names = {
            name: None
            for row in self.rows
            for name, value in row.items()
            if name not in ("step", "split") and _is_number(value)
        }
        return list(names)

    def curve(self, metric: str, split: str, axis: Axis = "steps") -> tuple[np.ndarray, np.ndarray]:
        """Returns positions and values of a metric, float64 [N]; NaN where it was not finite."""
        rows = [row for row in self.of(split) if _is_number(row.get(metric, ""))]
        values = np.array([math.nan if row[metric] is None else row[metric] for row in rows], float)
        steps = np.array([row["step"] for row in rows], float)
        return self.positions(steps, axis), np.where(np.isfinite(values), values, np.nan)

    def best(self) -> Row:
        """Returns the validation of the best checkpoint; empty without one."""
        rows = [row for row in self.of("valid") if row["step"] == self.best_step]
        return rows[-1] if rows else {}

    def positions(self, steps: np.ndarray, axis: Axis) -> np.ndarray:
        """Returns where steps are on an axis, float64 [N]; between lines, interpolated."""
        if axis == "steps":
            return steps
        rows = self.of("train")
        lengths = [row[_TOKENS] for row in rows]
        if axis == "hours":
            lengths = [row[_TOKENS] / row[_SPEED] / 3600 if row[_SPEED] else 0 for row in rows]
        at = [0, *(row["step"] for row in rows)]
        return np.interp(steps, at, np.cumsum([0, *lengths]))


def read_history(folder: str | Path) -> History:
    """Reads the metrics of a run folder; a run that is being trained may be read.

    Raises:
      UserError: it is not a run folder, has no metrics, or they are damaged.
    """
    require_run(folder)
    folder = Path(folder)
    rows = read_metrics(folder / METRICS)
    if not rows:
        raise UserError(
            f"{folder} has no metrics to plot: nothing was trained there yet, or it is the average "
            "or the conversion of another model"
        )
    checkpoints = step_folders.folder_of(folder)
    validated = {row["step"] for row in rows if row["split"] == "valid"}
    best = step_folders.choose(checkpoints, "best") if step_folders.steps_in(checkpoints) else None
    return History(
        folder,
        rows,
        read_config(folder).train.best_metric,
        best if best in validated else None,
    )


def _is_number(value: Any) -> bool:
    """Whether a value of a line is a number, or None, which stands for one that was not finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Returns the moving average of values [N], without the bias of its start; NaN stays NaN.

    `weight` is that of the past, from 0 (the values themselves) to below 1.
    """
    result = np.full_like(values, np.nan)
    total = norm = 0.0
    for index in np.flatnonzero(np.isfinite(values)):
        total = weight * total + (1 - weight) * values[index]
        norm = weight * norm + (1 - weight)
        result[index] = total / norm
    return result
