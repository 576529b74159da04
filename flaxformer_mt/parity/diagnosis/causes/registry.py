"""The types of a cause, and the registry of causes."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flaxformer_mt.parity.diagnosis.inputs import (
    DiagnosisInputs,
    ParsedSite,
    parse_site,
    real_rows,
    select_rows,
    testing,
)
from flaxformer_mt.parity.diagnosis.operations import Operation, Switches
from flaxformer_mt.parity.diagnosis.site_operations import NotComputed


class Candidate(NamedTuple):
    """An operation that the reference may have instead of ours."""

    cause: str
    explanation: str
    operation: Operation


Found: TypeAlias = Iterator[Candidate]


class SuspectSite(NamedTuple):
    """A site at which causes are tested."""

    inputs: DiagnosisInputs
    name: str
    known: np.ndarray | None
    """The reference's value, or None without a tap."""

    @property
    def theirs(self) -> np.ndarray:
        """The reference's value, from which constants are solved for; `NotComputed` if unknown."""
        if self.known is None:
            raise NotComputed
        return self.known

    @property
    def parsed(self) -> ParsedSite:
        """The components of the site's name."""
        return parse_site(self.name)

    @property
    def real(self) -> np.ndarray:
        """The mask of real tokens, bool [B, T]."""
        return real_rows(self.name, self.inputs.real)

    def rows(self, value: np.ndarray) -> np.ndarray:
        """Selects the rows of real tokens, [N, ...], of an array shaped like the site's value."""
        return select_rows(self.name, value, self.inputs.real)

    def solved_scale(self, ours: np.ndarray, offset: np.ndarray | float = 0.0) -> dict[str, float]:
        """Solves theirs = factor * ours + offset, as {formatted: factor}; {} without a tap."""
        if self.known is None:
            return {}
        found, expected = self.rows(ours), self.rows(self.known - offset)
        finite = np.isfinite(found) & np.isfinite(expected)
        found, expected = found[finite], expected[finite]
        scale = float(np.vdot(found, expected) / np.vdot(found, found))
        return {f"{scale:.6g}": scale}

    def require_float64(self) -> None:
        """Raises `NotComputed` in other comparisons, whose rounding hides that of a reference."""
        if self.inputs.config.dtype != "float64":
            raise NotComputed


Cause: TypeAlias = Callable[[Any, SuspectSite], Found]

CAUSES: dict[type, list[Cause]] = collections.defaultdict(list)
"""Causes by the operation that they concern; they apply to its subclasses, too."""


def cause(*operations: type) -> Callable[[Cause], Cause]:
    """Registers a function in `CAUSES`."""

    def register(function: Cause) -> Cause:
        for operation in operations:
            CAUSES[operation].append(function)
        return function

    return register


def candidates(operation: Operation, site: SuspectSite) -> Found:
    """Yields all candidates for an `operation` of our model, the most specific first."""
    for kind in type(operation).__mro__:
        for function in CAUSES.get(kind, ()):
            # A cause ends where it needs a value that does not exist, and some are NaN.
            with (
                testing(function.__name__, site.inputs.untested),
                contextlib.suppress(NotComputed, np.linalg.LinAlgError),
            ):
                yield from function(operation, site)


def alternatives(
    operation: Operation, cause: str, words: str, switch: str, values: Mapping[str, Any]
) -> Found:
    """Yields a candidate for each value of a switch, whose name replaces {} in `words`."""
    for name, value in values.items():
        yield Candidate(cause, words.format(name), operation.but(**{switch: value}))


def several_switches(
    what: str,
    ours: Switches,
    causes: Mapping[str, str],
    choices: Mapping[str, list[Any]],
    most: int,
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (cause, explanation, change) for changes of up to `most` switches, fewest first."""
    own = {name: getattr(ours, name) for name in choices}
    for change in combinations(own, choices, most):
        yield (
            " and ".join(causes[name] for name in change),
            "; ".join(
                f"the reference's {what} {name} is {shown(value)}, ours {shown(own[name])}"
                for name, value in change.items()
            ),
            change,
        )


def combinations(
    ours: Mapping[str, Any], choices: Mapping[str, list[Any]], most: int
) -> Iterator[dict[str, Any]]:
    """Yields changes of up to `most` switches at once as {switch: value}, fewest first."""
    for count in range(1, most + 1):
        for names in itertools.combinations(choices, count):
            others = [[value for value in choices[name] if value != ours[name]] for name in names]
            for values in itertools.product(*others):
                yield dict(zip(names, values, strict=True))


def shown(value: Any) -> str:
    """Formats the value of a switch for messages."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
