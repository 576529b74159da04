"""Causes that are steps: omitted, replaced or reordered operations, weights and inputs."""

import itertools
import re
from collections.abc import Iterator

import numpy as np
import torch

from flaxformer_mt.parity.any_model.program import Equation
from flaxformer_mt.parity.any_model.segment import Found, Segment
from flaxformer_mt.parity.diagnosis.operations import ACTIVATIONS, Softmax

_ELEMENTWISE = frozenset(
    [
        *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "pow", "integer_pow"),
        *("square", "sqrt", "rsqrt", "exp", "exp2", "log", "log1p", "abs", "sign"),
        *("tanh", "sin", "cos", "logistic", "erf", "erfc"),
        *("copy", "copy_p", "stop_gradient"),
    ]
)
"""Primitives that are functions of single elements."""


def left_out(segment: Segment) -> Found:
    """One operand of a sum, difference, product or quotient is left out, or added twice."""
    for equation in segment.equations:
        if equation.name not in _VERBS:
            continue
        (output,) = equation.outputs
        if {each.name for each in segment.consumers(output)} & _COMPARISONS:
            continue  # Of indices: a mask, which has causes of its own.
        result = segment.values[output]
        for kept, omitted in ((0, 1), (1, 0))[: 2 if equation.name in ("add", "mul") else 1]:
            value, other = segment.values[equation.inputs[kept]], equation.inputs[omitted]
            if value.shape != result.shape or segment.is_number(segment.origin(other)):
                continue
            cause, label = _omission(segment, equation, omitted), segment.label(other)
            words = f"the reference does not {_VERBS[equation.name]} {label}"
            yield segment.cause(f"{cause} missing", words, {output: value})
            if equation.name == "add":
                words, twice = f"the reference adds {label} twice", result + segment.values[other]
                yield segment.cause(f"{cause} added twice", words, {output: twice})


_COMPARISONS = {"eq", "ne", "ge", "gt", "le", "lt"}
_VERBS = {"add": "add", "sub": "subtract", "mul": "multiply by", "div": "divide by"}


def _omission(segment: Segment, equation: Equation, operand: int) -> str:
    origin = segment.origin(equation.inputs[operand])
    if origin in segment.program.parameters:
        vector = len(segment.program.types[origin].shape) == 1
        if equation.name == "mul":
            return "scale"
        return "bias" if vector else "positions"
    if origin in segment.program.constants:
        return "constant" if segment.values[origin].size == 1 else "positions"
    if equation.name == "add":
        return "residual" if origin in segment.known else "sub-layer"
    return "operand"


def another_activation(segment: Segment) -> Found:
    """Another elementwise function, or one more."""
    for start, end in _elementwise_regions(segment):
        if not np.issubdtype(segment.values[start].dtype, np.floating):
            continue
        hidden = torch.tensor(segment.values[start])
        for kind, function in ACTIVATIONS.items():
            words = f"the reference applies {kind} to {segment.label(start)}, ours another function"
            yield segment.cause("activation", words, {end: function(hidden).numpy()})
    for kind, function in ACTIVATIONS.items():
        words = f"the reference applies {kind} to the result, ours does not"
        value = function(torch.tensor(segment.value)).numpy()
        yield segment.diagnosis("activation added", words, value)


def _elementwise_regions(segment: Segment) -> Iterator[tuple[int, int]]:
    """Yields (first, last): values of which the last is a function of the first's elements."""
    sources: dict[int, frozenset[int]] = {}
    for equation in segment.equations:
        number = equation.outputs[0]
        varying = [n for n in equation.inputs if not segment.is_number(segment.origin(n))]
        shape = segment.values[number].shape
        same = all(segment.values[n].shape == shape for n in varying)
        if len(equation.outputs) == 1 and varying and same and _is_elementwise(equation):
            sources[number] = frozenset().union(*(sources.get(n, {n}) for n in varying))
    for number, found in sources.items():
        continues = any(
            equation.outputs[0] in sources and sources[equation.outputs[0]] == found
            for equation in segment.equations
            if number in equation.inputs
        )
        if len(found) == 1 and not continues:
            yield next(iter(found)), number


def _is_elementwise(equation: Equation) -> bool:
    if equation.name in ("custom_jvp_call", "jit"):
        body = equation.params.get("call_jaxpr") or equation.params["jaxpr"]
        return all(eqn.primitive.name in {*_ELEMENTWISE, "jit", "pjit"} for eqn in body.jaxpr.eqns)
    return equation.name in _ELEMENTWISE


def another_softmax(segment: Segment) -> Found:
    """A softmax over another axis, or one more at the end."""
    for equation in segment.equations:
        if equation.name == "div" and segment.producer(equation.inputs[0]) == "exp":
            powers = segment.values[equation.inputs[0]]
            with np.errstate(divide="ignore"):
                scores = np.maximum(np.log(powers), -1e9)
            shifted = _before_exponential(segment, equation)
            scores = scores if shifted is None else np.maximum(shifted, -1e9)
            for axis in range(powers.ndim - 1):
                words = f"the reference's softmax runs over axis {axis}, ours over the last"
                value = Softmax(scores, axis).value()
                yield segment.cause("softmax axis", words, {equation.outputs[0]: value})
    probabilities = Softmax(segment.value).value()
    with np.errstate(divide="ignore"):
        logarithms = np.log(probabilities)
    for words, value in (("probabilities", probabilities), ("log-probabilities", logarithms)):
        yield segment.diagnosis("softmax in the output", f"the reference returns {words}", value)


def _before_exponential(segment: Segment, equation: Equation) -> np.ndarray | None:
    power = segment.producers[segment.origin(equation.inputs[0])]
    shift = segment.producers.get(power.inputs[0])
    return segment.values[shift.inputs[0]] if shift and shift.name == "sub" else None


def another_mask(segment: Segment) -> Found:
    """A mask that is missing, inverted, shifted, or additional."""
    for number, mask in segment.values.items():
        used = number in segment.producers or number in segment.leaves
        if mask.dtype != bool or mask.size < 2 or not used:
            continue
        name = "padding mask" if _depends_on_input(segment, number) else "causal mask"
        words = f"the {name} is inverted in the reference"
        yield segment.cause("inverted mask", words, {number: ~mask})
        for value in (np.ones_like(mask), np.zeros_like(mask)):
            words = f"the reference has no {name}"
            yield segment.cause(f"missing {name}", words, {number: value})
        if mask.ndim > 1 and mask.shape[-1] > 1:
            words = f"the {name} is shifted by one in the reference"
            for shift, border in ((-1, -1), (1, 0)):
                moved = np.roll(mask, shift, -1)
                moved[..., border] = mask[..., border]
                yield segment.cause(f"{name} off by one", words, {number: moved})
    ours, theirs = (np.isneginf(x) for x in (segment.value, segment.expected))
    if segment.site.endswith("scores") and (theirs & ~ours).any():
        causal = np.triu(np.ones(theirs.shape[-2:], bool), 1)
        words = "extra causal mask" if np.array_equal(theirs, ours | causal) else "extra mask"
        value = np.where(theirs, -np.inf, segment.value)
        yield segment.diagnosis(words, "the reference masks more than ours", value)


def _depends_on_input(segment: Segment, number: int) -> bool:
    program = segment.program
    arguments = set(program.inputs) - set(program.parameters)
    wanted = {number}
    for equation in reversed(program.equations):
        if wanted.intersection(equation.outputs):
            wanted.update(equation.inputs)
    return bool(wanted & arguments)


def another_order(segment: Segment) -> Found:
    """Heads are split or joined in another order, or a matrix is transposed."""
    splits: dict[int, np.ndarray] = {}
    for equation in segment.equations:
        if equation.name != "reshape":
            continue
        value = segment.values[equation.inputs[0]]
        result = segment.values[equation.outputs[0]]
        if result.ndim == value.ndim + 1 > 1:
            heads, width = result.shape[-2:]
            if value.shape[-1] == heads * width:
                other = value.reshape(*value.shape[:-1], width, heads).swapaxes(-1, -2)
                splits[equation.outputs[0]] = other
        if result.ndim == value.ndim - 1:
            before = segment.producers.get(equation.inputs[0])
            ways = [("(feature, head)", value.swapaxes(-1, -2))]
            if before is not None and before.name == "transpose":
                ways.append(("without a transpose", segment.values[before.inputs[0]]))
            for order, other in ways:
                joined = {equation.outputs[0]: other.reshape(result.shape)}
                yield segment.cause("head order", f"the reference joins heads as {order}", joined)
    for chosen in [*([number] for number in splits), [*splits]]:
        if chosen:
            labels = " and ".join(segment.label(number) for number in chosen)
            words = f"the reference splits {labels} into heads as (feature, head)"
            yield segment.cause("head order", words, {number: splits[number] for number in chosen})
    for number, path in segment.parameters.items():
        matrix = segment.values[number]
        if matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]:
            words = f"the reference uses the transpose of {path}"
            yield segment.cause("transposed matrix", words, {number: matrix.T})


def exchanged(segment: Segment) -> Found:
    """Two values of one shape are exchanged, such as queries and keys or the halves of a gate."""
    read = [n for n in segment.leaves if n in segment.known]
    for together in (read, *segment.slices.values()):
        for one, other in itertools.combinations(together, 2):
            x, y = segment.values[one], segment.values[other]
            if (x.shape, x.dtype) == (y.shape, y.dtype):
                words = f"the reference exchanges {segment.label(one)} and {segment.label(other)}"
                yield segment.cause("exchanged operands", words, {one: y, other: x})


def other_parameters(segment: Segment) -> Found:
    """Another parameter of the same shape, or all those of another layer or module."""
    everything = {
        path: segment.values[number]
        for number, path in segment.program.parameters.items()
        if number in segment.values
    }
    for number, path in segment.parameters.items():
        own = segment.values[number]
        for other, value in everything.items():
            if other != path and value.shape == own.shape:
                words = f"the reference uses {other}, ours {path}"
                yield segment.cause("wrong weights", words, {number: value})
            elif other != path and value.T.shape == own.shape:
                words = f"the reference uses the transpose of {other}, ours {path}"
                yield segment.cause("wrong weights", words, {number: value.T})
        for added in (1, -1) if own.ndim == 1 else ():
            words = f"the reference uses {path} {'+' if added > 0 else '-'} 1"
            yield segment.cause("scale plus 1", words, {number: own + added})
    prefixes = {path.rpartition("/")[0] for path in segment.parameters.values()}
    for ours, theirs in itertools.product(prefixes, {p.rpartition("/")[0] for p in everything}):
        changes = {
            number: everything[other]
            for number, path in segment.parameters.items()
            if path.rpartition("/")[0] == ours
            and (other := f"{theirs}/{path.rpartition('/')[2]}") in everything
            and everything[other].shape == segment.values[number].shape
        }
        if ours != theirs and len(changes) > 1:
            words = f"the reference uses the weights of {theirs}, ours those of {ours}"
            yield segment.cause("wrong weights", words, changes)


def other_inputs(segment: Segment) -> Found:
    """The segment reads the value of another site: layers are skipped, repeated or reordered."""
    passed_over = {
        number: site
        for site, number in segment.program.sites.items()
        if number in segment.producers and number != segment.number
    }
    readable = {n: segment.known[n] for n in segment.leaves if n in segment.known}
    order = list(segment.program.sites)
    own = order.index(segment.site) if segment.site in order else len(order)
    for number, before in readable.items():
        between = order[order.index(before) + 1 : own] if before in order else []
        if any(site in segment.theirs for site in between):
            continue  # What runs is not skipped.
        words = f"the reference omits what is between {before} and {segment.site}"
        yield segment.diagnosis("skipped layer", words, segment.values[number])
    for number, ours in (readable | passed_over).items():
        original = segment.values[number]
        readers = [e for e in segment.equations if number in e.inputs]
        for other, value in segment.theirs.items():
            if (value.shape, value.dtype) != (original.shape, original.dtype):
                continue
            if other in (ours, segment.site):
                continue
            if number in passed_over:
                cause, words = "skipped layer", f"omits {ours} and goes on with {other}"
            elif "#" in other:
                cause, words = "repeated layer", f"computes {other.split('#')[0]} again"
            else:
                cause = cause_of_reading(segment.site, ours, other, other in order[own + 1 :])
                words = f"reads {other} here, ours {ours}"
            yield segment.cause(cause, f"the reference {words}", {number: value})
            for equation in readers if len(readers) > 1 else ():
                changes = segment.with_operand(equation, equation.inputs.index(number), value)
                yield segment.cause(cause, f"the reference {words}, in one place", changes)


def cause_of_reading(site: str, ours: str, other: str, later: bool) -> str:
    """Returns the cause of reading `other` for `ours`; `later`: whether ours computes it after."""
    own, its = (re.match(rf".*?{_LAYER.pattern}", name) for name in (site, other))
    inside = own is not None and its is not None and own[0] == its[0]
    if not inside and _LAYER.sub("#", ours) == _LAYER.sub("#", other):
        stack = _LAYER.split(ours)[0]
        return "layer order" if site.startswith(stack) else "another layer"
    return "sub-layer order" if later else "wrong input"


_LAYER = re.compile(r"(?<![^/.])\d+(?![^/.])")
"""A number that is a whole component of a name: "norm_1" is no layer."""
