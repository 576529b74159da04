"""The table of accelerators."""

import pytest

from flaxformer_mt.accelerators import ACCELERATORS, accelerator_of


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_a_device_is_found_by_its_kind(device_kind, name):
    assert accelerator_of(device_kind) == (ACCELERATORS[name] if name else None)
