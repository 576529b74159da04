"""Compiled programs as text, parsed: their instructions, loops and collective operations."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

# Bytes that each of n devices sends in an operation on an array of one byte, around a ring.
RING: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # of its result, which is one shard
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
"""An array in the type of an instruction: "bf16[8,16]"."""


class Instruction(NamedTuple):
    """A line of a compiled program."""

    is_root: bool  # whether it is the result of its function
    name: str
    result: str
    """Its type, "bf16[8,16]{1,0}", or several in parentheses."""
    opcode: str
    arguments: str  # what is in the parentheses after the opcode
    attributes: str  # the rest of the line

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it reads."""
        return _NAME.findall(self.arguments)

    @property
    def callees(self) -> list[str]:
        """The names of the functions that it runs."""
        branches = _BRANCHES.search(self.attributes)
        return _CALL.findall(self.attributes) + _NAME.findall(branches[1] if branches else "")

    @property
    def source(self) -> str:
        """Where in the Python program it comes from; "" if it is not known."""
        found = _SOURCE.search(self.attributes)
        return found[1] if found else ""


class Program(NamedTuple):
    """A compiled program."""

    functions: dict[str, dict[str, Instruction]]
    """The instructions of each function, by name, in the order in which they run."""
    entry: str  # the name of the function that is the program

    def trip_count(self, instruction: Instruction) -> int:
        """Returns how often an instruction runs its callees: 1 except for loops of known length.

        Compilers for GPUs and CPUs write it down. Those for TPUs do not, but the condition of a
        loop that counts to a constant shows it.
        """
        known = _TRIPS.search(instruction.attributes)
        if known or instruction.opcode != "while":
            return int(known[1]) if known else 1
        [condition] = re.findall(r"condition=%?([\w.-]+)", instruction.attributes)
        for root in self.functions[condition].values():
            if root.is_root and root.opcode == "compare" and "direction=LT" in root.attributes:
                limit = self.functions[condition][root.operands[1]]
                return int(limit.arguments) if limit.opcode == "constant" else 1
        return 1


class Collective(NamedTuple):
    """A collective operation."""

    kind: str  # one of `RING`
    result: str  # the type of its result, as in the program
    times: int  # how often it runs in a run of the program
    sent: float
    """Bytes that a device sends in one of these, if it uses a ring."""
    is_asynchronous: bool  # whether other kernels run before it has ended
    source: str
    """Where in the Python program it comes from: the names of modules and functions."""

    @property
    def dtypes(self) -> list[str]:
        """The types of the numbers that are sent: "f32", "bf16" ..."""
        return [name for name, dims in ARRAY.findall(self.result) if dims or name != "u32"]


_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
# ROOT %name = type opcode(arguments), attributes
_LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)((?:, .*)?)$")
_CALL = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAME = re.compile(r"%([\w.-]+)")
_ASYNCHRONOUS = re.compile(r"async[-_]collective")  # The names that compilers for TPUs give.
_CHANNEL = re.compile(r"channel_id=\d+")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_SPLIT = re.compile(r'"split_k":"?(?!1\b)\d')


def parse(text: str) -> Program:
    """Parses optimized HLO, as `Compiled.as_text` of JAX gives it."""
    functions: dict[str, dict[str, Instruction]] = {}
    entry, current = "", dict[str, Instruction]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = functions[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            is_root, *parts = found.groups()
            instruction = Instruction(bool(is_root), *parts)
            current[instruction.name] = instruction
    return Program(functions, entry)


def collectives(program: Program) -> list[Collective]:
    """Returns the collective operations of a program, in the order of its text.

    Operations in a loop run as often as it does, if that is known.
    """
    found: dict[str, Collective] = {}

    def visit(function: str, times: int, is_asynchronous: bool) -> None:
        for instruction in program.functions[function].values():
            if instruction.opcode.removesuffix("-start") in RING:
                # Compilers for TPUs divide an operation into steps, each beside other work.
                channel = _CHANNEL.search(instruction.attributes) if is_asynchronous else None
                key = channel[0] if channel else f"{function}/{instruction.name}"
                if key not in found:
                    found[key] = _collective(instruction, function, times, is_asynchronous)
                continue
            names = f"{instruction.name} {instruction.callees}"
            starts = instruction.opcode == "async-start" or bool(_ASYNCHRONOUS.search(names))
            for callee in instruction.callees:
                inner_times = times * program.trip_count(instruction)
                visit(callee, inner_times, is_asynchronous or starts)

    visit(program.entry, 1, False)
    return list(found.values())


def sent_bytes(text: str) -> dict[str, float]:
    """Returns the bytes that a device sends in one run of a compiled program, by kind.

    `text` is optimized HLO, as `Compiled.as_text` of JAX gives it.
    """
    sent: Counter[str] = Counter()
    for each in collectives(parse(text)):
        sent[each.kind] += each.times * each.sent
    return dict(sent)


def unordered_sums(program: Program) -> list[Instruction]:
    """Returns the operations of a GPU that may add numbers in an order that changes between runs.

    They are those that use atomic additions: scatters that combine what meets at an index, and
    matrix products of which several blocks add to a part of the result (split-k). XLA writes
    reductions without atomics. Products by cuBLAS are not listed, since it chooses the algorithm on
    the device; `--xla_gpu_exclude_nondeterministic_ops=true` leaves it those with a fixed order.
    """
    return [
        instruction
        for function in program.functions.values()
        for instruction in function.values()
        if (instruction.opcode == "scatter" and _combines(program, instruction))
        or instruction.opcode == "select-and-scatter"
        or _SPLIT.search(instruction.attributes)
    ]


def _combines(program: Program, scatter: Instruction) -> bool:
    if "unique_indices=true" in scatter.attributes:
        return False
    bodies = [program.functions.get(name, {}) for name in scatter.callees]
    roots = [each.opcode for body in bodies for each in body.values() if each.is_root]
    return any(opcode != "parameter" for opcode in roots)


def _collective(
    instruction: Instruction, function: str, times: int, is_asynchronous: bool
) -> Collective:
    kind, sent = collective_bytes(
        instruction.opcode, instruction.result, instruction.attributes, function
    )
    starts = instruction.opcode.endswith("-start")
    waits = '"is_sync":true' in instruction.attributes
    return Collective(
        kind,
        instruction.result,
        times,
        sent,
        (starts or is_asynchronous) and not waits,
        instruction.source,
    )


def collective_bytes(opcode: str, result: str, attributes: str, function: str) -> tuple[str, float]:
    """Returns the kind of a collective operation, and the bytes that a device sends in it.

    `opcode` is one of `RING`, or the start of an asynchronous one; `function` is the name of the
    function that it belongs to.
    """
    kind = opcode.removesuffix("-start")
    size: float = array_bytes(result)
    n = _group_size(attributes)
    # The start of an asynchronous operation also returns its operand, except for all-reduce.
    if kind != opcode and kind in ("all-gather", "reduce-scatter"):
        size = size * (n if kind == "all-gather" else 1) / (n + 1)
    elif kind != opcode and kind in ("all-to-all", "collective-permute"):
        size = size / 2
    # Compilers for TPUs write it as an all-reduce of which each device takes a shard.
    if kind == "all-reduce" and function.startswith("all-reduce-scatter"):
        kind, size = "reduce-scatter", size / n
    return kind, size * RING[kind](n)


def array_bytes(types: str) -> int:
    """Returns the size of all arrays in the type of an instruction, without their padding."""
    total = 0
    for name, dims in ARRAY.findall(types):
        if name not in ("token", "opaque"):
            bits = re.search(r"\d+", name)  # Of "f32", "bf16", "f8e4m3fn"; "pred" takes a byte.
            itemsize = int(bits[0]) // 8 if bits else 1
            total += itemsize * math.prod(map(int, filter(None, dims.split(","))))
    return total


def _group_size(line: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)  # {{0,1},{2,3}}
    if listed:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)  # [2,2]<=[4]: groups, size
    if counted:
        return int(counted[1])
    # mesh['a'=2,'b'=4] {'a'}: along axes of a mesh, or along a part of one, {'b':(1)2}
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "source_target_pairs=" in line:
        return 2
    raise ValueError(f"unknown notation of device groups: {line.strip()}")
