"""How much memory there is, to refuse what cannot fit before anything is allocated."""

import contextlib
import functools
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError

LESS_ON_DEVICE = (
    "end other programs that use it, let several devices hold the parameters together "
    "(decode.devices_per_model), or set JAX_PLATFORMS=cpu"
)
"""What to do where a model does not fit onto the device, see `explained_exhaustion`."""
_ADDRESS_SPACE = 4 * 2**30
"""Bytes that JAX and XLA reserve, most of which they never use: 3.2 GiB on a CPU with two cores."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@functools.cache
def host_memory() -> int | None:
    """Returns the bytes of memory of this host, or its container; None if unknown."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        limits.append(int(_CGROUP_LIMIT.read_text()))
    except (AttributeError, OSError, ValueError):  # Not Linux, or "max": no limit.
        pass
    return min(limits, default=None)


def require_address_space() -> None:
    """Raises `UserError` below a limit of address space at which XLA aborts the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _ADDRESS_SPACE:
        raise UserError(
            f"the address space of this process is limited to {gibibytes(limit)}, but XLA needs "
            f"{gibibytes(_ADDRESS_SPACE)}: raise the limit (ulimit -v), or limit the memory in use "
            "instead (a container, or systemd-run -p MemoryMax=)"
        )


def device_memory(devices: Sequence[Any]) -> int | None:
    """Returns the bytes of memory per device, of one kind, in this process; None if unknown.

    CPU devices share the host's memory.
    """
    if devices[0].platform == "cpu":
        host = host_memory()
        return None if host is None else host // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def fits_on_a_device(size: int, devices: Sequence[Any]) -> bool:
    """Returns whether parameters of so many bytes leave half of a device's memory for the rest."""
    memory = device_memory(devices)
    return memory is None or size <= memory // 2


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Returns the most bytes that one of the devices has had in use so far; None if unknown.

    For CPU devices it is the memory of the process.
    """
    if devices[0].platform == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def require_memory(needed: int, available: int | None, what: str) -> None:
    """Raises `UserError` if `what` needs more bytes than are available; None = unknown."""
    if available is not None and needed > available:
        raise UserError(
            f"{what} at least {gibibytes(needed)} of memory, but there is {gibibytes(available)}"
        )


@contextlib.contextmanager
def explained_exhaustion(work: str, remedy: str) -> Iterator[None]:
    """Turns the error of a device that runs out of memory into a `UserError`.

    `work` begins the message ("training"); `remedy` ends it with what the user can do.
    """
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reasons = [line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line]
        if not reasons:
            raise
        raise UserError(
            f"{work} needs more memory than the device has: {remedy} ({reasons[0].strip()})"
        ) from error


def gibibytes(size: int) -> str:
    """Returns bytes as text: "1.5 GiB"."""
    return f"{size / 2**30:,.1f} GiB"
