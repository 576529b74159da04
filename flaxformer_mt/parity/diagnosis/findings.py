"""Finds every difference of two models, each by itself.

Each value is computed from the reference's values of the preceding sites, as if all earlier
differences had been corrected: it differs only if the computation between them does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from flaxformer_mt.parity.diagnosis.first_cause import Diagnosis
from flaxformer_mt.parity.reports.comparison import Finding
from flaxformer_mt.parity.rows import VALUES, largest

Select = Callable[[str, np.ndarray], np.ndarray]
"""Maps a site and its value to the rows that are compared."""


class Model(Protocol):
    """Our model, whose values can be replaced by the reference's."""

    def predict(self, site: str) -> np.ndarray | None:
        """Computes the value of a site from the values that are set; None if that is unknown."""

    def explain(self, site: str, expected: np.ndarray) -> Diagnosis | None:
        """Returns the known cause that explains the reference's value of a site, if any."""

    def set(self, site: str, predicted: np.ndarray, expected: np.ndarray | None) -> None:
        """Sets the value of a site: the reference's, or what was predicted if it has none."""


def find(
    model: Model,
    sites: Sequence[str],
    theirs: Mapping[str, np.ndarray],
    select: Select,
    dtype: str,
) -> Iterator[Finding]:
    """Yields the sites whose computation differs, in the order of `sites`, with their causes.

    `model` is changed; `theirs` are the reference's values, and `dtype` determines the tolerance.
    """
    floor = 0.0 if dtype == "float64" else 1.0
    for site in sites:
        predicted = model.predict(site)
        if predicted is None:
            continue
        expected = theirs.get(site)
        if expected is not None:
            found = relative_difference(select(site, predicted), select(site, expected), floor)
            if not found <= VALUES[dtype]:
                diagnosis = model.explain(site, expected)
                yield Finding(site, found, diagnosis)
        model.set(site, predicted, expected)


def relative_difference(ours: np.ndarray, theirs: np.ndarray, floor: float = 0.0) -> float:
    """Returns the largest difference; inf where only one side is finite.

    It is relative to the reference's largest magnitude, or to `floor` if this is larger.
    """
    if ours.shape != theirs.shape:
        return np.inf
    if not np.issubdtype(ours.dtype, np.inexact):  # Unsigned and bool differences are no numbers.
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return np.inf
    if not np.isfinite(ours[finite]).all():
        return np.inf
    difference = float(np.max(np.abs(ours[finite] - theirs[finite]), initial=0.0))
    scale = max(largest(theirs), floor)
    return difference / scale if scale else difference
