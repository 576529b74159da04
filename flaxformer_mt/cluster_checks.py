"""Checks whether several processes could train together: the command `doctor`."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

from flaxformer_mt import atomic, distributed
from flaxformer_mt.errors import UserError

_PACKAGES = ("flaxformer_mt", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy")
_MAX_SKEW = 2.0
"""Seconds by which clocks may differ: a host that is ahead makes files from the future."""
_VISIBLE_SECONDS = 10
"""How long a network file system may take to show what another host wrote."""
_REPETITIONS = 5
_LEAST_FREE = 10**9
"""Bytes that a few checkpoints of a small model take."""


class Check(NamedTuple):
    """One line of the report."""

    subject: str
    passed: bool
    text: str


def check_all(workdir: Path, megabytes: int | None = None) -> list[Check]:
    """Makes all checks; every process has to call it after `distributed.initialize`.

    Args:
      workdir: the folder that all share; created for the checks if it is missing.
      megabytes: size of the array that is added up; by default 256, and 4 on CPUs.
    """
    return [_versions(), _devices(), _all_reduce(megabytes), _clocks(), *_folder(workdir)]


def _gathered(value: Any) -> list[Any]:
    """Returns the value of each process, which can be written as JSON; all have to call it."""
    return [json.loads(text) for text in distributed.gather_texts([json.dumps(value)])]


def _same(subject: str, values: list[Any]) -> Check:
    """Checks that all processes have the same."""
    others = [number for number, value in enumerate(values) if value != values[0]]
    text = f"{values[0]}{f' in each of {len(values)} processes' if len(values) > 1 else ''}"
    if others:
        text = f"{values[0]} in process 0, but {values[others[0]]} in process {others[0]}"
    return Check(subject, not others, text)


def _versions() -> Check:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    python = f"Python {platform.python_version()}"
    return _same("versions", _gathered(", ".join([python, *versions])))


def _devices() -> Check:
    devices = jax.local_devices()
    return _same("devices", _gathered(f"{len(devices)} x {devices[0].device_kind}"))


def _all_reduce(megabytes: int | None) -> Check:
    devices = jax.devices()
    size = (megabytes or (4 if devices[0].platform == "cpu" else 256)) * 10**6 // 4
    mesh = jax.make_mesh((len(devices),), ("devices",), (jax.sharding.AxisType.Auto,))
    over, whole = (jax.NamedSharding(mesh, jax.P(axis)) for axis in ("devices", None))

    def numbers() -> jax.Array:
        rows = jnp.arange(len(devices), dtype=jnp.float32)[:, None]
        return jnp.broadcast_to(rows, (len(devices), size))

    array = jax.jit(numbers, out_shardings=over)()
    add = jax.jit(lambda array: array.sum(axis=0), out_shardings=whole)
    found = np.asarray(add(array).addressable_shards[0].data)
    expected = len(devices) * (len(devices) - 1) / 2
    is_right = all(_gathered(bool((found == expected).all())))
    start = time.perf_counter()
    for _ in range(_REPETITIONS):
        add(array).block_until_ready()
    seconds = (time.perf_counter() - start) / _REPETITIONS
    # What each device sends in a ring.
    sent = 2 * (len(devices) - 1) / len(devices) * 4 * size
    rate = f"{decimal(int(sent / seconds))}/s per device" if sent else "one device sends nothing"
    text = f"{decimal(4 * size)} over {len(devices)} devices: {rate if is_right else 'a wrong sum'}"
    return Check("all-reduce", is_right, text)


def _clocks() -> Check:
    distributed.barrier("doctor's clocks")
    times = _gathered(time.time())
    skew = max(times) - min(times)
    return Check("clocks", skew <= _MAX_SKEW, f"differ by at most {skew:.1f} s")


def _folder(workdir: Path) -> Iterator[Check]:
    """Checks the folder that all processes share."""
    index, count = jax.process_index(), jax.process_count()
    missing = [each for each in (workdir, *workdir.parents) if not os.path.lexists(each)]
    (token, *_) = _gathered(f".doctor-{os.getpid()}-{time.time_ns()}")
    folder = workdir / token

    def write(text: str) -> None:
        atomic.make_folder(folder)
        atomic.write_text(folder / f"{index}", text)  # Replaces the file by a rename.

    def read(text: str) -> None:
        for number in range(count):
            _wait_for(folder / f"{number}", text, number)

    def check(subject: str, verb: str) -> Check:
        errors = _errors(lambda: write(subject)) or _errors(lambda: read(subject))
        return Check(subject, not errors, errors[0] if errors else f"{workdir}: {verb}")

    try:
        written = check("folder", "what each process writes, all read")
        yield written
        if not written.passed:
            return
        yield check("renaming", "what replaces a file, all read")
        yield _lock(folder)
        free = shutil.disk_usage(folder).free
        yield Check("free space", free >= _LEAST_FREE, f"{decimal(free)} in {workdir}")
    finally:
        distributed.barrier("doctor's files")
        if distributed.is_main():
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # Others have put something into one.
                for each in missing:
                    each.rmdir()


def _errors(action: Callable[[], None]) -> list[str]:
    """Returns the errors of all processes in an action, which all have finished then."""
    error = ""
    try:
        action()
    except (OSError, UserError) as caught:
        error = f"process {jax.process_index()}: {caught}"
    return [*filter(None, _gathered(error))]


def _wait_for(path: Path, text: str, writer: int) -> None:
    end = time.monotonic() + _VISIBLE_SECONDS
    while not (path.is_file() and path.read_text() == text):
        if time.monotonic() > end:
            raise UserError(
                f"what process {writer} wrote is not seen in {_VISIBLE_SECONDS} s: give a folder "
                "on a file system that all share"
            )
        time.sleep(0.1)


def _lock(folder: Path) -> Check:
    """Checks that the lock of one process keeps others out."""

    def hold() -> None:
        if distributed.is_main():
            fcntl.flock(held, fcntl.LOCK_EX)

    def take() -> None:
        with (folder / "lock").open("a") as other, contextlib.suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise UserError("can lock what process 0 has locked")

    with (folder / "lock").open("a") as held:
        errors = _errors(hold) or _errors(take)
    text = f"{errors[0]}: two runs in one folder would go unnoticed" if errors else ""
    return Check("lock", not errors, text or "what process 0 has locked, no other can lock")
