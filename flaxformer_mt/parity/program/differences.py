"""Finds the differences of two models, each by itself, and their known causes.

Our model is a traced program, in which the values of sites become the reference's. Each value is
computed from the reference's values of the preceding sites, as if all earlier differences had been
corrected: it differs only if the equations between them do. A cause is a change of these equations,
and the diagnosis is the cause with which the site has the reference's value.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flaxformer_mt.parity.causes import attention, numbers, structure
from flaxformer_mt.parity.program.diagnosis import (
    FLOAT32,
    Diagnosis,
    Found,
    Untested,
    most_specific,
    relative_difference,
    testing,
)
from flaxformer_mt.parity.program.equations import Equation, TracedFunction
from flaxformer_mt.parity.program.segment import Numbers, Segment, compute
from flaxformer_mt.parity.reports.comparison import Finding
from flaxformer_mt.parity.trace.sites import MASKED, comparable, is_scores

Cause = Callable[[Segment], Found]

CAUSES: list[Cause] = [
    numbers.another_norm,
    numbers.another_constant,
    attention.another_mask,
    attention.another_mask_value,
    structure.left_out,
    structure.another_activation,
    structure.another_softmax,
    attention.another_head_order,
    structure.another_order,
    structure.exchanged,
    attention.another_rotation,
    attention.another_grouping,
    attention.another_place,
    structure.other_tokens,
    structure.another_norm_position,
    structure.other_modules,
    structure.other_inputs,
    structure.other_parameters,
    numbers.precision,
    numbers.active_dropout,
    numbers.scaled_result,
    numbers.another_scale,
    numbers.other_weights,
]
"""The known causes of a difference between two sites, specific ones before general ones.

Each changes the equations of ours in one way, and yields the value that the site has then.
"""


MAX_EQUATIONS = 300
"""How many operations before a difference are changed, to look for causes; about two layers. Each
change is computed through all that follow, which would take minutes for a whole model."""


class ProgramValues:
    """A traced program in which the values of sites become the reference's."""

    def __init__(
        self,
        program: TracedFunction,
        leaves: Sequence[Any],
        sites: Mapping[str, int],
        theirs: Mapping[str, np.ndarray],
        select: Callable[[str, np.ndarray], np.ndarray],
        tolerance: float,
        causes: Sequence[Cause] = (),
    ) -> None:
        # `sites` are numbers, outputs among them; `theirs` has repeated calls, too ("site#1");
        # `causes` are tried before all others.
        self._program, self._sites, self._theirs = program, sites, theirs
        self._select, self._tolerance = select, tolerance
        self._causes = [*causes, *CAUSES]
        arguments = dict(zip(program.inputs, leaves, strict=True))
        self._values: Numbers = {
            number: np.asarray(value)
            for number, value in {**program.constants, **arguments}.items()
        }
        # The layers of stacked parameters are known, too.
        for number in program.parameters:
            for equation in program.slice_before(number, self._values):
                compute(equation, self._values)
        self._fixed = set(self._values)
        self._known: dict[int, str] = {}
        self.untested: Untested = {}

    def findings(self, floor: float) -> Iterator[Finding]:
        """Yields the sites whose computation differs, in order, with their causes.

        Differences are relative to the largest magnitude, or to `floor` if this is larger.
        """
        for site in self._sites:
            expected = self._theirs.get(site)
            if expected is None:
                continue
            segment = self._segment(site, expected)
            pair = (self._select(site, comparable(site, segment.value)), segment.select(expected))
            found = relative_difference(*pair, floor)
            if not found <= segment.tolerance:
                yield Finding(site, found, self._diagnosis(segment, found))
            self._set(site, expected)

    @property
    def narrow_sites(self) -> list[str]:
        """The sites whose values depend on numbers of less than 64 bits, in order."""
        return [site for site, number in self._sites.items() if number in self._program.narrow]

    def _segment(self, site: str, expected: np.ndarray) -> Segment:
        number, values = self._sites[site], dict(self._values)
        equations: Sequence[Equation] = ()
        if number not in self._known:  # Two sites may be one value.
            equations = self._program.slice_before(number, self._fixed | self._known.keys())
        with np.errstate(all="ignore"):
            for equation in equations:
                compute(equation, values)
        read = {number, *(n for equation in equations for n in equation.inputs)}
        if len(equations) > MAX_EQUATIONS:
            equations = equations[-MAX_EQUATIONS:]
            self.untested[site] = (
                f"Causes of {site} were only looked for in the last {MAX_EQUATIONS} operations "
                "before it: add taps."
            )
        return Segment(
            self._program,
            site,
            number,
            dict(self._known),
            values,
            equations,
            expected,
            self._theirs,
            lambda value: self._select(site, comparable(site, value)),
            self._tolerance if self._program.rounded.isdisjoint(read) else FLOAT32,
        )

    def _diagnosis(self, segment: Segment, difference: float) -> Diagnosis | None:
        if not np.issubdtype(segment.expected.dtype, np.inexact):  # Causes are of computations.
            return None
        # Wrong candidates may divide by zero or overflow, which rules them out.
        with np.errstate(all="ignore"):
            found = most_specific(self._found(segment), segment.tolerance)
            if found is not None or segment.expected.dtype != np.float64:
                return found
            # The reference may also compute in float32, which must not hide a larger difference.
            loose = dataclasses.replace(segment, tolerance=min(FLOAT32, 1e-3 * difference))
            return most_specific(self._found(loose), loose.tolerance)

    def _found(self, segment: Segment) -> Iterator[Diagnosis]:
        # What the reference never computes is most often left out, or replaced by another module.
        first: list[Cause] = []
        if segment.passed_over:
            first = [structure.left_out, structure.other_modules, structure.other_inputs]
        if not segment.program.drawn.isdisjoint(segment.producers):
            first.insert(0, numbers.active_dropout)
        for cause in [*first, *self._causes]:
            function = getattr(cause, "func", cause)  # Some causes have a configuration.
            with testing(function.__name__, self.untested):
                yield from cause(segment)

    def _set(self, site: str, expected: np.ndarray) -> None:
        number = self._sites[site]
        # PyTorch's integers have 64 bits, and its code may compute in float32 within float64.
        expected = expected.astype(self._program.types[number].dtype)
        # A row that is masked throughout has equal weights with published, finite masks.
        self._values[number] = np.maximum(expected, MASKED) if is_scores(site) else expected
        self._known[number] = site
