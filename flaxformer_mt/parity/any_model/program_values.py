"""Explains the differences of a traced function, see `diagnosis/first_cause.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flaxformer_mt.parity.any_model import attention_causes, numeric_causes, structural_causes
from flaxformer_mt.parity.any_model.program import TracedFunction
from flaxformer_mt.parity.any_model.segment import Found, Numbers, Segment, compute
from flaxformer_mt.parity.diagnosis.inputs import Diagnosis, Untested, most_specific, testing
from flaxformer_mt.parity.trace import MASKED, comparable, is_scores

CAUSES: list[Callable[[Segment], Found]] = [
    numeric_causes.another_constant,
    numeric_causes.another_norm,
    structural_causes.left_out,
    structural_causes.another_activation,
    structural_causes.another_softmax,
    structural_causes.another_mask,
    structural_causes.another_order,
    structural_causes.exchanged,
    attention_causes.another_rotation,
    attention_causes.another_grouping,
    attention_causes.another_place,
    structural_causes.other_inputs,
    structural_causes.other_parameters,
    numeric_causes.lower_precision,
    numeric_causes.active_dropout,
    numeric_causes.solved_for,
]
"""The known causes of a difference between two sites, specific ones before general ones.

Each changes the equations of ours in one way, and yields the value that the site has then.
"""


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
    ) -> None:
        # `sites` are numbers, outputs among them; `theirs` has repeated calls, too ("site#1").
        self._program, self._sites, self._theirs = program, sites, theirs
        self._select, self._tolerance = select, tolerance
        arguments = dict(zip(program.inputs, leaves, strict=True))
        self._values: Numbers = {
            number: np.asarray(value)
            for number, value in {**program.constants, **arguments}.items()
        }
        self._fixed = set(self._values)
        self._known: dict[int, str] = {}
        self.untested: Untested = {}

    def predict(self, site: str) -> np.ndarray:
        return comparable(site, self._segment(site).value)

    def _segment(self, site: str, expected: np.ndarray | None = None) -> Segment:
        number, values = self._sites[site], dict(self._values)
        equations: Sequence[Any] = ()
        if number not in self._known:  # Two sites may be one value.
            equations = self._program.slice_before(number, self._fixed | self._known.keys())
        with np.errstate(all="ignore"):
            for equation in equations:
                compute(equation, values)
        return Segment(
            self._program,
            site,
            number,
            dict(self._known),
            values,
            equations,
            values[number] if expected is None else expected,
            self._theirs,
            lambda value: self._select(site, comparable(site, value)),
            self._tolerance,
        )

    def explain(self, site: str, expected: np.ndarray) -> Diagnosis | None:
        if not np.issubdtype(expected.dtype, np.inexact):  # Causes are those of computations.
            return None
        # Wrong candidates may divide by zero or overflow, which rules them out.
        with np.errstate(all="ignore"):
            return most_specific(self._found(self._segment(site, expected)), self._tolerance)

    def _found(self, segment: Segment) -> Iterator[Diagnosis]:
        for cause in CAUSES:
            with testing(cause.__name__, self.untested):
                yield from cause(segment)

    def set(self, site: str, predicted: np.ndarray, expected: np.ndarray | None) -> None:
        if expected is not None:
            number = self._sites[site]
            if not np.issubdtype(expected.dtype, np.inexact):  # PyTorch's integers have 64 bits.
                expected = expected.astype(self._program.types[number].dtype)
            # A row that is masked throughout has equal weights with published, finite masks.
            self._values[number] = np.maximum(expected, MASKED) if is_scores(site) else expected
            self._known[number] = site
