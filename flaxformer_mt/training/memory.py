"""The memory of a training step: what it needs at least, and what its compiled program takes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.data.stream.batches import Batch, BatchShape, packed_batch
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.memory_limits import device_memory, require_memory
from flaxformer_mt.training.devices import RunDevices


def require_training_memory(config: ExperimentConfig, run_devices: RunDevices) -> None:
    """Checks that the devices have the memory that a training step needs at the very least.

    Counted are parameters (vocabulary sizes of 0 count as 0) and, unless some are frozen, their
    gradient, the moments of Adam (other optimizers may keep less) and the moving average; and of
    one micro-batch one activation and, unless a kernel keeps them to itself, the attention scores
    of one layer.

    Raises:
      UserError: a device has less.
    """
    model, train = config.model, config.train
    count = model.parameter_count
    moments = {"adam": 2, "adamw": 2, "muon": 1}.get(config.optimizer.kind, 0)
    copies = 1 if train.freeze else 2 + moments + (train.ema_decay > 0)
    stored = copies * count * jnp.dtype(model.param_dtype).itemsize
    shards = len(run_devices.devices) // config.parallel.tensor
    rows = config.rows_per_batch // (train.accumulation_steps * shards)
    sides = ("source", "target") if model.has_inputs else ("target",)
    lengths = config.data.row_lengths[-len(sides) :]
    has_scores = model.attention_backend == "einsum" or run_devices.devices[0].platform == "cpu"
    scores = has_scores * max(lengths) ** 2 * model.num_heads // config.parallel.devices_per_row
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
        stored // (config.parallel.fsdp * config.parallel.devices_per_row) + computed,
        device_memory(own),
        f"training a model of {count:,} parameters with train.batch_tokens={train.batch_tokens} "
        f"in rows of {tokens} ({options}) takes, on each device,",
    )


class StepCost(NamedTuple):
    """Memory per device, in bytes."""

    parameters: int
    """The shard of the parameters, and of their moving average if there is one."""
    optimizer_state: int  # the shard of the optimizer state
    batch: int  # the rows
    temporary: int
    """The peak of temporary memory while the step runs, besides the above."""

    @property
    def total(self) -> int:
        """Peak memory."""
        return self.parameters + self.optimizer_state + self.batch + self.temporary

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"{self.total / mib:,.1f} MiB per device (parameters {self.parameters / mib:,.1f}, "
            f"optimizer state {self.optimizer_state / mib:,.1f}, batch {self.batch / mib:,.1f}, "
            f"temporary {self.temporary / mib:,.1f})"
        )


def step_cost(compiled: Any, state: Any, batch: Batch) -> StepCost:
    """Returns what a step compiled by JAX needs, for its arguments, which may be abstract.

    A program for CPUs fuses less than one for GPUs or TPUs, and pads differently, so that its
    temporary memory is only an estimate of theirs.
    """
    return StepCost(
        parameters=bytes_on_a_device((state.params, state.ema)),
        optimizer_state=bytes_on_a_device(state.opt_state),
        batch=bytes_on_a_device(batch),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
    )


def abstract_batch(shape: BatchShape, has_inputs: bool = True, fields: Sequence[str] = ()) -> Batch:
    """Returns the shapes and dtypes of the arrays of a batch of all processes.

    `fields` are the names of what its pairs have beside their texts, see `pair_fields`.
    """
    empty = Sentences.from_lists([])
    pairs = TokenPairs(empty if has_inputs else None, empty, dict.fromkeys(fields, empty))
    batch = packed_batch(pairs, np.zeros(shape.rows, np.int64), shape, TransformerConfig())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)


def bytes_on_a_device(tree: Any) -> int:
    """Returns the size of one device's shards of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
