"""The least time that a compiled program can take: kernel by kernel, loop by loop.

A kernel takes at least as long as its matrix products need at the peak rate of the device, and at
least as long as its operands and results need to be read from and written to the device's memory.
Launches, and the time that the network takes, come on top.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flaxformer_mt.accelerators import Accelerator

from .program import Instruction, Program, array_bytes

Function = dict[str, Instruction]

# These launch nothing, or only wait for what was started before.
_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
    "copy-done",
    "async-done",
    "async-update",
    "optimization-barrier",
    "slice-done",
    "dynamic-slice-done",
}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"}
_RENAMING = ("bitcast", "convert", "copy")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_TYPE = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_SHAPE = re.compile(r"\[([\d,]*)\]")


class Kernel(NamedTuple):
    """A kernel, or another operation that takes time, as often as it runs."""

    name: str
    kind: str
    """ "matmul" if it has a matrix product, the target of a custom call, or the operation."""
    source: str
    """Where in the Python program it comes from."""
    times: int
    flops: float
    """Operations of matrix products, of all its runs."""
    bytes: float
    """Bytes of operands and results, of all its runs."""

    def seconds(self, device: Accelerator) -> float:
        """Returns the least time of all its runs."""
        return max(self.flops / device.flops, self.bytes / device.bandwidth)


def kernels(program: Program) -> list[Kernel]:
    """Returns the kernels of a program; a loop without a known trip count runs once."""
    return list(_kernels(program, program.entry, 1))


def _kernels(program: Program, name: str, times: int) -> Iterator[Kernel]:
    function = program.functions[name]
    for instruction in function.values():
        match instruction.opcode:
            case opcode if opcode in _FREE:
                continue
            case "while":
                # The condition is one comparison, which is not counted.
                count = times * program.trip_count(instruction)
                for body in re.findall(r"body=%?([\w.-]+)", instruction.attributes):
                    yield from _kernels(program, body, count)
                continue
            case "call" | "async-start" | "conditional" if instruction.callees:
                for callee in instruction.callees:
                    yield from _kernels(program, callee, times)
                continue
        target = _TARGET.search(instruction.attributes)
        if target and target[1] in _FREE_CALLS:
            continue
        flops = _flops(program, function, instruction)
        yield Kernel(
            instruction.name,
            "matmul" if flops and not target else target[1] if target else instruction.opcode,
            instruction.source or _inner_source(program, instruction),
            times,
            times * flops,
            times * _bytes(program, function, instruction),
        )


def _inner_source(program: Program, instruction: Instruction) -> str:
    """The most frequent source of what a fusion consists of."""
    sources = [
        inner.source
        for callee in instruction.callees
        for inner in program.functions[callee].values()
        if inner.source
    ]
    return max(set(sources), key=sources.count, default="")


def _flops(program: Program, function: Function, instruction: Instruction) -> float:
    match instruction.opcode:
        case "dot":
            return _dot_flops(function, instruction)
        case "convolution":
            return _convolution_flops(function, instruction)
        case "fusion" | "call":
            return sum(
                _flops(program, program.functions[callee], inner)
                for callee in instruction.callees
                for inner in program.functions[callee].values()
            )
        case "custom-call":
            return _custom_flops(function, instruction)
    return 0


def _shapes(types: str) -> list[list[int]]:
    return [[int(size) for size in dims.split(",") if size] for dims in _SHAPE.findall(types)]


def _shape_of(function: Function, name: str) -> list[int]:
    return _shapes(function[name].result)[0]


def _dot_flops(function: Function, instruction: Instruction) -> float:
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    lhs = _shape_of(function, instruction.operands[0])
    axes = [int(axis) for axis in summed[1].split(",") if axis] if summed else []
    return 2 * math.prod(_shapes(instruction.result)[0]) * math.prod(lhs[axis] for axis in axes)


def _convolution_flops(function: Function, instruction: Instruction) -> float:
    """Compilers for TPUs turn products into convolutions, batch axes into dilated windows."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, instruction.name
    inputs, kernel = (_shape_of(function, operand) for operand in instruction.operands[:2])
    outputs = _shapes(instruction.result)[0]
    flops: float = 2 * kernel[labels[2].index("i")]
    for label, size in zip(labels[3], outputs, strict=True):
        if not label.isdigit():
            flops *= size
    for label in filter(str.isdigit, labels[2]):
        sizes = (
            inputs[labels[1].index(label)],
            kernel[labels[2].index(label)],
            outputs[labels[3].index(label)],
        )
        flops *= _taps(instruction.attributes, int(label), *sizes)
    return flops


def _taps(attributes: str, axis: int, inputs: int, kernel: int, outputs: int) -> int:
    """How often an input is multiplied by a kernel value, along an axis of the window."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(field.split("=") for field in window[1].split()) if window else {}

    def of(name: str, default: str) -> str:
        return given[name].split("x")[axis] if name in given else default

    stride, spread = int(of("stride", "1")), int(of("rhs_dilate", "1"))
    low, gap = int(of("pad", "0_0").split("_")[0]), int(of("lhs_dilate", "1"))
    positions = np.arange(outputs)[:, None] * stride + np.arange(kernel) * spread - low
    inside = (positions >= 0) & (positions <= (inputs - 1) * gap) & (positions % gap == 0)
    return int(np.count_nonzero(inside))


def _custom_flops(function: Function, instruction: Instruction) -> float:
    """The products of libraries' kernels, if their arguments or their authors say how many."""
    attributes = instruction.attributes
    target = _TARGET.search(attributes)
    name = target[1] if target else ""
    if name.startswith("__cublas$"):
        summed = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', attributes)
        lhs = _shape_of(function, instruction.operands[0])
        result = _shapes(instruction.result)[0]
        return 2 * math.prod(result) * (lhs[int(summed[1])] if summed else 1)
    if name.startswith("__cudnn$fmha"):
        # [B, T, H, K] or [B, H, T, K]: two products forward, five backward.
        query, key = (_shape_of(function, operand) for operand in instruction.operands[:2])
        is_backward = "Backward" in name
        length = math.prod(key) // (math.prod(query[:1]) * query[-1] * _common_heads(query, key))
        return (5 if is_backward else 2) * 2 * math.prod(query) * length
    estimate = re.search(r'"cost_estimate":(\{[^}]*\})', attributes)
    return float(json.loads(estimate[1]).get("flops", 0)) if estimate else 0


def _common_heads(query: list[int], key: list[int]) -> int:
    """H of [B, T, H, K] and [B, S, H, K], or of [B, H, T, K] and [B, H, S, K]."""
    return query[1] if query[1] == key[1] and query[2] != key[2] else query[2]


def _bytes(program: Program, function: Function, instruction: Instruction) -> float:
    operands = [function[name].result if name in function else "" for name in instruction.operands]
    match instruction.opcode:
        case "fusion":
            return _fusion_bytes(program, instruction, operands)
        case "dynamic-slice":
            return 2 * _memory_bytes(instruction.result)
        case "dynamic-update-slice":
            return 2 * _memory_bytes(operands[1])
        case "copy-start":  # Its result has source and destination.
            return _memory_bytes(instruction.result)
        case "slice-start":  # ((whole array), part, context)
            part = _TYPE.findall(instruction.result)[-2]
            return array_bytes(part) + _memory_bytes(part)
    return _memory_bytes(instruction.result) + sum(map(_memory_bytes, operands))


def _memory_bytes(types: str) -> int:
    """Bytes of arrays, without those that a TPU keeps in its cores, the memory space S(1)."""
    return sum(array_bytes(each) for each in _TYPE.findall(types) if "S(1)" not in each)


def _fusion_bytes(program: Program, instruction: Instruction, operands: list[str]) -> float:
    """What is only sliced, or updated in place, counts as its slices."""
    [callee] = instruction.callees
    inner = program.functions[callee]
    results, updated = _result_bytes(inner, _memory_bytes(instruction.result))
    parameters = {
        int(each.arguments): each.name for each in inner.values() if each.opcode == "parameter"
    }
    total = results
    for number, operand in enumerate(operands):
        if parameters[number] not in updated:
            total += min(_memory_bytes(operand), _read_bytes(inner, parameters[number]))
    return total


def _result_bytes(inner: Function, size: float) -> tuple[float, set[str]]:
    """Bytes of the results of a fusion, and the parameters that it updates in place."""
    updated = set()
    for root in (each for each in inner.values() if each.is_root):
        for name in root.operands if root.opcode == "tuple" else [root.name]:
            update = inner[_origin(inner, name)]
            if update.opcode == "dynamic-update-slice":
                array, part, *_ = update.operands
                size += _memory_bytes(inner[part].result) - _memory_bytes(inner[name].result)
                updated.add(_origin(inner, array))
            # A scatter without copies of its operand writes in place, as that to a cache.
            if update.opcode == "scatter" and len(update.operands) == 3:
                array, _, part = update.operands
                origin = _origin(inner, array)
                if inner[origin].opcode == "parameter":
                    size += _memory_bytes(inner[part].result) - _memory_bytes(inner[name].result)
                    updated.add(origin)
    return size, updated


def _origin(inner: Function, name: str) -> str:
    while inner[name].opcode in _RENAMING:
        name = inner[name].operands[0]
    return name


def _read_bytes(inner: Function, parameter: str) -> float:
    """Bytes of a parameter that are read; infinite if it is not only sliced."""
    names, uses = {parameter}, []
    for each in inner.values():  # Operands come before what reads them.
        if any(name in names for name in each.operands):
            if each.opcode == "bitcast":
                names.add(each.name)
            else:
                uses.append(each)
    if uses and all(use.opcode in ("dynamic-slice", "slice", "gather") for use in uses):
        return sum(_memory_bytes(use.result) for use in uses)
    return math.inf
