"""What accelerators can do at most, from their makers' data sheets."""

from typing import NamedTuple


class Accelerator(NamedTuple):
    """The limits of one device; products are dense, without structured sparsity.

    `device_kinds` are the names that JAX gives it; `flops` is the peak rate of matrix products of
    bfloat16 numbers in FLOP/s, `bandwidth` that of its memory in bytes/s, `memory` its bytes.
    """

    device_kinds: tuple[str, ...]
    flops: float
    bandwidth: float
    memory: int


_GIB = 2**30

ACCELERATORS = {
    "a100": Accelerator(("NVIDIA A100-SXM4-80GB",), 312e12, 2.039e12, 80 * _GIB),
    "a100_40gb": Accelerator(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 312e12, 1.555e12, 40 * _GIB
    ),
    "a100_pcie": Accelerator(("NVIDIA A100 80GB PCIe",), 312e12, 1.935e12, 80 * _GIB),
    "h100": Accelerator(("NVIDIA H100 80GB HBM3",), 989e12, 3.35e12, 80 * _GIB),
    "h100_pcie": Accelerator(("NVIDIA H100 PCIe",), 756e12, 2.0e12, 80 * _GIB),
    "h100_nvl": Accelerator(("NVIDIA H100 NVL",), 835e12, 3.9e12, 94 * _GIB),
    "h200": Accelerator(("NVIDIA H200",), 989e12, 4.8e12, 141 * 10**9),
    "b200": Accelerator(("NVIDIA B200",), 2250e12, 8.0e12, 180 * _GIB),
    "v4": Accelerator(("TPU v4",), 275e12, 1.228e12, 32 * _GIB),
    "v5e": Accelerator(("TPU v5 lite", "TPU v5e"), 197e12, 0.819e12, 16 * _GIB),
    "v5p": Accelerator(("TPU v5", "TPU v5p"), 459e12, 2.765e12, 95 * _GIB),
    "v6e": Accelerator(("TPU v6 lite", "TPU v6e"), 918e12, 1.64e12, 32 * _GIB),
}
"""By the name that the benchmarks use."""


def accelerator_of(device_kind: str) -> Accelerator | None:
    """Returns the accelerator of this `device_kind`; None if it is not in the table.

    A part of a GPU has another kind, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", and is not in it.
    """
    matches = (each for each in ACCELERATORS.values() if device_kind in each.device_kinds)
    return next(matches, None)
