"""The equations between two sites, which can be evaluated with changes."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from flaxformer_mt.parity.program.diagnosis import Diagnosis, relative_difference
from flaxformer_mt.parity.program.equations import RESHAPING, Equation, TracedFunction

Numbers = dict[int, np.ndarray]


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
    """All values that are known, and those that the segment computes."""
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
        selected, expected = self.select(value), self.select(self.expected)
        # Where all is NaN, any constant that is solved for is, too, and would explain it.
        return np.inf if np.isnan(expected).all() else relative_difference(selected, expected)

    def changed(self, changes: Mapping[int, np.ndarray], number: int | None = None) -> np.ndarray:
        """Returns the value of the site, or of a number, if some values are others."""
        return self.recomputed(self.equations, changes)[self.number if number is None else number]

    def recomputed(
        self, equations: Sequence[Equation], changes: Mapping[int, np.ndarray]
    ) -> Numbers:
        """Returns all values if some are others of the same shape."""
        values, different = {**self.values, **changes}, set(changes)
        for equation in equations:
            if different.intersection(equation.inputs) and not different.issuperset(
                equation.outputs
            ):
                kept = {n: values[n] for n in equation.outputs if n in changes}
                compute(equation, values)
                values.update(kept)
                different.update(equation.outputs)
        return values

    def evaluated(self, equations: Sequence[Equation], given: Mapping[int, np.ndarray]) -> Numbers:
        """Returns all values and those of more equations, some of which are given."""
        values = {**self.values, **given}
        for equation in equations:
            if not given.keys() >= {*equation.outputs}:
                compute(equation, values)
        return values

    def in_float32(self) -> np.ndarray:
        """Returns our value of the site, computed in float32."""
        values = dict(self.values)
        for equation in self.equations:
            given = (_in_float32(values[number]) for number in equation.inputs)
            values.update(zip(equation.outputs, map(np.asarray, equation.run(*given)), strict=True))
        return values[self.number]

    def diagnosis(self, cause: str, explanation: str, value: np.ndarray) -> Diagnosis:
        """Returns a cause with which the site has this value."""
        return Diagnosis(cause, explanation, self.residual(value))

    def cause(self, name: str, explanation: str, changes: Mapping[int, np.ndarray]) -> Diagnosis:
        """Returns the cause that some values are others of the same shape."""
        return self.diagnosis(name, explanation + self.location(changes), self.changed(changes))

    def location(self, changed: Collection[int]) -> str:
        """Names the first site without a tap that changes with some values, if there is one."""
        if not self.passed_over:
            return ""
        reached = set(changed)
        for equation in self.equations:
            if reached.intersection(equation.inputs):
                reached.update(equation.outputs)
        first = next((site for n, site in self.passed_over.items() if n in reached), "")
        return f" (at {first})" if first else ""

    def with_operand(self, equation: Equation, operand: int, value: np.ndarray) -> Numbers:
        """Returns the outputs of an equation if one of its operands is another."""
        operands = [self.values[n] for n in equation.inputs]
        operands[operand] = value
        return dict(zip(equation.outputs, map(np.asarray, equation.run(*operands)), strict=True))

    @functools.cached_property
    def passed_over(self) -> dict[int, str]:
        """The sites that the segment computes on the way, in order."""
        return {
            number: site
            for site, number in self.program.sites.items()
            if number in self.producers and number != self.number
        }

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
        """Yields the equations that read a value, without those that only move or guard it."""
        for equation in self.equations:
            if number in equation.inputs:
                if equation.name in RESHAPING or self.guarded(equation) == number:
                    yield from self.consumers(equation.outputs[0])
                else:
                    yield equation

    def guarded(self, equation: Equation) -> int | None:
        """Returns the value that an equation replaces by a constant in some places, if it does."""
        if equation.name != "select_n" or len(equation.inputs) != 3:
            return None
        values = [n for n in equation.inputs[1:] if not self.is_scalar(self.origin(n))]
        return values[0] if len(values) == 1 else None

    def origin(self, number: int) -> int:
        """Returns the value from which a value was only moved."""
        while number in self.producers and self.producers[number].name in RESHAPING:
            number = self.producers[number].inputs[0]
        return number

    def source(self, number: int) -> Equation | None:
        """Returns the equation of a value, before it is moved or guarded."""
        equation = self.producers.get(self.origin(number))
        while equation is not None and (value := self.guarded(equation)) is not None:
            equation = self.producers.get(self.origin(value))
        return equation

    def producer(self, number: int) -> str:
        """Returns the name of the primitive that computes a value, before it is moved."""
        found = self.source(number)
        return found.name if found else ""

    def label(self, number: int) -> str:
        """Returns the name of a value for messages."""
        if number == self.number:
            return self.site
        origin, program = self.origin(number), self.program
        for names in (self.known, self.passed_over, program.parameters):
            if number in names or origin in names:
                return names[number if number in names else origin]
        if origin in program.constants:
            value = np.asarray(program.constants[origin])
            return f"{value.item():g}" if value.size == 1 else "a constant table"
        if origin in program.inputs:
            return "the input"
        producer = self.producer(origin)
        return f"the result of {producer}" if producer else "the input"

    def unscaled(self, equation: Equation) -> int | None:
        """Returns the value that an equation multiplies or divides by a number, if it does."""
        if equation.name in ("mul", "div"):
            for number, other in (equation.inputs, equation.inputs[::-1]):
                if self.is_number(self.origin(other)) and number in self.program.data:
                    return number
        return None

    def is_scalar(self, number: int) -> bool:
        """Whether a value is one constant number."""
        value = self.program.constants.get(number)
        return value is not None and np.size(value) == 1

    def is_number(self, number: int) -> bool:
        """Whether a value is one constant number that is floating and finite."""
        if not self.is_scalar(number):
            return False
        value = np.asarray(self.program.constants[number])
        return np.issubdtype(value.dtype, np.floating) and bool(np.isfinite(value).all())

    @property
    def is_norm(self) -> bool:
        """Whether the segment normalizes what it reads."""
        names = {equation.name for equation in self.equations}
        return bool(names & {"sqrt", "rsqrt"}) and not names & {"dot_general", "gather"}

    @property
    def parameters(self) -> dict[int, str]:
        """The parameters that the segment reads."""
        return {n: self.program.parameters[n] for n in self.leaves if n in self.program.parameters}

    def solve_factor(self, value: Callable[[float], np.ndarray]) -> float | None:
        """Solves for the number of which the value is a linear function, if it is one."""
        expected, one = self.select(self.expected), self.select(value(1.0))
        slope = self.select(value(2.0)) - one
        known = np.isfinite(expected) & np.isfinite(one) & np.isfinite(slope)
        steepness = float(np.vdot(slope[known], slope[known]))
        if np.sum(known) < 8 or not steepness:
            return None
        return 1 + float(np.vdot(slope[known], (expected - one)[known])) / steepness

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


def _in_float32(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32) if value.dtype == np.float64 else value


def each_and_all(numbers: Collection[int]) -> list[list[int]]:
    """Returns each number alone, and several together."""
    together = [[*numbers]] if len(numbers) > 1 else []
    return [*([number] for number in numbers), *together]
