"""Memory and communication of a training step, read from its compiled program."""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.batches import Batch, BatchShape
from flaxformer_mt.memory_limits import device_memory, require_memory
from flaxformer_mt.training.parallel import Strategy
from flaxformer_mt.training.state import TrainState


def require_training_memory(config: ExperimentConfig, strategy: Strategy) -> None:
    """Checks that the devices have the memory that a training step needs at the very least.

    Counted are parameters and, unless some are frozen, their gradient, Adam's moments and the
    moving average; and of one micro-batch one activation and the attention scores of one layer.

    Args:
      config: the configuration; vocabulary sizes of 0 count as 0.
      strategy: from `make_strategy`.

    Raises:
      UserError: a device has less.
    """
    model, train = config.model, config.train
    count = model.parameter_count
    copies = 1 if train.freeze else 4 + (train.ema_decay > 0)
    stored = copies * count * jnp.dtype(model.param_dtype).itemsize
    tokens = train.batch_tokens // (train.accumulation_steps * strategy.row_shards)
    longest = max(config.data.row_lengths) if model.has_inputs else config.data.row_lengths[1]
    scores = tokens * longest * model.num_heads // config.parallel.tensor
    computed = jnp.dtype(model.dtype).itemsize * (tokens * model.d_model + scores)
    own = [device for device in strategy.devices if device.process_index == jax.process_index()]
    require_memory(
        stored // (config.parallel.fsdp * config.parallel.tensor) + computed,
        device_memory(own),
        f"training a model of {count:,} parameters with train.batch_tokens={train.batch_tokens} "
        "takes, on each device",
    )


@dataclasses.dataclass(frozen=True)
class StepCost:
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


def step_cost(
    strategy: Strategy,
    make_state: Callable[[], TrainState],
    train_step: Callable,
    shape: BatchShape,
    has_inputs: bool = True,
    optimize: bool = True,
) -> StepCost:
    """Compiles a training step for a batch shape, without creating a state or a batch.

    The program is compiled for the available devices: one for CPUs fuses less than one for GPUs or
    TPUs, and pads differently, so that its temporary memory is only an estimate of theirs.

    Args:
      strategy: from `make_strategy`.
      make_state: creates the initial state; only its shapes are used.
      train_step: (state, batch, axis_name) -> (state, metrics), as for `compile_train_step`.
      shape: of the whole batch, all processes together.
      has_inputs: whether batches have an encoder side.
      optimize: False compiles faster, with the same memory and communication.
    """
    state = strategy.abstract_state(make_state)
    batch = strategy.abstract_batch(abstract_batch(shape, has_inputs))
    options = {} if optimize else {"xla_backend_optimization_level": 0}
    compiled = strategy.compile_train_step(train_step).lower(state, batch).compile(options)
    parameters = (state.params, getattr(state, "ema", None))
    return StepCost(
        parameters=_bytes_on_a_device(parameters),
        optimizer_state=_bytes_on_a_device(state.opt_state),
        batch=_bytes_on_a_device(batch),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        sent=sent_bytes(compiled.as_text()),
    )


def abstract_batch(shape: BatchShape, has_inputs: bool = True) -> Batch:
    """Returns the shapes and dtypes of the arrays of a batch."""
    source: Any = jax.ShapeDtypeStruct((shape.rows, shape.source_length), jnp.int32)
    target: Any = jax.ShapeDtypeStruct((shape.rows, shape.target_length), jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(target.shape, jnp.float32)
    return Batch(
        encoder_input_tokens=source if has_inputs else None,
        decoder_input_tokens=target,
        decoder_target_tokens=target,
        decoder_loss_weights=weights,
        encoder_segment_ids=source if has_inputs else None,
        decoder_segment_ids=target,
        encoder_positions=source if has_inputs else None,
        decoder_positions=target,
    )


def _bytes_on_a_device(tree: Any) -> int:
    """Returns the size of one device's shards of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


class _Computation(NamedTuple):
    """A function of a compiled program."""

    sent: list[tuple[str, float]]
    """The kind of each of its collective operations, and the bytes sent in it."""
    calls: list[tuple[str, int]]
    """The functions that it calls, and the numbers of calls."""


# Bytes that each of n devices sends in an operation on an array of one byte, around a ring.
_RING: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # of its result, which is one shard
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(_RING)})(-start)?\(")
_CALL = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")


def sent_bytes(program: str) -> dict[str, int]:
    """Computes the bytes that a device sends in one run of a compiled program.

    Args:
      program: optimised HLO, as `Compiled.as_text` of JAX gives it.

    Returns:
      Bytes by kind ("all-reduce", "all-gather", "reduce-scatter", "all-to-all" and
      "collective-permute"), if every operation uses a ring. Operations in a loop are multiplied by
      its trip count, if that is known.
    """
    computations, entry = _parse(program)

    @functools.cache
    def total(name: str) -> dict[str, float]:
        result: dict[str, float] = defaultdict(float)
        for kind, size in computations[name].sent:
            result[kind] += size
        for callee, times in computations[name].calls:
            for kind, size in total(callee).items():
                result[kind] += times * size
        return result

    return {kind: round(size) for kind, size in sorted(total(entry).items())}


def _parse(program: str) -> tuple[dict[str, _Computation], str]:
    """Parses the functions of a program, by name, and the name of its entry."""
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation([], [])
    for line in program.splitlines():
        head = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
        if head:
            current = computations[head[2]] = _Computation([], [])
            entry = head[2] if head[1] else entry
            continue
        collective = _COLLECTIVE.search(line)
        if collective:
            current.sent.append((collective[2], _sent(line, *collective.groups())))
            continue
        trips = _TRIPS.search(line)
        times = int(trips[1]) if trips else 1
        branches = _BRANCHES.search(line)
        names = _CALL.findall(line) + re.findall(r"%([\w.-]+)", branches[1] if branches else "")
        current.calls.extend((name, times) for name in names)
    return computations, entry


def _sent(line: str, result: str, kind: str, start: str | None) -> float:
    """Computes the bytes that a device sends in the operation of a line."""
    size: float = sum(
        np.dtype(_numpy_name(name)).itemsize * math.prod(map(int, filter(None, dims.split(","))))
        for name, dims in _ARRAY.findall(result)
    )
    n = _group_size(line)
    # The start of an asynchronous operation also returns its operand.
    if start and kind == "all-gather":
        size = size * n / (n + 1)
    elif start and kind == "collective-permute":
        size = size / 2
    return size * _RING[kind](n)


def _group_size(line: str) -> int:
    """Returns the number of devices in each group of an operation.

    Raises:
      ValueError: the notation of the groups is unknown.
    """
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


def _numpy_name(name: str) -> str:
    """Returns a NumPy dtype of the size of the HLO type "f32", "s32", "pred" ..."""
    if name == "pred" or name.startswith("f8"):
        return "int8"
    if name.startswith("bf"):
        return "float16"
    kinds = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
    return kinds[name[0]] + name[1:]
