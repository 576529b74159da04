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


@pytest.mark.parametrize("name", ACCELERATORS)
def test_peaks_are_in_units_of_one(name):
    accelerator = ACCELERATORS[name]
    assert 1e14 < accelerator.flops < 1e16
    assert 1e11 < accelerator.bandwidth < 2e13
    assert 10**10 < accelerator.memory < 2e11
