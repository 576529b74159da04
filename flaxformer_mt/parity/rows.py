"""Builds the rows of a report from pairs of arrays."""

from collections.abc import Iterator, Mapping

import numpy as np

from flaxformer_mt.parity.program.diagnosis import FLOAT32
from flaxformer_mt.parity.reports.comparison import Row
from flaxformer_mt.parity.trajectories import Curves, Trajectory

VALUES = {"float64": 1e-10, "float32": FLOAT32}
"""Tolerance of values, relative to the site's largest magnitude; in float32 to at least 1, because
small values are often differences of large ones."""
GRADIENTS = {"float64": 1e-10, "float32": 1e-5}
"""Tolerance of gradients, relative to the largest gradient."""


def value_row(site: str, ours: np.ndarray, theirs: np.ndarray, dtype: str) -> Row:
    """Returns the row of a value, with the tolerance of the dtype."""
    scale = largest(theirs) if dtype == "float64" else max(1.0, largest(theirs))
    return row(site, ours, theirs, VALUES[dtype] * scale)


def gradient_rows(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], dtype: str
) -> Iterator[Row]:
    """Yields the row of each parameter's gradient, relative to the largest of all gradients."""
    scale = max(map(largest, theirs.values()), default=0.0)
    for name, expected in theirs.items():
        yield row(f"gradient/{name}", ours[name], expected, GRADIENTS[dtype] * scale, scale)


def step_rows(steps: Trajectory) -> Iterator[Row]:
    """Yields the row of each quantity of a training run, at its worst step."""
    differences = steps.differences()
    for name, ours, theirs, relative in zip(
        Curves._fields, steps.ours, steps.theirs, differences, strict=True
    ):
        worst = int(np.argmax(np.nan_to_num(relative, nan=np.inf)))
        found = difference(ours[worst], theirs[worst])
        tolerance = steps.tolerance * abs(theirs[worst])
        yield Row(f"steps/{name}", ours.shape, found, float(relative[worst]), tolerance)


def row(
    site: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float, scale: float | None = None
) -> Row:
    """Builds a row; `scale` normalizes the relative difference, by default theirs' largest."""
    found, magnitude = difference(ours, theirs), scale or largest(theirs)
    relative = found / magnitude if magnitude else found
    return Row(site, ours.shape, found, relative, tolerance)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference; inf where only one side is masked (-inf) or either is NaN."""
    if ours.dtype == bool:
        ours, theirs = ours.astype(np.int8), theirs.astype(np.int8)
    same = ours == theirs  # inf - inf is NaN, but the values are equal.
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(ours - theirs))
    return float(np.max(np.nan_to_num(differences, nan=np.inf, posinf=np.inf), initial=0.0))


def largest(array: np.ndarray) -> float:
    """Returns the largest finite magnitude; 0 if there is none."""
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))
