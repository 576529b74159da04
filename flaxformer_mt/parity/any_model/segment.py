"""The equations between two sites, which can be evaluated with changes."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from flaxformer_mt.parity.any_model.program import Equation, TracedFunction
from flaxformer_mt.parity.diagnosis.inputs import Diagnosis, relative_difference

RESHAPING = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "slice",
    "convert_element_type",
    "copy",
    "copy_p",
    "stop_gradient",
    "expand_dims",
)
"""Primitives that only move numbers."""

Numbers = dict[int, np.ndarray]


Found: TypeAlias = Iterator[Diagnosis]


def compute(equation: Equation, values: Numbers) -> None:
    """Adds the outputs of an equation to `values`, as NumPy arrays."""
    outputs = equation.run(*(values[number] for number in equation.inputs))
    values.update(zip(equation.outputs, map(np.asarray, outputs), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """The computation of a site from values that are known."""

    program: TracedFunction
    site: str
    number: int
    known: Mapping[int, str]
    """The preceding sites with the reference's value, by number."""
    values: Numbers
    equations: Sequence[Equation]
    expected: np.ndarray
    theirs: Mapping[str, np.ndarray]
    """The reference's values of all sites, and of repeated calls."""
    select: Callable[[np.ndarray], np.ndarray]
    tolerance: float

    @property
    def value(self) -> np.ndarray:
        """Our value of the site."""
        return self.values[self.number]

    def residual(self, value: np.ndarray) -> float:
        """Returns the relative difference of a value to the reference's."""
        return relative_difference(self.select(value), self.select(self.expected))

    def changed(self, changes: Mapping[int, np.ndarray]) -> np.ndarray:
        """Returns the value of the site if some values are others of the same shape."""
        values, different = {**self.values, **changes}, set(changes)
        for equation in self.equations:
            if different.intersection(equation.inputs) and not different.issuperset(
                equation.outputs
            ):
                kept = {n: values[n] for n in equation.outputs if n in changes}
                compute(equation, values)
                values.update(kept)
                different.update(equation.outputs)
        return values[self.number]

    def diagnosis(self, cause: str, explanation: str, value: np.ndarray) -> Diagnosis:
        """Returns a cause with which the site has this value."""
        return Diagnosis(cause, explanation, self.residual(value))

    def cause(self, name: str, explanation: str, changes: Mapping[int, np.ndarray]) -> Diagnosis:
        """Returns the cause that some values are others of the same shape."""
        return self.diagnosis(name, explanation, self.changed(changes))

    def with_operand(self, equation: Equation, operand: int, value: np.ndarray) -> Numbers:
        """Returns the outputs of an equation if one of its operands is another."""
        operands = [self.values[n] for n in equation.inputs]
        operands[operand] = value
        return dict(zip(equation.outputs, map(np.asarray, equation.run(*operands)), strict=True))

    @functools.cached_property
    def producers(self) -> dict[int, Equation]:
        """The equation of each value that the segment computes."""
        return {n: equation for equation in self.equations for n in equation.outputs}

    @functools.cached_property
    def slices(self) -> dict[int, list[int]]:
        """The parts that are cut out of each value."""
        parts: dict[int, list[int]] = collections.defaultdict(list)
        for equation in self.equations:
            if equation.name in ("slice", "split"):
                parts[equation.inputs[0]] += equation.outputs
        return parts

    @functools.cached_property
    def leaves(self) -> list[int]:
        """The inputs of the segment."""
        read = dict.fromkeys(n for equation in self.equations for n in equation.inputs)
        return [n for n in read if n not in self.producers]

    def consumers(self, number: int) -> Iterator[Equation]:
        """Yields the equations that read a value, without those that only move its numbers."""
        for equation in self.equations:
            if number in equation.inputs:
                if equation.name in RESHAPING:
                    yield from self.consumers(equation.outputs[0])
                else:
                    yield equation

    def origin(self, number: int) -> int:
        """Returns the value from which a value was only moved."""
        while number in self.producers and self.producers[number].name in RESHAPING:
            number = self.producers[number].inputs[0]
        return number

    def producer(self, number: int) -> str:
        """Returns the name of the primitive that computes a value, before it is moved."""
        found = self.producers.get(self.origin(number))
        return found.name if found else ""

    def label(self, number: int) -> str:
        """Returns the name of a value for messages."""
        origin = self.origin(number)
        program = self.program
        if origin in self.known:
            return self.known[origin]
        if origin in program.parameters:
            return program.parameters[origin]
        if origin in program.constants:
            value = np.asarray(program.constants[origin])
            return f"{value.item():g}" if value.size == 1 else "a constant table"
        if origin in program.inputs:
            return "the input"
        return f"the result of {self.producer(origin)}"

    def is_number(self, number: int) -> bool:
        """Whether a value is one floating constant."""
        value = self.program.constants.get(number)
        if value is None or np.size(value) != 1:
            return False
        return np.issubdtype(np.asarray(value).dtype, np.floating) and bool(np.isfinite(value))

    @property
    def parameters(self) -> dict[int, str]:
        """The parameters that the segment reads."""
        return {n: self.program.parameters[n] for n in self.leaves if n in self.program.parameters}

    def solve(self, value: Callable[[float], np.ndarray], start: float) -> float | None:
        """Solves for the number with which the site has the reference's value, if there is one."""
        expected = self.select(self.expected)
        finite = np.isfinite(expected)
        if np.sum(finite) < 8:  # Too few values to distinguish causes.
            return None
        scale = self.tolerance * np.max(np.abs(expected[finite]))
        number, best, smallest, shrunk = start, start, np.inf, False
        for _ in range(16):
            step = 1e-4 * max(abs(number), 1e-3)
            here = self.select(value(number))
            derivative = (self.select(value(number + step)) - here)[finite] / step
            missing = (expected - here)[finite]
            size = float(np.max(np.abs(missing), initial=0.0))
            steepness = float(np.vdot(derivative, derivative))
            if not np.isfinite(size) or not steepness or size > 4 * smallest:
                if shrunk:
                    break
                number, shrunk = best / 4, True  # A divisor must not become 0.
                continue
            if size < smallest:
                best, smallest = number, size
            elif smallest <= scale:  # What is left is rounding.
                break
            number += float(np.vdot(derivative, missing)) / steepness
        return best if smallest <= scale else None
