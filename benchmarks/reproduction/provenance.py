"""The commit and the device that a result was computed with."""

import platform
import subprocess

import jax

from reproduction.repository import ROOT


def commit() -> str:
    """Returns the commit that is checked out, or "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def device() -> str:
    """Returns the number and the kind of the devices of JAX: "1 x NVIDIA H100"."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        kind = f"{platform.machine()} CPU"
    return f"{len(devices)} x {kind}"
