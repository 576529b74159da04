"""Placement of batches on the devices of a mesh."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.data.stream.batches import Batch, Shard
from flaxformer_mt.errors import UserError

ROW_AXES = ("data", "fsdp")
"""The axes of a mesh over which the rows of batches are sharded."""

# The following are asked for with every batch, and asking for all devices of a pod takes time.


@functools.cache
def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the rows of batches."""
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in ROW_AXES if a in mesh.axis_names)))


@functools.cache
def row_shards(mesh: Mesh) -> int:
    """Returns the number of shards of the rows of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ROW_AXES)


@functools.cache
def own_shard(mesh: Mesh) -> Shard:
    """Returns the part of every batch that this process reads."""
    parts = np.arange(row_shards(mesh))
    indices: Any = row_sharding(mesh).addressable_devices_indices_map(parts.shape)
    own = {int(parts[index][0]) for index in indices.values()}
    return Shard(min(own) // len(own), len(parts) // len(own))


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Transfers the rows of `own_shard` from the host to the devices of a mesh.

    Raises:
      UserError: the number of devices of this process does not divide that of rows.
    """
    rows, parts = len(batch.decoder_input_tokens), row_shards(mesh) // own_shard(mesh).count
    if rows % parts:
        raise UserError(
            f"the {rows} rows of a batch cannot be divided evenly among {parts} devices: make rows "
            "(in a run: train.batch_tokens divided by the row length) a multiple of the devices"
        )
    sharding = row_sharding(mesh)
    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(sharding, array), batch
    )
