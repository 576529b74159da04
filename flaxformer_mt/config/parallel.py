"""The distribution of training over devices."""

import dataclasses
from typing import Literal

from flaxformer_mt.config.fields import require


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How a batch is spread over devices."""

    strategy: Literal["mesh", "pmap"] = "mesh"
    """mesh: jit over a device mesh; pmap: one program per device, plain data parallelism."""
    num_devices: int = 0
    """Devices to use, of all processes together; 0 = all. Those that fsdp and tensor leave over
    are the mesh's axis data, along which rows are shared out."""
    fsdp: int = 1
    """Size of the axis along which rows are shared out, too, and parameters and optimizer state are
    cut, to be gathered when they are needed (fully sharded data parallelism, ZeRO)."""
    tensor: int = 1
    """Size of the axis along which matrices are cut and each device computes with its part
    (tensor parallelism, Megatron)."""
    sharding_rules: tuple[tuple[str, str], ...] = ()
    """Rules that go before the built-in ones: a regular expression for parameter paths, and the
    mesh axes of the last dimensions, parted by commas ("fsdp,tensor", "-" for none)."""

    def __post_init__(self) -> None:
        require(self.num_devices >= 0, "parallel.num_devices must not be negative")
        for name in ("fsdp", "tensor"):
            require(getattr(self, name) > 0, f"parallel.{name} must be positive")
        require(
            self.strategy == "mesh" or self.fsdp == self.tensor == 1,
            "parallel.strategy=pmap cannot cut parameters: set parallel.fsdp and parallel.tensor "
            "to 1, or parallel.strategy=mesh",
        )
