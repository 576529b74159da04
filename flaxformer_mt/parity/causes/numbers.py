"""Causes that are numbers: scales, epsilons, precision, dropout, and other weights."""

import collections
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from flaxformer_mt.parity.program.diagnosis import FLOAT32, Found, beside
from flaxformer_mt.parity.program.equations import Equation
from flaxformer_mt.parity.program.segment import Numbers, Segment, each_and_all


def another_norm(segment: Segment) -> Found:
    """Another epsilon, in or out of the root, the variance over n or n - 1, or no centering."""
    means: Numbers = {}
    roots: list[tuple[_Root, Numbers]] = []
    for equation in segment.equations:
        if _is_mean(segment, equation):
            means = {equation.outputs[0]: np.zeros_like(segment.values[equation.outputs[0]])}
        if (root := _root(segment, equation)) is not None:
            roots.append((root, means))
    for root, _ in roots:
        yield from _other_roots(segment, root, {})
    for root, its_mean in roots:
        if its_mean:
            yield from _other_roots(segment, root, its_mean)
    for equation in segment.equations if not means else ():
        if equation.name in ("square", "integer_pow"):
            value = segment.values[equation.inputs[0]]
            centered = {equation.inputs[0]: value - value.mean(-1, keepdims=True)}
            words = "the reference's norm subtracts the mean"
            yield segment.cause("root-mean-square norm", words, centered)


def _is_mean(segment: Segment, equation: Equation) -> bool:
    total = segment.source(equation.inputs[0]) if equation.name == "div" else None
    if total is None or total.name != "reduce_sum":
        return False
    return segment.producer(total.inputs[0]) not in ("square", "integer_pow", "mul", "exp")


class _Root:
    """The root of a variance, which a norm divides or, with `inverse`, multiplies by."""

    def __init__(self, equation: Equation) -> None:
        self.number, self.inverse = equation.outputs[0], equation.name == "rsqrt"
        self.variance, self.inside, self.outside = equation.inputs[0], 0.0, 0.0
        self.count, self.divisor = 0, 0.0

    def value(self, variance: np.ndarray, inside: float, outside: float) -> np.ndarray:
        root = np.sqrt(variance + inside) + outside
        return 1 / root if self.inverse else root

    @property
    def epsilon(self) -> float:
        return self.inside + self.outside


def _root(segment: Segment, equation: Equation) -> _Root | None:
    if equation.name not in ("sqrt", "rsqrt"):
        return None
    root = _Root(equation)
    root.variance, root.inside = _without_number(segment, root.variance)
    for reader in segment.consumers(root.number):
        if reader.name == "add" and not root.inverse:
            _, root.outside = _without_number(segment, reader.outputs[0])
            root.number = reader.outputs[0] if root.outside else root.number
    mean = segment.source(root.variance)
    while mean is not None and mean.name in ("div", "mul", "max"):
        if mean.name == "div" and segment.is_number(segment.origin(mean.inputs[1])):
            root.divisor = float(segment.values[segment.origin(mean.inputs[1])])
        mean = next((e for n in mean.inputs if (e := segment.source(n)) is not None), None)
    if mean is None or mean.name != "reduce_sum":
        return None
    root.count = segment.values[mean.inputs[0]].size // segment.values[mean.outputs[0]].size
    root.divisor = root.divisor or root.count
    return root if root.count > 1 else None


def _without_number(segment: Segment, number: int) -> tuple[int, float]:
    """Returns the other term and the number of a sum with one; else the value and 0."""
    equation = segment.producers.get(segment.origin(number))
    if equation is not None and equation.name == "add":
        for term, other in (equation.inputs, equation.inputs[::-1]):
            if segment.is_number(segment.origin(other)):
                return term, float(segment.values[segment.origin(other)])
    return number, 0.0


EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)


def _other_roots(segment: Segment, root: _Root, means: Numbers) -> Found:
    variance = segment.changed(means, root.variance)
    ours = _words(root.epsilon, not root.outside, root.divisor, root.count)
    divisors = dict.fromkeys((root.divisor, root.count, root.count - 1))
    for divisor, inside in itertools.product(divisors, (True, False)):

        def value(epsilon: float, divisor: float = divisor, inside: bool = inside) -> np.ndarray:
            scaled = variance * (root.divisor / divisor)
            epsilons = (epsilon, 0.0) if inside else (0.0, epsilon)
            return segment.changed(means | {root.number: root.value(scaled, *epsilons)})

        for epsilon in _epsilons(segment, root, value):
            words = f"the reference's norm has {_words(epsilon, inside, divisor, root.count)}"
            if means:
                cause, words = "root-mean-square norm", f"{words}, and does not subtract the mean"
            else:
                cause = "norm epsilon" if divisor == root.divisor else "biased variance"
            words = f"{words}; ours has {ours}{segment.location({root.number})}"
            yield segment.diagnosis(cause, words, value(epsilon))


def _epsilons(
    segment: Segment, root: _Root, value: Callable[[float], np.ndarray]
) -> Iterator[float]:
    yield from dict.fromkeys((root.epsilon, *EPSILONS))
    solved = segment.solve(value, root.epsilon or 1e-6)
    if solved is not None and abs(solved) > 1e-14:
        yield solved


def _words(epsilon: float, inside: bool, divisor: float, count: int) -> str:
    where = "inside" if inside else "outside"
    over = "n - 1" if divisor == count - 1 else "n"
    return f"epsilon {epsilon:.6g} {where} the root of the variance over {over}"


def another_constant(segment: Segment) -> Found:
    """Another scale, divisor or other number, which is solved for."""
    groups: dict[tuple[float, str, str], list[int]] = collections.defaultdict(list)
    for number in filter(segment.is_number, segment.leaves):
        ours = float(segment.program.constants[number])
        groups[ours, *_role(segment, number)].append(number)
    for (ours, cause, words), numbers in groups.items():
        for together in [[number] for number in numbers] + [numbers] * (len(numbers) > 1):

            def value(new: float, together: list[int] = together) -> np.ndarray:
                return segment.changed({n: np.asarray(new) for n in together})

            solved = segment.solve(value, ours)
            if solved is None and cause.endswith("scale"):
                solved = 1.0  # Through a norm, the search may not find it.
            if solved is None:
                continue
            if cause == "mean" and abs(abs(solved - ours) - 1) < 1e-6:
                cause, words = "biased variance", "divisor of the sum of squares"
            if _is_logarithm(solved / ours if ours else 0.0):
                cause = "logarithm base"
            words = f"the {words} is {beside(solved, ours)} in the reference, {ours:.6g} in ours"
            yield segment.diagnosis(cause, words + segment.location(together), value(solved))


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
                return _scale_of(segment, others[0]), f"{role} of the products"
            if table := segment.program.looked_up(others[0]) if others else "":
                return f"{table} scale", f"{role} of {segment.label(others[0])}"
            return "scale", f"{role} of {segment.label(others[0])}" if others else role
        if equation.name == "select_n":
            return "mask value", "value of masked elements"
    return "constant", "constant"


def _scale_of(segment: Segment, number: int) -> str:
    """Returns the cause that a factor of a value would be."""
    if table := segment.program.looked_up(number):
        return f"{table} scale"
    if segment.site == "logits":
        return "logit scale"
    names = {equation.name for equation in segment.equations}
    is_score = segment.site.endswith(("scores", "weights")) or "exp" in names
    return "attention scale" if is_score and segment.producer(number) != "exp" else "scale"


def scaled_result(segment: Segment) -> Found:
    """The result, or the two terms of its sum, are multiplied by numbers."""
    last = segment.producers.get(segment.number)
    if last is not None and last.name == "add":
        x, y = (segment.values[n] for n in last.inputs)
        tables = any(map(segment.program.looked_up, last.inputs))
        if x.shape == y.shape and segment.program.data.issuperset(last.inputs) and not tables:
            parts = np.stack([segment.select(part).ravel() for part in (x, y)], axis=1)
            a, b = np.linalg.lstsq(parts, segment.select(segment.expected).ravel())[0]
            names = [segment.label(n) for n in last.inputs]
            words = (
                f"the reference adds {a:.6g} times {names[0]} and {b:.6g} times {names[1]}, ours "
                "adds them unscaled"
            )
            yield segment.diagnosis("residual scale", words, a * x + b * y)
    if not segment.select(segment.expected).any():
        table = segment.program.looked_up(segment.number)
        is_table = segment.number not in segment.program.data
        what = table or ("positions" if is_table else "sub-layer")
        words = f"{segment.site} is zero in the reference"
        yield segment.diagnosis(f"{what} missing", words, np.zeros_like(segment.value))
    solved = segment.solve_factor(lambda scale: scale * segment.value)
    if solved is not None:
        words = f"the reference multiplies the result by {solved:.6g}, ours does not"
        logarithms = {"log", "log1p"} & {equation.name for equation in segment.equations}
        cause = _scale_of(segment, segment.number)
        cause = "logarithm base" if logarithms and _is_logarithm(solved) else cause
        yield segment.diagnosis(cause, words, solved * segment.value)


def another_scale(segment: Segment) -> Found:
    """A product, or a term of a sum, is multiplied by a number, ours by none."""
    products = [each for each in segment.equations if each.name == "dot_general"]
    for equation in (*products, *(each for each in segment.equations if each.name == "add")):
        for number in equation.inputs if equation.name == "add" else equation.outputs:
            original = segment.values[number]
            if original.dtype.kind != "f" or segment.is_scalar(segment.origin(number)):
                continue

            def value(
                factor: float,
                equation: Equation = equation,
                number: int = number,
                original: np.ndarray = original,
            ) -> np.ndarray:
                if number in equation.outputs:
                    return segment.changed({number: factor * original})
                index = equation.inputs.index(number)
                return segment.changed(segment.with_operand(equation, index, factor * original))

            cause, label = _scale_of(segment, number), segment.label(number)
            guesses = [segment.solve_factor(value)]
            if equation.name == "add":
                operand = operand_name(segment, equation, number)
                is_term = operand in ("residual", "sub-layer")
                cause = "residual scale" if is_term else f"{operand} scale"
                if operand == "embedding":  # A norm may follow, which is no linear function.
                    root = original.shape[-1] ** 0.5
                    guesses += [root, 1 / root, segment.solve(value, 1.0)]
            for factor in filter(None, guesses):
                words = f"the reference multiplies {label} by {factor:.6g}, ours does not"
                yield segment.diagnosis(cause, words + segment.location({number}), value(factor))


def operand_name(segment: Segment, equation: Equation, number: int) -> str:
    """Returns what an operand of a sum or product is: "bias", "positions", "residual" ..."""
    origin, program = segment.origin(number), segment.program
    if equation.name == "mul" and origin in program.parameters:
        return "scale"
    if equation.name not in ("add", "sub"):
        return "operand"
    others, table = [n for n in equation.inputs if n != number], program.looked_up(number)
    is_table = [program.looked_up(n) or n not in program.data for n in others]
    if table == "positions" or (table and all(is_table)):  # Else it is a residual.
        return table
    if number not in program.data:
        shape = segment.values[origin].shape
        if origin in program.parameters and len(shape) == 1:
            return "bias"
        if origin in program.constants and segment.values[origin].size == 1:
            return "constant"
        is_score = segment.site.endswith("scores") or segment.values[number].ndim == 4
        return "position bias" if is_score else "positions"
    if equation.name == "sub":
        return "operand"
    is_read = any(program.depends(other, origin) for other in others)
    return "residual" if is_read else "sub-layer"


def precision(segment: Segment) -> Found:
    """A value is rounded to fewer digits, or computed with fewer."""
    difference, expected = segment.residual(segment.value), segment.expected
    if not 0 < difference < 1e-2:
        return
    for number, value in segment.values.items():
        used = number in segment.producers or number in segment.leaves
        if value.dtype != np.float64 or value.size < 2 or not used:
            continue
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            rounded = torch.tensor(value).to(dtype).double().numpy()
            name = str(dtype).removeprefix("torch.")
            words = f"the reference rounds {segment.label(number)} to {name}"
            yield segment.cause("precision", words, {number: rounded})
    if segment.value.dtype != np.float64:
        return
    noise, given = segment.residual(segment.in_float32()), torch.tensor(expected)
    for dtype, limit in _LARGEST_ROUNDING.items():
        is_exact = torch.equal(given, given.to(dtype).to(given.dtype))
        is_noise = dtype == torch.float32 and difference <= 16 * noise
        if difference <= limit and (is_exact or is_noise):
            name = str(dtype).removeprefix("torch.")
            words = f"the reference differs by {difference:.1e}, as if it computed {segment.site}"
            words += f" in {name}; ours in float32 would differ by {noise:.1e}"
            yield segment.diagnosis("precision", words, expected)


_LARGEST_ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: FLOAT32}
"""The largest relative difference that is attributed to a dtype, narrow ones first."""


def active_dropout(segment: Segment) -> Found:
    """Some elements of a value are zero and the others scaled, on either side."""
    yield from _without_dropout(segment)
    parts = [(segment.value, segment.expected)]
    last = segment.producers.get(segment.number)
    if last is not None and last.name == "add":
        x, y = (segment.values[n] for n in last.inputs)
        if x.shape == y.shape:
            parts += [(x, segment.expected - y), (y, segment.expected - x)]
    for ours, theirs in parts:
        for words, dropped in _dropped(ours, theirs):
            value = segment.expected - theirs + dropped
            yield segment.diagnosis("dropout", words, value)
    for equation in segment.equations:
        if equation.name == "dot_general":
            yield from _dropout_of_weights(segment, equation)


def _without_dropout(segment: Segment) -> Found:
    """Ours multiplies values by random numbers, or selects some of them."""
    program, kept = segment.program, Numbers()
    for equation in segment.equations:
        data = [n for n in equation.inputs if n in program.data]
        if len(data) == 1 and program.drawn.intersection(equation.inputs):
            scaled = segment.producers.get(data[0])
            unscaled = segment.unscaled(scaled) if scaled else None
            kept[equation.outputs[0]] = segment.values[data[0] if unscaled is None else unscaled]
            for reader in segment.equations if unscaled is None else ():
                if segment.unscaled(reader) == equation.outputs[0]:
                    kept[reader.outputs[0]] = kept.pop(equation.outputs[0])
    for together in each_and_all(kept):
        words = "ours draws random numbers and has active dropout, the reference has none"
        yield segment.cause("dropout", words, {number: kept[number] for number in together})


def _dropout_of_weights(segment: Segment, product: Equation) -> Found:
    """Dropout of attention weights [B, H, T, S] before their product with values [B, H, S, U]."""
    weights, values = (segment.values[n] for n in product.inputs)
    result = segment.values[product.outputs[0]]
    is_known = segment.origin(product.inputs[0]) in segment.known
    if not is_known or result.ndim != 4 or segment.source(segment.number) is not product:
        return
    theirs = segment.expected.reshape(len(result), result.shape[2], result.shape[1], -1)
    attended = np.max(weights, axis=(1, 2))[:, None, :, None] > 0
    if weights.ndim != 4 or weights.shape[-1] != values.shape[-2]:
        return
    found = theirs.swapaxes(1, 2) @ np.linalg.pinv(np.where(attended, values, 0))
    for words, dropped in _dropped(weights, found):
        yield segment.cause("dropout", words, segment.with_operand(product, 0, dropped))


def _dropped(ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (words, value) if `theirs` is `ours`, of the same shape, after dropout."""
    known = np.abs(ours) > 1e-3 * np.max(np.abs(ours), initial=0.0)
    ratios = theirs[known] / ours[known]
    kept = ratios > 0.5  # Dropped values are 0, kept ones are scaled up.
    if kept.all() or not kept.any():
        return
    scale = float(np.median(ratios[kept]))
    if scale < 1 + 1e-6:  # A ReLU, for example, also sets some values to 0.
        return
    dropped = np.abs(theirs) < np.abs(theirs - scale * ours)
    zero = known & dropped
    # Else it is a mask of padding, or an activation.
    if not _is_mask_of_rows(zero, known) and np.any(zero != (known & (ours < 0))):
        words = (
            f"the reference has active dropout at a rate of {1 - 1 / scale:.3g}: some values are "
            f"0, the others {scale:.6g} times ours"
        )
        yield words, np.where(dropped, 0, scale * ours)


def _is_mask_of_rows(zero: np.ndarray, known: np.ndarray) -> bool:
    if not zero.ndim or zero.shape[-1] < 2:
        return False
    return not (zero.any(axis=-1) & (known & ~zero).any(axis=-1)).any()


def other_weights(segment: Segment) -> Found:
    """A bias, a table or a matrix that explains the difference."""
    with np.errstate(invalid="ignore"):
        change = segment.expected - segment.value
    if change.ndim >= 2 and np.isfinite(segment.select(change)).all():
        yield from _added(segment, change)
        for equation in segment.equations:
            if equation.name == "dot_general":
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
        largest = np.unravel_index(np.argmax(np.abs(value)), value.shape)
        index = ", ".join(map(str, largest))
        words = f"the reference adds another {words}; the largest difference is "
        words += f"{value[largest]:.6g} at [{index}]"
        yield segment.diagnosis(f"different {what}", words, segment.value + value)


def _other_matrix(segment: Segment, product: Equation, change: np.ndarray) -> Found:
    left, right = product.inputs
    matrix, result = segment.origin(right), segment.values[product.outputs[0]]
    if matrix not in segment.parameters or result.size != change.size:
        return
    every = segment.values[left]
    every = every.reshape(*change.shape[:-1], every.size // (change.size // change.shape[-1]))
    x = segment.select(every).reshape(-1, every.shape[-1])
    if len(x) < x.shape[1] + 2:  # With fewer rows, some matrix explains any difference.
        return
    delta = np.linalg.lstsq(x, segment.select(change).reshape(-1, change.shape[-1]))[0]
    row, column = np.unravel_index(np.argmax(np.abs(delta)), delta.shape)
    words = (
        f"the reference has another {segment.parameters[matrix]}; the largest difference is "
        f"{delta[row, column]:.6g} at [{row}, {column}]"
    )
    yield segment.diagnosis("different weights", words, segment.value + every @ delta)
