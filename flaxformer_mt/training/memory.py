"""Memory and communication of a training step, read from its compiled program."""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.batches import Batch, BatchShape
from flaxformer_mt.data.stream.placement import row_shards
from flaxformer_mt.memory_limits import device_memory, require_memory
from flaxformer_mt.training.devices import CompiledStep
from flaxformer_mt.training.run_devices import RunDevices


def require_training_memory(config: ExperimentConfig, run_devices: RunDevices) -> None:
    """Checks that the devices have the memory that a training step needs at the very least.

    Counted are parameters (vocabulary sizes of 0 count as 0) and, unless some are frozen, their
    gradient, the moments of Adam (what Adafactor keeps may be small) and the moving average; and of
    one micro-batch one activation and, unless a kernel keeps them to itself, the attention scores
    of one layer.

    Raises:
      UserError: a device has less.
    """
    model, train = config.model, config.train
    count = model.parameter_count
    moments = 0 if config.optimizer.kind == "adafactor" else 2
    copies = 1 if train.freeze else 2 + moments + (train.ema_decay > 0)
    stored = copies * count * jnp.dtype(model.param_dtype).itemsize
    rows = config.rows_per_batch // (train.accumulation_steps * row_shards(run_devices.mesh))
    sides = ("source", "target") if model.has_inputs else ("target",)
    lengths = config.data.row_lengths[-len(sides) :]
    has_scores = model.attention_backend == "einsum" or run_devices.devices[0].platform == "cpu"
    scores = has_scores * max(lengths) ** 2 * model.num_heads // config.parallel.tensor
    numbers = rows * (sum(lengths) * model.d_model + scores)
    computed = jnp.dtype(model.dtype).itemsize * numbers
    own = [device for device in run_devices.devices if device.process_index == jax.process_index()]
    tokens = " and ".join(
        f"{length:,} {side} tokens" for length, side in zip(lengths, sides, strict=True)
    )
    options = (
        "data.bucket_lengths"
        if config.data.batching == "buckets"
        else ", ".join(f"data.{side}_row_length" for side in sides)
    )
    require_memory(
        stored // (config.parallel.fsdp * config.parallel.tensor) + computed,
        device_memory(own),
        f"training a model of {count:,} parameters with train.batch_tokens={train.batch_tokens} "
        f"in rows of {tokens} ({options}) takes, on each device,",
    )


class StepCost(NamedTuple):
    """Memory and communication per device, in bytes."""

    parameters: int
    """The shard of the parameters, and of their moving average if there is one."""
    optimizer_state: int
    """The shard of the optimizer state."""
    batch: int
    """The rows of the batch."""
    temporary: int
    """The peak of temporary memory while the step runs, besides the above."""
    sent: dict[str, int]
    """Bytes sent to other devices per step, by kind of collective operation."""

    @property
    def total(self) -> int:
        """Peak memory."""
        return self.parameters + self.optimizer_state + self.batch + self.temporary

    @property
    def total_sent(self) -> int:
        """Bytes sent in all collective operations."""
        return sum(self.sent.values())

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"{self.total / mib:,.1f} MiB per device (parameters {self.parameters / mib:,.1f}, "
            f"optimizer state {self.optimizer_state / mib:,.1f}, batch {self.batch / mib:,.1f}, "
            f"temporary {self.temporary / mib:,.1f}), "
            f"sends {self.total_sent / mib:,.1f} MiB per step"
        )


def step_cost(step: CompiledStep, state: Any, batch: Batch, optimize: bool = True) -> StepCost:
    """Compiles a training step for abstract arguments: shapes, dtypes and shardings.

    The program is compiled for the available devices: one for CPUs fuses less than one for GPUs or
    TPUs, and pads differently, so that its temporary memory is only an estimate of theirs. Without
    `optimize` it compiles faster, with the same memory and communication.
    """
    options = {} if optimize else {"xla_backend_optimization_level": 0}
    compiled = step.lower(state, batch).compile(options)
    return StepCost(
        parameters=bytes_on_a_device((state.params, state.ema)),
        optimizer_state=bytes_on_a_device(state.opt_state),
        batch=bytes_on_a_device(batch),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        sent=sent_bytes(compiled.as_text()),
    )


def abstract_batch(
    shape: BatchShape, has_inputs: bool = True, has_alignment: bool = False
) -> Batch:
    """Returns the shapes and dtypes of the arrays of a batch of all processes."""
    source: Any = jax.ShapeDtypeStruct((shape.rows, shape.source_length), jnp.int32)
    target: Any = jax.ShapeDtypeStruct((shape.rows, shape.target_length), jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(target.shape, jnp.float32)
    links: Any = jax.ShapeDtypeStruct((*target.shape, shape.source_length), jnp.float32)
    return Batch(
        encoder_input_tokens=source if has_inputs else None,
        decoder_input_tokens=target,
        decoder_target_tokens=target,
        decoder_loss_weights=weights,
        encoder_segment_ids=source if has_inputs else None,
        decoder_segment_ids=target,
        encoder_positions=source if has_inputs else None,
        decoder_positions=target,
        alignment=links if has_alignment else None,
    )


def bytes_on_a_device(tree: Any) -> int:
    """Returns the size of one device's shards of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


class Instruction(NamedTuple):
    """A line of a compiled program."""

    is_root: bool
    """Whether it is the result of its function."""
    name: str
    result: str
    """Its type, "bf16[8,16]{1,0}", or several in parentheses."""
    opcode: str
    arguments: str
    """What is in the parentheses after the opcode."""
    attributes: str
    """The rest of the line."""

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
    entry: str
    """The name of the function that is the program."""

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

    kind: str
    """One of `_RING`."""
    result: str
    """The type of its result, as in the program."""
    times: int
    """How often it runs in a run of the program."""
    sent: float
    """Bytes that a device sends in one of these, if it uses a ring."""
    is_asynchronous: bool
    """Whether other kernels run before it has ended."""
    source: str
    """Where in the Python program it comes from: the names of modules and functions."""

    @property
    def dtypes(self) -> list[str]:
        """The types of the numbers that are sent: "f32", "bf16" ..."""
        return [name for name, dims in _ARRAY.findall(self.result) if dims or name != "u32"]


# Bytes that each of n devices sends in an operation on an array of one byte, around a ring.
_RING: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # of its result, which is one shard
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
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
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_SOURCE = re.compile(r'op_name="([^"]*)"')


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


def array_bytes(types: str) -> int:
    """Returns the size of all arrays in the type of an instruction, without their padding."""
    total = 0
    for name, dims in _ARRAY.findall(types):
        if name not in ("token", "opaque"):
            bits = re.search(r"\d+", name)  # Of "f32", "bf16", "f8e4m3fn"; "pred" takes a byte.
            itemsize = int(bits[0]) // 8 if bits else 1
            total += itemsize * math.prod(map(int, filter(None, dims.split(","))))
    return total


def collectives(program: Program) -> list[Collective]:
    """Returns the collective operations of a program, in the order of its text.

    Operations in a loop run as often as it does, if that is known.
    """
    found: dict[str, Collective] = {}

    def visit(function: str, times: int, is_asynchronous: bool) -> None:
        for instruction in program.functions[function].values():
            if instruction.opcode.removesuffix("-start") in _RING:
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


def sent_bytes(text: str) -> dict[str, int]:
    """Computes the bytes that a device sends in one run of a compiled program, by kind."""
    sent: dict[str, float] = defaultdict(float)
    for operation in collectives(parse(text)):
        sent[operation.kind] += operation.times * operation.sent
    return {kind: round(size) for kind, size in sorted(sent.items())}


def _collective(
    instruction: Instruction, function: str, times: int, is_asynchronous: bool
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    starts = instruction.opcode != kind
    size: float = array_bytes(instruction.result)
    n = _group_size(instruction.attributes)
    # The start of an asynchronous operation also returns its operand, except for all-reduce.
    if starts and kind in ("all-gather", "reduce-scatter"):
        size = size * (n if kind == "all-gather" else 1) / (n + 1)
    elif starts and kind in ("all-to-all", "collective-permute"):
        size = size / 2
    # Compilers for TPUs write it as an all-reduce of which each device takes a shard.
    if kind == "all-reduce" and function.startswith("all-reduce-scatter"):
        kind, size = "reduce-scatter", size / n
    waits = '"is_sync":true' in instruction.attributes
    return Collective(
        kind,
        instruction.result,
        times,
        size * _RING[kind](n),
        (starts or is_asynchronous) and not waits,
        instruction.source,
    )


def _group_size(line: str) -> int:
    """Returns the number of devices in each group; `ValueError` if the notation is unknown."""
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
