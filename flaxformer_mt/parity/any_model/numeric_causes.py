"""Causes that are numbers: epsilons, scales, precision, dropout, and other weights."""

import collections
import itertools
import math

import numpy as np

from flaxformer_mt.parity.any_model.program import Equation
from flaxformer_mt.parity.any_model.segment import Found, Segment
from flaxformer_mt.parity.diagnosis.causes import sublayers
from flaxformer_mt.parity.diagnosis.inputs import beside
from flaxformer_mt.parity.diagnosis.operations import Given


def another_constant(segment: Segment) -> Found:
    """Another epsilon, scale, divisor or other number, which is solved for."""
    groups: dict[tuple[float, str, str], list[int]] = collections.defaultdict(list)
    for number in filter(segment.is_number, segment.leaves):
        ours = float(segment.program.constants[number])
        groups[ours, *_role(segment, number)].append(number)
    for (ours, cause, words), numbers in groups.items():
        for together in [[number] for number in numbers] + [numbers] * (len(numbers) > 1):

            def value(new: float, together: list[int] = together) -> np.ndarray:
                return segment.changed({n: np.asarray(new) for n in together})

            solved = segment.solve(value, ours)
            if solved is None:
                continue
            if cause == "mean" and abs(abs(solved - ours) - 1) < 1e-6:
                cause, words = "biased variance", "divisor of the sum of squares"
            if _is_logarithm(solved / ours if ours else 0.0):
                cause = "logarithm base"
            words = f"the {words} is {beside(solved, ours)} in the reference, {ours:.6g} in ours"
            yield segment.diagnosis(cause, words, value(solved))


def _is_logarithm(factor: float) -> bool:
    return any(
        math.isclose(factor, value, rel_tol=1e-6)
        for base in (2, 10)
        for value in (math.log(base), 1 / math.log(base))
    )


def _role(segment: Segment, number: int) -> tuple[str, str]:
    """Returns the cause that another value of a constant would be, and what the constant is."""
    for equation in segment.consumers(number):
        others = [n for n in equation.inputs if segment.origin(n) != number]
        results = list(segment.consumers(equation.outputs[0]))
        if equation.name == "add" and any(e.name in ("sqrt", "rsqrt") for e in results):
            return "norm epsilon", "epsilon inside the root"
        sources = [segment.producer(n) for n in others]
        if equation.name == "add" and sources == ["sqrt"]:
            return "norm epsilon", "epsilon outside the root"
        if equation.name == "div" and sources == ["reduce_sum"]:
            return "mean", "divisor of the sum"
        if equation.name in ("mul", "div"):
            role = "divisor" if equation.name == "div" else "factor"
            if sources == ["dot_general"]:
                scores = segment.site.endswith("scores") or "exp" in {
                    e.name for e in segment.equations
                }
                return ("attention scale" if scores else "scale"), f"{role} of the products"
            if sources == ["gather"]:
                return "embedding scale", f"{role} of the embeddings"
            return "scale", f"{role} of {segment.label(others[0])}" if others else role
        if equation.name == "select_n":
            return "mask value", "value of masked elements"
    return "constant", "constant"


def another_norm(segment: Segment) -> Found:
    """Epsilon outside or inside the root, the variance over n or n - 1, or no centering."""
    for equation in segment.equations:
        if equation.name in ("sqrt", "rsqrt"):
            yield from _other_roots(segment, equation)
    means = {
        equation.outputs[0]: np.zeros_like(segment.values[equation.outputs[0]])
        for equation in segment.equations
        if equation.name == "div"
        and segment.producer(equation.inputs[0]) == "reduce_sum"
        and segment.producer(segment.producers[segment.origin(equation.inputs[0])].inputs[0])
        not in ("square", "integer_pow", "mul", "exp")
    }
    if means:
        words = "the reference's norm does not subtract the mean"
        yield segment.cause("root-mean-square norm", words, means)
    for equation in segment.equations if not means else ():
        if equation.name in ("square", "integer_pow"):
            value = segment.values[equation.inputs[0]]
            centered = {equation.inputs[0]: value - value.mean(-1, keepdims=True)}
            words = "the reference's norm subtracts the mean"
            yield segment.cause("root-mean-square norm", words, centered)


def _other_roots(segment: Segment, equation: Equation) -> Found:
    variance, ours = _variance(segment, equation.inputs[0])
    count = _count(segment, variance)
    if count < 2:
        return
    ways = {"as ours": 1.0, "over n - 1": count / (count - 1), "over n": 1 - 1 / count}
    for (over, factor), inside in itertools.product(ways.items(), (True, False)):

        def value(epsilon: float, factor: float = factor, inside: bool = inside) -> np.ndarray:
            scaled = segment.values[variance] * factor
            root = np.sqrt(scaled + epsilon) if inside else np.sqrt(scaled) + epsilon
            result = 1 / root if equation.name == "rsqrt" else root
            return segment.changed({equation.outputs[0]: result})

        solved = segment.solve(value, ours)
        solved_for = [] if solved is None or abs(solved) < 1e-14 else [solved]
        for new in dict.fromkeys((ours, *sublayers.EPSILONS, *solved_for)):
            words = (
                f"the reference's norm has epsilon {new:.6g} {'inside' if inside else 'outside'} "
                f"the root and the variance {over}, ours epsilon {ours:.6g}"
            )
            cause = "norm epsilon" if factor == 1 else "biased variance"
            yield segment.diagnosis(cause, words, value(new))


def _variance(segment: Segment, number: int) -> tuple[int, float]:
    equation = segment.producers.get(segment.origin(number))
    if equation is not None and equation.name == "add":
        for variance, epsilon in (equation.inputs, equation.inputs[::-1]):
            constant = segment.origin(epsilon)
            if segment.is_number(constant):
                return variance, float(segment.program.constants[constant])
    return number, 0.0


def _count(segment: Segment, number: int) -> int:
    equation = segment.producers.get(segment.origin(number))
    while equation is not None and equation.name in ("div", "mul", "select_n", "max"):
        inputs = [segment.producers.get(segment.origin(n)) for n in equation.inputs]
        equation = next((e for e in inputs if e is not None), None)
    if equation is None or equation.name != "reduce_sum":
        return 0
    sizes = [segment.values[n].size for n in (*equation.inputs, *equation.outputs)]
    return sizes[0] // sizes[1]


def lower_precision(segment: Segment) -> Found:
    """A value is rounded to fewer digits."""
    if not 0 < segment.residual(segment.value) < 1e-2:
        return
    for number, value in segment.values.items():
        if value.dtype != np.float64 or value.size < 2:
            continue
        for dtype in (np.float32, np.float16):
            rounded = value.astype(dtype).astype(np.float64)
            words = f"the reference rounds {segment.label(number)} to {np.dtype(dtype).name}"
            yield segment.cause("precision", words, {number: rounded})


def solved_for(segment: Segment) -> Found:
    """A factor, a bias, a table or a matrix that explains the difference."""
    solved = segment.solve(lambda scale: scale * segment.value, 1.0)
    if solved is not None:
        words = f"the reference multiplies the result by {solved:.6g}, ours does not"
        logarithms = {"log", "log1p"} & {equation.name for equation in segment.equations}
        cause = "logarithm base" if logarithms and _is_logarithm(solved) else "scale"
        yield segment.diagnosis(cause, words, solved * segment.value)
    last = segment.producers.get(segment.number)
    if last is not None and last.name == "add":
        x, y = (segment.values[n] for n in last.inputs)
        if x.shape == y.shape:
            parts = np.stack([segment.select(part).ravel() for part in (x, y)], axis=1)
            a, b = np.linalg.lstsq(parts, segment.select(segment.expected).ravel())[0]
            names = [segment.label(n) for n in last.inputs]
            words = (
                f"the reference adds {a:.6g} times {names[0]} and {b:.6g} times {names[1]}, ours "
                "adds them unscaled"
            )
            yield segment.diagnosis("residual scale", words, a * x + b * y)
    with np.errstate(invalid="ignore"):
        change = segment.expected - segment.value
    if change.ndim >= 2 and np.isfinite(change).all():
        yield from _added(segment, change)
        for equation in segment.equations:
            if equation.name == "dot_general" and equation.outputs[0] in segment.values:
                yield from _other_matrix(segment, equation, change)


def _added(segment: Segment, change: np.ndarray) -> Found:
    rows = segment.select(change).reshape(-1, change.shape[-1])
    added = []
    if len(rows) > 3:
        added.append(("bias", "vector here", rows.mean(axis=0)))
    if change.ndim == 3 and len(change) > 2:
        words = "table here, the same for all sentences"
        added.append(("positions", words, change.mean(axis=0)))
    for what, words, value in added:
        largest = f"the largest difference is {np.max(np.abs(value)):.6g}"
        words = f"the reference adds another {words}; {largest}"
        yield segment.diagnosis(f"different {what}", words, segment.value + value)


def _other_matrix(segment: Segment, product: Equation, change: np.ndarray) -> Found:
    left, right = product.inputs
    matrix = segment.origin(right)
    if matrix not in segment.parameters or segment.values[product.outputs[0]].shape != change.shape:
        return
    x = segment.values[left].reshape(-1, segment.values[left].shape[-1])
    if len(x) < x.shape[1] + 2:  # With fewer rows, some matrix explains any difference.
        return
    delta = np.linalg.lstsq(x, change.reshape(-1, change.shape[-1]))[0]
    row, column = np.unravel_index(np.argmax(np.abs(delta)), delta.shape)
    words = (
        f"the reference has another {segment.parameters[matrix]}; the largest difference is "
        f"{delta[row, column]:.6g} at [{row}, {column}]"
    )
    yield segment.diagnosis(
        "different weights", words, segment.value + (x @ delta).reshape(change.shape)
    )


def _is_mask_of_rows(zero: np.ndarray, known: np.ndarray) -> bool:
    if not zero.ndim or zero.shape[-1] < 2:
        return False
    return not (zero.any(axis=-1) & (known & ~zero).any(axis=-1)).any()


def active_dropout(segment: Segment) -> Found:
    """Some elements of the result, or of an operand of its sum, are zero and the others scaled."""
    last = segment.producers.get(segment.number)
    parts = [(segment.value, segment.expected)]
    if last is not None and last.name == "add":
        x, y = (segment.values[n] for n in last.inputs)
        if x.shape == y.shape:
            parts += [(x, segment.expected - y), (y, segment.expected - x)]
    for ours, theirs in parts:
        known = np.abs(ours) > 1e-3 * np.max(np.abs(ours), initial=0.0)
        for name, words, operation in sublayers.active_dropout(ours, theirs, Given):
            dropped = operation.value()
            zero = known & (dropped == 0)
            # Else it is a mask of padding, or an activation.
            if not _is_mask_of_rows(zero, known) and np.any(zero != (known & (ours < 0))):
                yield segment.diagnosis(name, words, segment.expected - theirs + dropped)
