"""Devices that the compilers of JAX know, without one being there."""

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from flaxformer_mt.accelerators import ACCELERATORS
from flaxformer_mt.errors import UserError


class Gpu(NamedTuple):
    """What the compiler has to know of a GPU, from the attributes that its driver reports."""

    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    units: int
    """Of each core, for float32."""
    gigahertz: float
    cache: int
    """Level 2, in bytes."""
    shared_memory: int
    """Of each core, in bytes; a block may have all but 1 KiB."""


GPUS = {
    "a100": Gpu((8, 0), 108, 64, 1.41, 40 * 2**20, 164 * 2**10),
    "h100": Gpu((9, 0), 132, 128, 1.98, 50 * 2**20, 228 * 2**10),
    "h200": Gpu((9, 0), 132, 128, 1.98, 50 * 2**20, 228 * 2**10),
}
TPUS = {"v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}
"""The name of a slice of TPUs, and how many of its cores a chip has."""
DEVICES = (*GPUS, *TPUS)
HOST = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}
"""The smallest topologies that the compiler knows."""


def prepare(device: str, topology: str) -> None:
    """Sets the environment of the compilers; to be called before JAX has devices.

    Args:
      device: a key of `GPUS` or `TPUS`.
      topology: see `describe`.

    Raises:
      UserError: the compiler for the device is not installed.
    """
    extra, package = ("tpu", "libtpu") if device in TPUS else ("cuda", "jax_cuda13_plugin")
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"the compiler for {device} is missing: in a virtual environment of its own, "
            f"pip install 'flaxformer_mt[{extra}]'"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    if device in TPUS:
        slice_name, cores = TPUS[device]
        chips = math.prod(map(int, topology.split("x")))
        os.environ["TPU_ACCELERATOR_TYPE"] = f"{slice_name}-{chips * cores}"
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"  # No device is opened.
    else:
        # Timing kernels to choose among them needs a device.
        os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"


def default_topology(device: str, devices: int) -> str:
    """Returns the topology of this many devices: all GPUs on one host, or a cube of TPUs.

    Raises:
      UserError: no topology of TPUs has so many.
    """
    if device in GPUS:
        return f"1x1x{devices}"
    # Hosts have 2 x 2 chips.
    smallest = [int(size) for size in HOST[device].split("x")]
    sizes = list(smallest)
    while math.prod(sizes) < devices:
        sizes[min(range(len(sizes)), key=lambda axis: sizes[axis])] *= 2
    if devices > 1 and math.prod(sizes) != devices and devices > math.prod(smallest):
        raise UserError(f"no topology of {device} has {devices} devices: give --topology")
    return "x".join(map(str, sizes))


def describe(device: str, topology: str) -> Sequence[Any]:
    """Returns the device descriptions of a topology, to compile for.

    Args:
      device: a key of `GPUS` or `TPUS`.
      topology: of GPUs, slices x hosts x devices of each host, "1x1x8"; of TPUs, chips along each
        axis, "4x4".

    Raises:
      UserError: the compiler does not know the topology.
    """
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    try:
        if device in TPUS:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{device}:{topology}"
            )
        else:
            found = topologies.get_topology_desc(
                platform="cuda", topology=topology, target_config=_description(device)
            )
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"--topology={topology} is none of {device}: {first_line}") from None
    return found.devices


def _description(device: str) -> str:
    """Returns a `GpuTargetConfigProto` of the compiler, as text."""
    gpu, accelerator = GPUS[device], ACCELERATORS[device]
    major, minor = gpu.capability
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {gpu.shared_memory - 2**10}
  shared_memory_per_core: {gpu.shared_memory}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units}
  clock_rate_ghz: {gpu.gigahertz}
  l2_cache_size: {gpu.cache}
  memory_bandwidth: {accelerator.bandwidth:.0f}
  device_memory_size: {accelerator.memory}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  device_vendor: "NVIDIA Corporation"
  name: "{accelerator.device_kinds[0]}"
  device_address_bits: 64
  pcie_bandwidth: {32 * 2**30}
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{accelerator.device_kinds[0]}"
"""
