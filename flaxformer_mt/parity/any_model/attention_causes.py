"""Causes in newer attention: pairs of rotary positions, groups of queries, and where scales are."""

from collections.abc import Collection, Iterator

import numpy as np

from flaxformer_mt.parity.any_model.program import Equation
from flaxformer_mt.parity.any_model.segment import Found, Numbers, Segment


def another_rotation(segment: Segment) -> Found:
    """Rotary positions turn other pairs, turn them the other way, or are missing."""
    for numbers, own, other in _rotated(segment):
        ways = (
            (f"rotates pairs of {other}, ours pairs of {own}", _CHANGES[own, other]),
            ("rotates in the other direction", _CHANGES[own, own]),
        )
        for together in _each_and_all(numbers):
            for words, (change, back) in ways:
                changes = {number: change(segment.values[number]) for number in together}
                value = segment.changed(changes)
                words = f"the reference {words}"
                yield segment.diagnosis("rotary positions", words, value)
                # Of scores, the order of the width does not count; of queries and keys, it does.
                if value.shape[-1:] == changes[together[0]].shape[-1:]:
                    yield segment.diagnosis("rotary positions", words, back(value))
        for number in numbers:
            value = segment.values[number]
            for joined in _joined(segment, number):
                words = f"the reference does not rotate {segment.label(number)}"
                yield segment.cause("rotary positions", words, {joined: value})


def _rotated(segment: Segment) -> Iterator[tuple[list[int], str, str]]:
    """Yields values that are cut into pairs, which pairs ours are, and which others there are."""
    pairs: dict[str, list[int]] = {"halves": [], "neighbors": []}
    for number, parts in segment.slices.items():
        value, both = segment.values[number], [segment.values[part] for part in parts]
        if len(both) == 2 and both[0].shape == both[1].shape and both[0].ndim:
            if np.array_equal(np.concatenate(both, -1), value):
                pairs["halves"].append(number)
            elif np.array_equal(np.stack(both, -1).reshape(value.shape), value):
                pairs["neighbors"].append(number)
    yield pairs["halves"], "halves", "neighbors"
    yield pairs["neighbors"], "neighbors", "halves"


def _joined(segment: Segment, number: int) -> Iterator[int]:
    """Yields values of the shape of a value into which its parts are put together again."""
    reached = {number}
    for equation in segment.equations:
        if reached.intersection(equation.inputs):
            reached.update(equation.outputs)
            output = equation.outputs[0]
            is_joint = equation.name == "concatenate" or segment.producer(output) == "stack"
            if is_joint and segment.values[output].shape == segment.values[number].shape:
                yield output


def _neighbors_to_halves(value: np.ndarray) -> np.ndarray:
    return np.concatenate([value[..., 0::2], value[..., 1::2]], -1)


def _halves_to_neighbors(value: np.ndarray) -> np.ndarray:
    return np.stack(np.split(value, 2, -1), -1).reshape(value.shape)


def _exchange_halves(value: np.ndarray) -> np.ndarray:
    return np.roll(value, value.shape[-1] // 2, -1)


def _exchange_neighbors(value: np.ndarray) -> np.ndarray:
    return value.reshape(*value.shape[:-1], -1, 2)[..., ::-1].reshape(value.shape)


_CHANGES = {
    ("halves", "neighbors"): (_neighbors_to_halves, _halves_to_neighbors),
    ("neighbors", "halves"): (_halves_to_neighbors, _neighbors_to_halves),
    ("halves", "halves"): (_exchange_halves, _exchange_halves),
    ("neighbors", "neighbors"): (_exchange_neighbors, _exchange_neighbors),
}
"""What makes a rotation of our pairs one of others, or of the same in the other direction: the
permutations before and after it."""


def another_grouping(segment: Segment) -> Found:
    """Keys and values are tiled for groups of queries, where ours repeats each, or conversely."""
    found: Numbers = {}
    for equation in segment.equations:
        if equation.name == "tile":
            reps = equation.params["reps"]
            axes = [axis for axis, count in enumerate(reps) if count > 1]
            if len(axes) == 1:
                value = segment.values[equation.inputs[0]]
                found[equation.outputs[0]] = np.repeat(value, reps[axes[0]], axes[0])
        elif equation.name == "reshape":
            before = segment.producers.get(equation.inputs[0])
            if before is not None and before.name == "broadcast_in_dim":
                found |= _tiled(segment, equation)
    for together in _each_and_all(found):
        labels = " and ".join(segment.label(number) for number in together)
        words = f"the reference tiles {labels} where ours repeats each part, or conversely"
        changes = {number: found[number] for number in together}
        yield segment.cause("repeated heads", words, changes)


def _tiled(segment: Segment, merging: Equation) -> Numbers:
    """Returns the result of a reshape that merges two axes, if they are merged the other way."""
    value, shape = segment.values[merging.inputs[0]], segment.values[merging.outputs[0]].shape
    found: Numbers = {}
    for axis in range(len(shape) if value.ndim == len(shape) + 1 else 0):
        before, after = value.shape[:axis], value.shape[axis + 2 :]
        if (before, after) == (shape[:axis], shape[axis + 1 :]):
            found[merging.outputs[0]] = value.swapaxes(axis, axis + 1).reshape(shape)
    return found


def another_place(segment: Segment) -> Found:
    """A sum is multiplied by a number, where ours multiplies one of its terms, or conversely."""
    for second in segment.equations:
        for operand, number in enumerate(second.inputs):
            first = segment.producers.get(number)
            if first is None:
                continue
            if {_kind(segment, first), _kind(segment, second)} != {"sum", "scale"}:
                continue
            for other, term in enumerate(first.inputs):
                value = segment.values[term]
                if value.shape != segment.values[number].shape:
                    continue
                (moved,) = segment.with_operand(second, operand, value).values()
                if moved.shape != value.shape:
                    continue
                (result,) = segment.with_operand(first, other, moved).values()
                label = segment.label(term)
                words = (
                    f"the reference scales the sum, ours {label} alone"
                    if _kind(segment, second) == "sum"
                    else f"the reference scales {label} alone, ours the sum"
                )
                yield segment.cause("place of a scale", words, {second.outputs[0]: result})


def _kind(segment: Segment, equation: Equation) -> str:
    """Returns "sum", "scale" for a product with or quotient by a number, or ""."""
    if equation.name in ("add", "sub"):
        return "sum"
    has_number = any(segment.is_number(segment.origin(n)) for n in equation.inputs)
    return "scale" if equation.name in ("mul", "div") and has_number else ""


def _each_and_all(numbers: Collection[int]) -> list[list[int]]:
    """Returns each number alone, and several together."""
    together = [[*numbers]] if len(numbers) > 1 else []
    return [*([number] for number in numbers), *together]
