"""The distribution of training over devices."""

import dataclasses
from typing import Literal

from flaxformer_mt.config import relations
from flaxformer_mt.config.fields import Checked, FieldRole, option


@dataclasses.dataclass(frozen=True, repr=False)
class ParallelConfig(Checked):
    """How batches and parameters are distributed over devices."""

    strategy: Literal["mesh", "pmap"] = option("mesh", FieldRole.RUNNING)
    """mesh: jit over a device mesh; pmap: one program per device, plain data parallelism."""
    num_devices: int = option(0, FieldRole.RUNNING, lowest=0, limit=10**6)
    """Number of devices of all processes together; 0 = all. They form a mesh of data * fsdp *
    tensor devices; what fsdp and tensor do not use is the data axis, which shards rows."""
    fsdp: int = option(1, FieldRole.RUNNING, lowest=1, limit=10**6)
    """Size of the mesh axis that shards rows, parameters and optimizer state; parameters are
    gathered where they are used (fully sharded data parallelism, ZeRO)."""
    tensor: int = option(1, FieldRole.RUNNING, lowest=1, limit=10**6)
    """Size of the mesh axis that shards matrices and the computation with them (tensor
    parallelism, Megatron)."""
    sharding_rules: tuple[tuple[str, str], ...] = option((), FieldRole.RUNNING)
    """Sharding rules that take precedence over the built-in ones: pairs of a regular expression for
    parameter paths and the comma-separated mesh axes of the last dimensions ("fsdp,tensor", "-"
    for not sharded)."""

    _prefix = "parallel."
    _relations = relations.PARALLEL
