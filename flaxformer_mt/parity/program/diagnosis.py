"""What a diagnosis says, how the right one of several is chosen, and how values are compared."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Select: TypeAlias = Callable[[str, np.ndarray], np.ndarray]
"""Maps a site and its value to the rows that are compared."""


FLOAT32 = 2e-5
"""The largest relative difference that is attributed to float32."""


class Diagnosis(NamedTuple):
    """A known cause, and how well it explains the difference."""

    cause: str
    """Short and stable, such as "norm epsilon"."""
    explanation: str
    """One sentence that states what the reference and our model compute."""
    residual: float
    """The difference that remains if the cause is assumed, relative to the largest magnitude."""


Found: TypeAlias = Iterator[Diagnosis]

Untested: TypeAlias = dict[str, str]
"""Causes that failed themselves, with a sentence on why."""


@contextlib.contextmanager
def testing(cause: str, untested: Untested) -> Iterator[None]:
    """Notes the failure of a cause, which must not hide the differences that were found."""
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        name = cause.replace("_", " ")
        untested[cause] = f"The cause {name} was not tested everywhere ({why})."


def beside(theirs: float, ours: float) -> str:
    """Formats a number of the reference so that it is told from ours."""
    if f"{theirs:.6g}" != f"{ours:.6g}":
        return f"{0.0 if abs(theirs) < 1e-14 else theirs:.6g}"
    rounded = abs(theirs - float(np.float32(ours))) <= 1e-12 * abs(ours)
    return f"{ours:.6g} rounded to float32" if rounded else f"{theirs:.12g}"


def most_specific(found: Iterable[Diagnosis], tolerance: float) -> Diagnosis | None:
    """Returns the first of those that explain a difference up to rounding, if any does."""
    right = []
    for each in found:
        if each.residual <= tolerance:
            right.append(each)
        if each.residual <= 0.05 * tolerance:
            break
    best = min((each.residual for each in right), default=0.0)
    return next((each for each in right if each.residual <= 10 * best + 0.05 * tolerance), None)


def combinations(
    own: Mapping[str, Any], choices: Mapping[str, list[Any]], most: int
) -> Iterator[dict[str, Any]]:
    """Yields changes of up to `most` settings at once, fewest first."""
    for count in range(1, most + 1):
        for names in itertools.combinations(choices, count):
            others = [[value for value in choices[name] if value != own[name]] for name in names]
            for values in itertools.product(*others):
                yield dict(zip(names, values, strict=True))


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
    scale = max(float(np.max(np.abs(theirs[finite]), initial=0.0)), floor)
    return difference / scale if scale else difference
