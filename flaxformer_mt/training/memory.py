"""What a training step needs of each device, read from the compiled program, without running it."""

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

from flaxformer_mt.data.stream.batches import Batch, BatchShape
from flaxformer_mt.training.parallel import Strategy
from flaxformer_mt.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Bytes of one device."""

    parameters: int
    """This device's part of the parameters, and of their moving average if there is one."""
    optimizer_state: int
    """Its part of what the optimizer keeps."""
    batch: int
    """Its rows."""
    temporary: int
    """The most that is held while the step runs, beside what is above."""
    sent: dict[str, int]
    """What it sends to other devices in one step, by kind of collective operation."""

    @property
    def total(self) -> int:
        """Memory at the highest."""
        return self.parameters + self.optimizer_state + self.batch + self.temporary

    @property
    def total_sent(self) -> int:
        """By all collective operations together."""
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
    """Compiles a training step for a batch shape, without making a state or a batch.

    What is compiled is for the devices at hand: a program for CPUs fuses less than one for GPUs or
    TPUs, and pads differently, so that its temporary memory is only a guide to theirs.

    Args:
      strategy: from `make_strategy`.
      make_state: makes the initial state; only its shapes are looked at.
      train_step: (state, batch, axis_name) -> (state, metrics), as for `compile_train_step`.
      shape: of the whole batch, all processes together.
      has_inputs: whether batches have an encoder side.
      optimize: False compiles faster; memory and communication are the same, speed would not be.
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
    """The shapes and dtypes of a batch's arrays."""
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
    """Size of one device's part of abstract arrays that have shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


class _Computation(NamedTuple):
    """A function of a compiled program."""

    sent: list[tuple[str, float]]
    """Kind of each of its own collective operations, and the bytes sent in it."""
    calls: list[tuple[str, int]]
    """The functions that it calls, and how often."""


# Bytes that each of n devices sends to add, gather, ... an array of one byte around a ring.
_RING: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # of its result, which is a device's part
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
    """What a device sends while a compiled program runs once.

    Args:
      program: optimised HLO, as `Compiled.as_text` of JAX gives it.

    Returns:
      Bytes by kind ("all-reduce", "all-gather", "reduce-scatter", "all-to-all" and
      "collective-permute"), if every operation goes around a ring. Operations in a loop count as
      often as it runs; a loop whose number of rounds is not known counts once.
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
    """The functions of a program by name, and the name of the one that it starts with."""
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
    """Bytes that a device sends in the operation of a line."""
    size: float = sum(
        np.dtype(_numpy_name(name)).itemsize * math.prod(map(int, filter(None, dims.split(","))))
        for name, dims in _ARRAY.findall(result)
    )
    n = _group_size(line)
    # The first half of an operation that goes on in the background gives its operand back, too.
    if start and kind == "all-gather":
        size = size * n / (n + 1)
    elif start and kind == "collective-permute":
        size = size / 2
    return size * _RING[kind](n)


def _group_size(line: str) -> int:
    """How many devices take part in an operation together.

    Raises:
      ValueError: the line writes its groups in a way that is not known.
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
    raise ValueError(f"cannot tell how many devices take part: {line.strip()}")


def _numpy_name(name: str) -> str:
    """A NumPy dtype of the size of the one that HLO calls "f32", "s32", "pred" ..."""
    if name == "pred" or name.startswith("f8"):
        return "int8"
    if name.startswith("bf"):
        return "float16"
    kinds = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
    return kinds[name[0]] + name[1:]
