"""Causes in attention: masks, heads, rotary positions, groups of queries, where scales are."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from flaxformer_mt.parity.program.diagnosis import Found
from flaxformer_mt.parity.program.equations import Equation
from flaxformer_mt.parity.program.segment import Numbers, Segment, each_and_all


def another_mask(segment: Segment) -> Found:
    """A mask that is missing, inverted, shifted, or additional."""
    for number, mask in segment.values.items():
        used = number in segment.producers or number in segment.leaves
        if mask.dtype != bool or mask.size < 2 or not used or segment.origin(number) != number:
            continue
        if _selects_indices(segment, number):
            continue
        name = _mask_name(segment, number)
        yield segment.cause(
            "inverted mask", f"the {name} is inverted in the reference", {number: ~mask}
        )
        for value in (np.ones_like(mask), np.zeros_like(mask)):
            words = f"the reference has no {name}"
            yield segment.cause(f"missing {name}", words, {number: value})
        if mask.ndim < 2 or mask.shape[-1] < 2:
            continue
        if mask.shape[-1] == mask.shape[-2]:
            words = f"the {name} is transposed in the reference"
            yield segment.cause("inverted mask", words, {number: mask.swapaxes(-1, -2)})
        if name == "padding mask":
            continue
        words = f"the {name} is shifted by one in the reference"
        for shift, border in ((-1, -1), (1, 0)):
            moved = np.roll(mask, shift, -1)
            for kept in (mask[..., border], False, True):
                moved[..., border] = kept
                changes: Numbers = {number: moved.copy()}
                yield segment.cause("causal mask off by one", words, changes)
                if not moved.any(axis=-1).all():
                    for fill in _without_any_key(segment, changes):
                        yield segment.cause("causal mask off by one", words, fill)
    ours, theirs = (np.isneginf(x) for x in (segment.value, segment.expected))
    if segment.site.endswith("scores") and (segment.select(theirs) > segment.select(ours)).any():
        causal = np.triu(np.ones(theirs.shape[-2:], bool), 1)
        cause, selected = "extra mask", segment.select(theirs)
        if np.array_equal(selected, segment.select(ours | causal)):
            cause = "extra causal mask"
        elif np.array_equal(
            selected, segment.select(ours | theirs.all(axis=(1, 2), keepdims=True))
        ):
            cause = "extra padding mask"
        value = np.where(theirs, -np.inf, segment.value)
        yield segment.diagnosis(cause, "the reference masks more than ours", value)


def _without_any_key(segment: Segment, changes: Numbers) -> Iterator[Numbers]:
    """Yields changes with which a query without any key gets the mean of all values, or zeros."""
    fills = [n for n in segment.leaves if segment.is_scalar(n) and float(segment.values[n]) <= -1e9]
    finite, infinite = (
        {n: np.full_like(segment.values[n], fill) for n in fills} for fill in (-1e9, -np.inf)
    )
    yield changes | finite
    recomputed = segment.recomputed(segment.equations, changes | infinite)
    for equation in segment.equations:
        if equation.name == "div" and segment.producer(equation.inputs[0]) == "exp":
            (output,) = equation.outputs
            yield changes | infinite | {output: np.nan_to_num(recomputed[output])}


def _selects_indices(segment: Segment, number: int) -> bool:
    """Whether a boolean value is no mask, but a choice of indices, or 0 and 1 in a product."""
    readers = list(segment.consumers(number))
    return bool(readers) and all(
        reader.name == "dot_general"
        or np.issubdtype(segment.values[reader.outputs[0]].dtype, np.integer)
        for reader in readers
    )


def _mask_name(segment: Segment, number: int) -> str:
    program, wanted, both = segment.program, {number}, set()
    arguments = set(program.inputs) - set(program.parameters)
    for equation in reversed(program.equations):
        if wanted.intersection(equation.outputs):
            wanted.update(equation.inputs)
            both.add(equation.name)
    if not wanted & arguments:
        return "causal mask"
    return "mask" if "and" in both else "padding mask"


def another_mask_value(segment: Segment) -> Found:
    """Masked scores are replaced by, or increased by, a number that does not hide them."""
    for equation in segment.equations:
        if equation.name != "select_n" or len(equation.inputs) != 3:
            continue
        chosen, *values = equation.inputs
        kept = segment.guarded(equation)
        if kept is None or not segment.values[chosen].any():
            continue
        output, scores = equation.outputs[0], segment.values[kept]
        if output != segment.number or scores.shape != segment.expected.shape:
            continue
        masked = segment.values[chosen] == (values.index(kept) == 0)
        everywhere = np.broadcast_to(masked, scores.shape).astype(scores.dtype)
        found, expected = segment.select(everywhere) > 0, segment.expected
        for added, change in ((0.0, "replaced by"), (scores, "increased by")):
            fills = segment.select(expected - added)[found]
            if fills.size and np.isfinite(fills).all():
                fill = float(np.median(fills))
                ours = np.min(segment.values[values[1 - values.index(kept)]])
                hidden = "-inf" if ours < -1e8 else f"{ours:.6g}"
                words = f"masked scores are {change} {fill:.6g} in the reference, by {hidden} here"
                value = np.where(masked, added + fill, segment.value)
                yield segment.diagnosis("mask sign" if fill > 0 else "mask value", words, value)


def another_head_order(segment: Segment) -> Found:
    """Heads are split or joined in another order."""
    splits: dict[str, list[Numbers]] = {"as (feature, head)": [], "without a transpose": []}
    joins: list[tuple[Equation, str]] = []
    for equation in segment.equations:
        if equation.name != "reshape":
            continue
        value, result = (segment.values[n] for n in (*equation.inputs, *equation.outputs))
        heads, width = result.shape[-2:] if result.ndim > 1 else (1, 1)
        if result.shape == (*value.shape[:-1], heads, width) and heads > 1:
            other = value.reshape(*value.shape[:-1], width, heads).swapaxes(-1, -2)
            splits["as (feature, head)"].append({equation.outputs[0]: other})
            if value.ndim == 3:
                other = value.reshape(len(value), heads, -1, width).swapaxes(1, 2)
                splits["without a transpose"].append({equation.outputs[0]: other})
        if result.ndim == value.ndim - 1 > 1 and 1 not in value.shape[-2:]:
            kinds = [*_JOINS] if value.ndim == 4 else ["as (feature, head)"]
            joins += [(equation, kind) for kind in kinds]

    def joined(equation: Equation, kind: str, value: np.ndarray) -> Numbers:
        (output,) = equation.outputs
        return {output: _JOINS[kind](value).reshape(segment.values[output].shape)}

    for equation, kind in joins:
        changes = joined(equation, kind, segment.values[equation.inputs[0]])
        yield segment.cause("head order", f"the reference joins heads {kind}", changes)
    for kind, found in splits.items():
        for count in sorted({1, 2, len(found)} - {0}):
            for together in itertools.combinations(found, count):
                split = {n: value for changes in together for n, value in changes.items()}
                labels = " and ".join(segment.label(segment.producers[n].inputs[0]) for n in split)
                words = f"the reference splits {labels} into heads {kind}"
                yield segment.cause("head order", words, split)
                # The order of heads is changed before they are joined: both are computed anew.
                for equation in [each for each, way in joins if way == kind]:
                    value = segment.changed(split, equation.inputs[0])
                    also = f"{words}, and joins them in the same way"
                    yield segment.cause("head order", also, joined(equation, kind, value))


_JOINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as (feature, head)": lambda value: value.swapaxes(-1, -2),
    "without a transpose": lambda value: value.swapaxes(1, 2),
    "along the batch": lambda value: value.transpose(2, 0, 1, 3),
}
"""How heads [B, T, H, K] are arranged before they are joined."""


def another_rotation(segment: Segment) -> Found:
    """Rotary positions turn other pairs, turn them the other way, or are missing."""
    for numbers, own, other in _rotated(segment):
        ways = (
            ("rotation layout", f"rotates pairs of {other}, ours pairs of {own}", other),
            ("rotation direction", "rotates in the other direction", f"{own}, reversed"),
        )
        for together in each_and_all(numbers):
            for cause, words, its in ways:
                changes = {n: _rearranged(segment.values[n], own, its) for n in together}
                value = segment.changed(changes)
                words = f"the reference {words}"
                yield segment.diagnosis(cause, words, value)
                # Scores sum over the width, so its order matters for queries and keys only.
                if value.shape[-1:] == changes[together[0]].shape[-1:]:
                    yield segment.diagnosis(cause, words, _rearranged(value, own, its, back=True))
        joined = {
            whole: segment.values[number]
            for number in numbers
            for whole in _joined(segment, number)
        }
        for together in each_and_all(joined):
            labels = " and ".join(segment.label(number) for number in numbers)
            words = f"the reference does not rotate {labels}, or one of them"
            changes = {number: joined[number] for number in together}
            yield segment.cause("rotation missing", words, changes)


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


def _rearranged(value: np.ndarray, own: str, other: str, back: bool = False) -> np.ndarray:
    """Returns features in an order in which rotating pairs of `own` rotates pairs of `other`."""
    width = value.shape[-1]
    order = np.empty(width, int)
    order[_pairs(own, width)] = _pairs(other, width)
    return value[..., np.argsort(order) if back else order]


def _pairs(kind: str, width: int) -> np.ndarray:
    """Returns the first features of all pairs, then the second ones."""
    features = np.arange(width)
    pairs = features.reshape(2, -1) if "halves" in kind else features.reshape(-1, 2).T
    return (pairs[::-1] if "reversed" in kind else pairs).ravel()


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
    yield from _grouped_products(segment)
    for together in each_and_all(found):
        labels = " and ".join(segment.label(number) for number in together)
        words = f"the reference tiles {labels} where ours repeats each part, or conversely"
        changes = {number: found[number] for number in together}
        yield segment.cause("repeated heads", words, changes)


def _grouped_products(segment: Segment) -> Found:
    """The heads [B, H, T, ...] of a group are rows of one matrix [B, G, H/G * T, ...] in ours."""
    products = [each for each in segment.equations if each.name == "dot_general"]
    for product, number in ((each, n) for each in products for n in each.inputs):
        merging = segment.producers.get(number)
        parting = [e for e in segment.equations if product.outputs[0] in e.inputs]
        if merging is None or {merging.name, *(e.name for e in parting)} != {"reshape"}:
            continue
        before, merged = (segment.values[n] for n in (merging.inputs[0], number))
        if before.ndim != 4 or merged.ndim != 4 or before.shape[1] == merged.shape[1]:
            continue
        groups = np.arange(before.shape[1]) % merged.shape[1]
        order = np.argsort(groups, kind="stable")
        parts = parting[0].outputs[0]
        changes = {number: before[:, order].reshape(merged.shape)}
        result = segment.changed(changes, parts)[:, np.argsort(order)]
        words = "head h of the queries has the keys and values of head h % G in the reference, "
        words += "h // (H/G) in ours"
        yield segment.cause("repeated heads", words, {parts: result})


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
