"""Causes in attention: masks, heads, rotary positions, groups of queries, where scales are."""

import itertools
from collections.abc import Iterator

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
    splits: list[tuple[str, Numbers]] = []
    joins: list[tuple[str, Numbers]] = []
    for equation in segment.equations:
        if equation.name != "reshape":
            continue
        (number,), (output,) = equation.inputs, equation.outputs
        value, result = segment.values[number], segment.values[output]
        heads, width = result.shape[-2:] if result.ndim > 1 else (1, 1)
        if result.shape == (*value.shape[:-1], heads, width) and heads > 1:
            other = value.reshape(*value.shape[:-1], width, heads).swapaxes(-1, -2)
            words = f"splits {segment.label(number)} into heads"
            splits.append((f"{words} as (feature, head)", {output: other}))
            if value.ndim == 3:
                apart = value.reshape(len(value), heads, -1, width).swapaxes(1, 2)
                splits.append((f"{words} without a transpose", {output: apart}))
        if result.ndim == value.ndim - 1 > 1 and 1 not in value.shape[-2:]:
            ways = {"as (feature, head)": value.swapaxes(-1, -2)}
            if value.ndim == 4:
                ways["without a transpose"] = value.swapaxes(1, 2)
                ways["along the batch"] = value.transpose(2, 0, 1, 3)
            for order, other in ways.items():
                joins.append((f"joins heads {order}", {output: other.reshape(result.shape)}))
    for words, changes in (*joins, *splits):
        yield segment.cause("head order", f"the reference {words}", changes)
    for kind in ("(feature, head)", "without a transpose"):
        every = [changes for words, changes in splits if words.endswith(kind)]
        if len(every) > 2:
            words = f"the reference splits all of them into heads {kind}"
            together = {n: value for changes in every for n, value in changes.items()}
            yield segment.cause("head order", words, together)
    for (words, one), (also, second) in itertools.combinations(splits, 2):
        yield segment.cause("head order", f"the reference {words} and {also}", one | second)
    for (words, split), (_, join) in itertools.product(splits, joins):
        # The order of heads is changed before they are joined: both are computed anew.
        (output,) = join
        equation = next(e for e in segment.equations if output in e.outputs)
        changed = segment.changed(split, equation.inputs[0])
        other = changed.swapaxes(-1, -2).reshape(segment.values[output].shape)
        words = f"the reference {words}, and joins heads as (feature, head)"
        yield segment.cause("head order", words, {output: other})


def another_rotation(segment: Segment) -> Found:
    """Rotary positions turn other pairs, turn them the other way, or are missing."""
    for numbers, own, other in _rotated(segment):
        ways = (
            ("rotation layout", f"rotates pairs of {other}, ours pairs of {own}", (own, other)),
            ("rotation direction", "rotates in the other direction", (own, own)),
        )
        for together in each_and_all(numbers):
            for cause, words, key in ways:
                change, back = _CHANGES[key]
                changes = {number: change(segment.values[number]) for number in together}
                value = segment.changed(changes)
                words = f"the reference {words}"
                yield segment.diagnosis(cause, words, value)
                # Of scores, the order of the width does not count; of queries and keys, it does.
                if value.shape[-1:] == changes[together[0]].shape[-1:]:
                    yield segment.diagnosis(cause, words, back(value))
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
