"""Causes that are steps: omitted, replaced or reordered operations, weights and inputs."""

import collections
import itertools
import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional as F

from flaxformer_mt.parity.causes.numbers import operand_name
from flaxformer_mt.parity.program.diagnosis import Found
from flaxformer_mt.parity.program.equations import Equation
from flaxformer_mt.parity.program.segment import Numbers, Segment
from flaxformer_mt.parity.references.common import ACTIVATIONS as PUBLISHED_ACTIVATIONS

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **PUBLISHED_ACTIVATIONS,
    "none": lambda x: x,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
}
"""Activations by name; the first four are those of `TransformerConfig.activation`."""

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
        result = segment.values[output]
        if not np.issubdtype(result.dtype, np.floating):
            continue  # Indices and masks have causes of their own.
        for kept, omitted in ((0, 1), (1, 0))[: 2 if equation.name in ("add", "mul") else 1]:
            value, other = segment.values[equation.inputs[kept]], equation.inputs[omitted]
            if value.shape != result.shape or segment.is_number(segment.origin(other)):
                continue
            cause, label = operand_name(segment, equation, other), segment.label(other)
            words = f"the reference does not {_VERBS[equation.name]} {label}"
            yield segment.cause(f"{cause} missing", words, {output: value})
            if equation.name == "add":
                words, twice = f"the reference adds {label} twice", result + segment.values[other]
                yield segment.cause(f"{cause} added twice", words, {output: twice})


_VERBS = {"add": "add", "sub": "subtract", "mul": "multiply by", "div": "divide by"}


def another_activation(segment: Segment) -> Found:
    """Another elementwise function, or one more."""
    for start, end in _elementwise_regions(segment):
        if not np.issubdtype(segment.values[start].dtype, np.floating):
            continue
        hidden = torch.tensor(segment.values[start])
        for kind, function in ACTIVATIONS.items():
            words = f"the reference applies {kind} to {segment.label(start)}, ours another function"
            yield segment.cause("activation", words, {end: function(hidden).numpy()})
    last = segment.producers.get(segment.number)
    for kind, function in ACTIVATIONS.items():
        words = f"the reference applies {kind} to the result, ours does not"
        value = function(torch.tensor(segment.value)).numpy()
        yield segment.diagnosis("activation added", words, value)
        for index, number in enumerate(last.inputs if last and last.name == "add" else ()):
            words = f"the reference applies {kind} to {segment.label(number)}, ours does not"
            value = function(torch.tensor(segment.values[number])).numpy()
            changes = segment.with_operand(last, index, value)  # type: ignore[arg-type]
            yield segment.cause("activation added", words, changes)


def _elementwise_regions(segment: Segment) -> Iterator[tuple[int, int]]:
    """Yields (first, last): values of which the last is a function of the first's elements."""
    sources: dict[int, frozenset[int]] = {}
    for equation in segment.equations:
        number = equation.outputs[0]
        varying = [n for n in equation.inputs if not segment.is_number(segment.origin(n))]
        shape = segment.values[number].shape
        same = all(segment.values[n].shape == shape for n in varying)
        if len(equation.outputs) == 1 and varying and same and equation.name in _ELEMENTWISE:
            sources[number] = frozenset().union(*(sources.get(n, {n}) for n in varying))
    for number, found in sources.items():
        continues = any(
            equation.outputs[0] in sources and sources[equation.outputs[0]] == found
            for equation in segment.equations
            if number in equation.inputs
        )
        if len(found) == 1 and not continues:
            yield next(iter(found)), number


def another_softmax(segment: Segment) -> Found:
    """A softmax over another axis, or one more at the end."""
    for equation in segment.equations:
        if equation.name == "div" and segment.producer(equation.inputs[0]) == "exp":
            powers = segment.values[equation.inputs[0]]
            with np.errstate(divide="ignore"):
                scores = np.maximum(np.log(powers), -1e9)
            shifted = _before_exponential(segment, equation)
            # Where all is masked, the finite fill values of published masks give equal weights.
            scores = scores if shifted is None else np.maximum(shifted, -1e9)
            for axis in range(powers.ndim - 1):
                words = f"the reference's softmax runs over axis {axis}, ours over the last"
                yield segment.cause(
                    "softmax axis", words, {equation.outputs[0]: _softmax(scores, axis)}
                )
            yield from _without_any_key(segment, equation, shifted)
    probabilities = _softmax(segment.value)
    with np.errstate(divide="ignore"):
        logarithms = np.log(probabilities)
    for words, value in (("probabilities", probabilities), ("log-probabilities", logarithms)):
        yield segment.diagnosis("softmax in the output", f"the reference returns {words}", value)


def _softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(scores - np.max(scores, axis=axis, keepdims=True))
    return powers / np.sum(powers, axis=axis, keepdims=True)


def _before_exponential(segment: Segment, equation: Equation) -> np.ndarray | None:
    power = segment.source(equation.inputs[0])
    shift = segment.producers.get(power.inputs[0]) if power else None
    return segment.values[shift.inputs[0]] if shift and shift.name == "sub" else None


def _without_any_key(segment: Segment, division: Equation, scores: np.ndarray | None) -> Found:
    """Queries all of whose keys are masked get something else than zeros."""
    weights = segment.values[division.outputs[0]]
    without = np.isneginf(weights if scores is None else scores).all(axis=-1, keepdims=True)
    count = int(np.sum(without.reshape(len(without), -1, without.shape[-2]).any(axis=1)))
    if not count or weights.ndim < 3:
        return
    others = {
        "the mean of all values, because its masked scores are finite": 1 / weights.shape[-1],
        "NaN, because its masked scores are -inf": np.nan,
    }
    for name, weight in others.items():
        words = (
            f"all keys of {count} queries are masked, as in a sentence of padding alone: the "
            f"reference gives them {name}; ours gives zeros"
        )
        changes = {division.outputs[0]: np.where(without, weight, weights)}
        yield segment.cause("query without any key", words, changes)


def another_order(segment: Segment) -> Found:
    """A matrix, or attention weights, are transposed; a norm is applied first."""
    for number, path in segment.parameters.items():
        matrix = segment.values[number]
        if matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]:
            words = f"the reference uses the transpose of {path}"
            yield segment.cause("transposed matrix", words, {number: matrix.T})
    for number, site in (_read(segment) | segment.passed_over).items():
        value = segment.values[number]
        if value.ndim == 4 and value.shape[-1] == value.shape[-2]:
            words = f"the reference transposes {site}"
            yield segment.cause("transposed weights", words, {number: value.swapaxes(-1, -2)})
        if value.ndim == 4:
            mean = np.broadcast_to(value.mean(axis=1, keepdims=True), value.shape)
            words = f"the reference averages {site} over its heads"
            yield segment.cause("averaged weights", words, {number: mean})


def another_norm_position(segment: Segment) -> Found:
    """A norm is applied to what the segment reads, or after a sub-layer instead of before it."""
    program = segment.program
    for number, site in _read(segment).items():
        for norm in program.norms:
            value = segment.values[number]
            if norm.site == segment.site or value.shape != program.types[norm.number].shape:
                continue
            normalized = segment.evaluated(norm.equations, {norm.reads: value})[norm.number]
            words = f"the reference applies the norm of {norm.site} to {site}, ours does not"
            yield segment.cause("norm position", words, {number: normalized})
    for norm in program.norms:
        if norm.site != segment.site and segment.value.shape == program.types[norm.number].shape:
            value = segment.evaluated(norm.equations, {norm.reads: segment.value})[norm.number]
            words = f"the reference applies the norm of {norm.site} to the result"
            yield segment.diagnosis("norm position", words, value)
    yield from _post_norm(segment)


def _post_norm(segment: Segment) -> Found:
    """Ours has x + f(norm(x)), the reference norm(x + f(x)) or norm(x) + f(norm(x))."""
    program, values = segment.program, segment.values
    for norm in program.norms:
        if norm.number not in segment.producers or norm.reads not in values:
            continue
        x, label = values[norm.reads], segment.label(norm.reads)
        for equation in program.equations:
            operands = [n for n in equation.inputs if n != norm.reads]
            is_sum = equation.name == "add" and len(operands) == 1
            if not is_sum or not program.depends(operands[0], norm.number):
                continue
            total = equation.outputs[0]
            if total in segment.producers:
                added = segment.changed({norm.number: x}, total)
            else:
                after = program.slice_before(total, {norm.number, *values})
                added = segment.evaluated(after, {norm.number: x})[total]
            normalized = segment.evaluated(norm.equations, {norm.reads: added})[norm.number]
            words = f"the reference is post-norm, it normalizes {label} plus its sub-layer"
            if norm.number == segment.number:
                yield segment.diagnosis("norm position", words, normalized)
            elif total in segment.producers:
                changes = {norm.number: x, total: normalized}
                yield segment.cause("norm position", words, changes)
                index = equation.inputs.index(norm.reads)
                words = f"the reference adds the sub-layer to the norm of {label}"
                changes = segment.with_operand(equation, index, values[norm.number])
                yield segment.cause("norm position", words, changes)


def _read(segment: Segment) -> dict[int, str]:
    """Returns the known sites that the segment reads."""
    return {n: segment.known[n] for n in segment.leaves if n in segment.known}


def exchanged(segment: Segment) -> Found:
    """Two values of one shape are exchanged, such as queries and keys or the halves of a gate."""
    beside: dict[str, list[int]] = collections.defaultdict(list)
    for number, site in segment.passed_over.items():
        beside[site.rpartition("/")[0]].append(number)
    for together in ([*_read(segment)], *segment.slices.values(), *beside.values()):
        for one, other in itertools.combinations(together, 2):
            x, y = segment.values[one], segment.values[other]
            if (x.shape, x.dtype) == (y.shape, y.dtype):
                words = f"the reference exchanges {segment.label(one)} and {segment.label(other)}"
                yield segment.cause("exchanged operands", words, {one: y, other: x})


def other_tokens(segment: Segment) -> Found:
    """The tokens are shifted or reversed, or some embed to the zero vector."""
    arguments = set(segment.program.inputs) - set(segment.program.parameters)
    tokens = {n: v for n, v in segment.values.items() if n in arguments and v.ndim == 2}
    for number, own in tokens.items():
        if number not in segment.leaves or not np.issubdtype(own.dtype, np.integer):
            continue
        after_zero = np.pad(own, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        ways = [
            ("reversed tokens", "in reverse order", own[:, ::-1]),
            ("shifted tokens", "shifted one column to the left", np.roll(own, -1, axis=1)),
            ("shifted tokens", "shifted one column to the right", np.roll(own, 1, axis=1)),
            ("shifted tokens", "shifted to the right after a zero vector", after_zero),
            *(
                ("shifted tokens", "those of another input, such as the targets", other)
                for n, other in tokens.items()
                if n != number and other.shape == own.shape and other.dtype == own.dtype
            ),
        ]
        for cause, words, other in ways:
            words = f"the reference's tokens are ours, {words}"
            yield segment.cause(cause, words, {number: other})
        if segment.value.shape[:2] == own.shape and segment.value.ndim == 3:
            zero = ~segment.expected.any(axis=-1)
            found = tuple(int(token) for token in np.unique(own[zero & segment.value.any(axis=-1)]))
            value = np.where(np.isin(own, found)[..., None], 0, segment.value)
            words = f"the tokens {found} of this batch embed to the zero vector in the reference"
            yield segment.diagnosis("zeroed tokens", words, value)


def other_parameters(segment: Segment) -> Found:
    """Another parameter of the same shape, or one of another offset."""
    everything = _parameters(segment)
    for number, path in segment.parameters.items():
        own = segment.values[number]
        for other, value in everything.items():
            if other != path and value.shape == own.shape:
                words = f"the reference uses {other}, ours {path}"
                yield segment.cause("wrong weights", words, {number: value})
            elif other != path and value.T.shape == own.shape:
                words = f"the reference uses the transpose of {other}, ours {path}"
                yield segment.cause("wrong weights", words, {number: value.T})
            elif value.shape[1:] == own.shape[1:] and _is_table(segment, number, value):
                words = f"the reference looks up {other}, ours {path}"
                rows = np.resize(value, own.shape)
                yield segment.cause("wrong weights", words, {number: rows})
        for added in (1, -1) if own.ndim == 1 else ():
            words = f"the reference uses {path} {'+' if added > 0 else '-'} 1"
            yield segment.cause("scale plus 1", words, {number: own + added})


def _is_table(segment: Segment, number: int, other: np.ndarray) -> bool:
    """Whether rows of a parameter are looked up, all of which another table has."""
    lookups = [e for e in segment.equations if e.name == "gather" and number in e.inputs]
    indices = [segment.values[e.inputs[1]] for e in lookups]
    return bool(indices) and all(index.max() < len(other) for index in indices)


def _parameters(segment: Segment) -> dict[str, np.ndarray]:
    program = segment.program
    return {
        path: segment.values[n] for n, path in program.parameters.items() if n in segment.values
    }


def other_modules(segment: Segment) -> Found:
    """All parameters of the segment with a name are those with another name or index."""
    own, everything = segment.parameters, _parameters(segment)
    seen: set[tuple[str, ...]] = set()
    for ours, theirs in itertools.permutations(_names(everything), 2):
        renamed = {n: path.replace(ours, theirs, 1) for n, path in own.items() if ours in path}
        key = tuple(sorted(renamed.values()))
        if len(renamed) < 2 or key in seen or not everything.keys() >= {*key}:
            continue
        seen.add(key)
        changes: Numbers = {n: everything[path] for n, path in renamed.items()}
        if all(value.shape == segment.values[n].shape for n, value in changes.items()):
            first, also = next(iter(renamed)), f", and {len(renamed) - 1} more like it"
            words = f"the reference uses {renamed[first]}, ours {own[first]}{also}"
            yield segment.cause("wrong weights", words, changes)


def _names(paths: dict[str, np.ndarray]) -> list[str]:
    """Returns the components of paths that may be exchanged, and the indices of layers."""
    parts = [part for path in paths for part in path.split("/")]
    indices = [f"[{index}]" for part in parts for index in re.findall(r"\[(\d+)\]", part)]
    folders = [f"/{part}/" for path in paths for part in path.split("/")[1:-1]]
    prefixes = [part.removesuffix("_norm") for path in paths for part in path.split("/")[1:-1]]
    starts = [f"{path.split('/')[0]}/" for path in paths if "/" in path]
    modules = [f"{path.rpartition('/')[0]}/" for path in paths]
    return [*dict.fromkeys([*indices, *folders, *prefixes, *starts, *modules])]


def other_inputs(segment: Segment) -> Found:
    """The segment reads the value of another site: layers are skipped, repeated or reordered."""
    passed_over, readable = segment.passed_over, _read(segment)
    order = list(segment.program.sites)
    # Of several names of one value, the last is that of a whole layer.
    last = {number: site for site, number in segment.program.sites.items()}
    names = {site: last[number] for site, number in segment.program.sites.items()}
    theirs = segment.theirs
    same = {
        site
        for site, name in names.items()
        if site != name
        and {site, name} <= theirs.keys()
        and np.array_equal(theirs[site], theirs[name])
    }
    own = order.index(segment.site) if segment.site in order else len(order)
    for number, before in readable.items():
        between = order[order.index(before) + 1 : own] if before in order else []
        if any(site in segment.theirs for site in between):
            continue  # What runs is not skipped.
        words = f"the reference omits what is between {before} and {segment.site}"
        value = segment.values[number]
        yield segment.diagnosis(
            "norm missing" if segment.is_norm else "skipped layer", words, value
        )
    for number, ours in (readable | passed_over).items():
        original = segment.values[number]
        readers = [e for e in segment.equations if number in e.inputs]
        for other, value in segment.theirs.items():
            if (value.shape, value.dtype) != (original.shape, original.dtype):
                continue
            if other in (ours, segment.site) or other in same:
                continue
            if number in passed_over and other not in readable.values() and "#" not in other:
                continue  # What is left out is passed by what comes before it.
            if number in passed_over:
                cause, words = "skipped layer", f"omits {ours} and goes on with {other}"
            elif "#" in other:
                cause, words = "repeated layer", f"computes {other.split('#')[0]} again"
            else:
                cause = cause_of_reading(segment.site, ours, other, other in order[own + 1 :])
                if segment.program.is_norm_of(ours, other):
                    cause = "norm missing"
                elif segment.program.is_norm_of(other, ours):
                    cause = "norm position"
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
    layer = re.fullmatch(r"(.*[/.])\d+", other)
    if layer is not None:
        return "layer order" if site.startswith(layer[1]) else "another layer"
    return "sub-layer order" if later else "wrong input"


_LAYER = re.compile(r"(?<![^/.])\d+(?![^/.])")
"""A number that is a whole component of a name: "norm_1" is no layer."""
