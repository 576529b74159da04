"""Memory and communication of a training step, read from its compiled program."""

import dataclasses
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
from flaxformer_mt.training.devices import CompiledStep, RunDevices


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
    optimizer_state: int  # the shard of the optimizer state
    batch: int  # the rows
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
    arrays: dict[str, Any] = {
        field.name: target if field.name.startswith("decoder") else source if has_inputs else None
        for field in dataclasses.fields(Batch)
    }
    arrays["decoder_loss_weights"] = weights
    arrays["alignment"] = links if has_alignment else None
    return Batch(**arrays)


def bytes_on_a_device(tree: Any) -> int:
    """Returns the size of one device's shards of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


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
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ((?:{'|'.join(RING)})(?:-start)?)\((.*)")
_CALLEES = re.compile(
    r"(?:body|calls|to_apply|(?:true|false)_computation|branch_computations)=(\{[^}]*\}|[%\w.-]+)"
)
# Compilers for TPUs divide an operation into steps, each beside other work.
_STEPS = re.compile(r"async[-_]collective| async-start\(")
_CHANNEL = re.compile(r"channel_id=\d+")


def sent_bytes(text: str) -> dict[str, int]:
    """Computes the bytes that a device sends in one run of a compiled program, by kind.

    `text` is optimized HLO, as `Compiled.as_text` of JAX gives it. Operations in a loop run as
    often as it does, if that is known.
    """
    functions: dict[str, list[str]] = {"": []}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            functions[name] = []
            entry = name if head[1] else entry
        functions[name].append(line)
    sent: dict[str, float] = defaultdict(float)
    channels: set[str] = set()

    def visit(name: str, times: int, is_step: bool) -> None:
        for line in functions[name][1:]:
            if found := _COLLECTIVE.search(line):
                channel = _CHANNEL.search(line) if is_step else None
                if channel is None or channel[0] not in channels:
                    result, opcode, attributes = found.groups()
                    kind, size = collective_bytes(opcode, result, attributes, name)
                    sent[kind] += times * size
                channels.update([channel[0]] if channel else [])
                continue
            for callees in _CALLEES.findall(line):
                for callee in re.findall(r"[\w.-]+", callees):
                    inner_is_step = is_step or bool(_STEPS.search(line))
                    visit(callee, times * _trip_count(line, functions), inner_is_step)

    visit(entry, 1, False)
    return {kind: round(size) for kind, size in sorted(sent.items())}


def _trip_count(line: str, functions: dict[str, list[str]]) -> int:
    """Returns how often an instruction runs its callees: 1 except for loops of known length.

    Compilers for GPUs and CPUs write it down. Those for TPUs do not, but the condition of a loop
    that counts to a constant shows it.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    lines = "\n".join(functions[condition[1]]) if condition else ""
    counts = re.search(r"ROOT .* compare\(.*%([\w.-]+)\), direction=LT", lines)
    limit = counts and re.search(rf"%{re.escape(counts[1])} = .* constant\((\d+)\)", lines)
    return int(limit[1]) if limit else 1


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
