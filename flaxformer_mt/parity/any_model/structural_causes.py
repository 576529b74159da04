"""Causes that are steps: omitted, replaced or reordered operations, weights and inputs."""

import itertools
import re
from collections.abc import Iterator

import numpy as np
import torch

from flaxformer_mt.parity.any_model.program import Equation
from flaxformer_mt.parity.any_model.segment import Found, ProgramCause, Segment
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
        if equation.name not in ("add", "sub", "mul", "div"):
            continue
        result = segment.values[equation.outputs[0]]
        for kept, omitted in ((0, 1), (1, 0)):
            if equation.name in ("sub", "div") and kept:
                continue
            value = segment.values[equation.inputs[kept]]
            if value.shape != result.shape or segment.is_number(
                segment.origin(equation.inputs[omitted])
            ):
                continue
            cause = _omission(segment, equation, omitted)
            label = segment.label(equation.inputs[omitted])
            yield ProgramCause(
                f"{cause} missing",
                f"the reference does not {_VERBS[equation.name]} {label}",
                segment.changed({equation.outputs[0]: value}),
            )
            if equation.name == "add":
                twice = result + segment.values[equation.inputs[omitted]]
                yield ProgramCause(
                    f"{cause} added twice",
                    f"the reference adds {label} twice",
                    segment.changed({equation.outputs[0]: twice}),
                )


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
        hidden = torch.tensor(segment.values[start])
        for kind, function in ACTIVATIONS.items():
            yield ProgramCause(
                "activation",
                f"the reference applies {kind} to {segment.label(start)}, ours another function",
                segment.changed({end: function(hidden).numpy()}),
            )
    for kind, function in ACTIVATIONS.items():
        yield ProgramCause(
            "activation added",
            f"the reference applies {kind} to the result, ours does not",
            function(torch.tensor(segment.value)).numpy(),
        )


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
                yield ProgramCause(
                    "softmax axis",
                    f"the reference's softmax runs over axis {axis}, ours over the last",
                    segment.changed({equation.outputs[0]: Softmax(scores, axis).value()}),
                )
    probabilities = Softmax(segment.value).value()
    with np.errstate(divide="ignore"):
        logarithms = np.log(probabilities)
    for words, value in (("probabilities", probabilities), ("log-probabilities", logarithms)):
        yield ProgramCause("softmax in the output", f"the reference returns {words}", value)


def _before_exponential(segment: Segment, equation: Equation) -> np.ndarray | None:
    power = segment.producers[segment.origin(equation.inputs[0])]
    shift = segment.producers.get(power.inputs[0])
    return segment.values[shift.inputs[0]] if shift and shift.name == "sub" else None


def another_mask(segment: Segment) -> Found:
    """A mask that is missing, inverted, shifted, or additional."""
    for number, mask in segment.values.items():
        if (
            mask.dtype != bool
            or mask.size < 2
            or number not in {*segment.producers, *segment.leaves}
        ):
            continue
        padding = _depends_on_input(segment, number)
        name = "padding mask" if padding else "causal mask"
        others = [
            ("inverted mask", f"the {name} is inverted in the reference", ~mask),
            (f"missing {name}", f"the reference has no {name}", np.ones_like(mask)),
            (f"missing {name}", f"the reference has no {name}", np.zeros_like(mask)),
        ]
        if mask.ndim > 1 and mask.shape[-1] > 1:
            for shift in (-1, 1):
                moved = np.roll(mask, shift, -1)
                moved[..., -1 if shift < 0 else 0] = mask[..., -1 if shift < 0 else 0]
                words = f"the {name} is shifted by one in the reference"
                others.append((f"{name} off by one", words, moved))
        for cause, words, value in others:
            yield ProgramCause(cause, words, segment.changed({number: value}))
    ours, theirs = (np.isneginf(x) for x in (segment.value, segment.expected))
    if segment.site.endswith("scores") and (theirs & ~ours).any():
        causal = np.triu(np.ones(theirs.shape[-2:], bool), 1)
        words = "extra causal mask" if np.array_equal(theirs, ours | causal) else "extra mask"
        value = np.where(theirs, -np.inf, segment.value)
        yield ProgramCause(words, "the reference masks more than ours", value)


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
            for words, other in ways:
                yield ProgramCause(
                    "head order",
                    f"the reference joins heads as {words}",
                    segment.changed({equation.outputs[0]: other.reshape(result.shape)}),
                )
    for chosen in [*([number] for number in splits), [*splits]]:
        labels = " and ".join(segment.label(number) for number in chosen)
        if chosen:
            yield ProgramCause(
                "head order",
                f"the reference splits {labels} into heads as (feature, head)",
                segment.changed({number: splits[number] for number in chosen}),
            )
    for number, path in segment.parameters.items():
        matrix = segment.values[number]
        if matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]:
            yield ProgramCause(
                "transposed matrix",
                f"the reference uses the transpose of {path}",
                segment.changed({number: matrix.T}),
            )


def other_parameters(segment: Segment) -> Found:
    """Another parameter of the same shape, or all those of another layer or module."""
    everything = {
        path: segment.values[number]
        for number, path in segment.program.parameters.items()
        if number in segment.values
    }
    for number, path in segment.parameters.items():
        for other, value in everything.items():
            if other != path and value.shape == segment.values[number].shape:
                yield ProgramCause(
                    "wrong weights",
                    f"the reference uses {other}, ours {path}",
                    segment.changed({number: value}),
                )
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
            yield ProgramCause(
                "wrong weights",
                f"the reference uses the weights of {theirs}, ours those of {ours}",
                segment.changed(changes),
            )


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
        yield ProgramCause(
            "skipped layer",
            f"the reference omits what is between {before} and {segment.site}",
            segment.values[number],
        )
    for number, ours in (readable | passed_over).items():
        for other, value in segment.theirs.items():
            original = segment.values[number]
            if other == ours or value.shape != original.shape or value.dtype != original.dtype:
                continue
            if number in passed_over:
                cause, words = (
                    "skipped layer",
                    f"the reference omits {ours} and goes on with {other}",
                )
            elif "#" in other:
                cause, words = (
                    "repeated layer",
                    f"the reference computes {other.split('#')[0]} again",
                )
            else:
                cause = cause_of_reading(segment.site, ours, other, other in order[own + 1 :])
                words = f"the reference reads {other} here, ours {ours}"
            if other == segment.site:
                continue
            yield ProgramCause(cause, words, segment.changed({number: value}))
            readers = [e for e in segment.equations if number in e.inputs]
            for equation in readers if len(readers) > 1 else ():
                operand = equation.inputs.index(number)
                changed = segment.with_operand(equation, operand, value)
                yield ProgramCause(cause, f"{words}, in one place", changed)


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
