"""What a cause is, and where causes are entered."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flaxformer_mt.parity.diagnosis.equations import NotComputed, Operation
from flaxformer_mt.parity.diagnosis.evidence import Evidence, Place, place, real_rows, select_rows


class Hypothesis(NamedTuple):
    """What the reference may do instead."""

    cause: str
    """Short and stable, as "norm epsilon"."""
    explanation: str
    """A sentence with the numbers."""
    operation: Operation
    """What the reference then computes at the site."""


class Clue(NamedTuple):
    """What a cause may look at besides our operation."""

    evidence: Evidence
    site: str
    theirs: np.ndarray | None
    """The reference's value, from which numbers can be solved for; None where it has no tap."""

    @property
    def place(self) -> Place:
        """Where the site is."""
        return place(self.site)

    @property
    def real(self) -> np.ndarray:
        """Which rows of the value are of real tokens, bool [B, T]."""
        return real_rows(self.site, self.evidence.real)

    def rows(self, value: np.ndarray) -> np.ndarray:
        """The rows of real tokens, [N, ...], of anything that has the value's shape."""
        return select_rows(self.site, value, self.evidence.real)

    def solved_scale(self, ours: np.ndarray) -> dict[str, float]:
        """What `ours` would have to be multiplied by, in digits and as a number; {} if unknown."""
        if self.theirs is None:
            return {}
        found, expected = self.rows(ours), self.rows(self.theirs)
        known = np.isfinite(found) & np.isfinite(expected)
        found, expected = found[known], expected[known]
        scale = float(np.vdot(found, expected) / np.vdot(found, found))
        return {f"{scale:.6g}": scale}


Cause: TypeAlias = Callable[[Any, Clue], Iterator[Hypothesis]]

CAUSES: dict[type, list[Cause]] = collections.defaultdict(list)
"""Causes by the operation that they are about; they are about its subclasses, too."""


def cause(operation: type) -> Callable[[Cause], Cause]:
    """Enters a function into `CAUSES`."""

    def enter(function: Cause) -> Cause:
        CAUSES[operation].append(function)
        return function

    return enter


def hypotheses(operation: Operation, clue: Clue) -> Iterator[Hypothesis]:
    """All that the reference may compute in place of our `operation`; the most specific first."""
    for kind in type(operation).__mro__:
        for function in CAUSES.get(kind, ()):
            with contextlib.suppress(NotComputed):  # What is not there cannot be the cause.
                yield from function(operation, clue)


def combinations(
    ours: Mapping[str, Any], choices: Mapping[str, list[Any]], most: int
) -> Iterator[dict[str, Any]]:
    """Other values of up to `most` switches at once, fewest first; each as {switch: value}."""
    for count in range(1, most + 1):
        for names in itertools.combinations(choices, count):
            others = [[value for value in choices[name] if value != ours[name]] for name in names]
            for values in itertools.product(*others):
                yield dict(zip(names, values, strict=True))


def shown(value: Any) -> str:
    """A switch's value for a sentence."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
