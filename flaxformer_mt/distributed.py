"""Runs of several processes: initialization, barriers and collectives.

Each process controls the devices of its host, and all run the same program on all devices (JAX's
multi-controller model): all must execute the same operations on shared arrays in the same order.
"""

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np

from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.exit_codes import ExitCode

Cluster: TypeAlias = Literal["none", "auto", "slurm", "ompi", "mpi4py"]
"""The launcher, which tells each process its number and the address of the first one; "none"
without one. "auto" detects SLURM, Open MPI and Cloud TPU."""

HEARTBEAT_SECONDS = 60
"""A process without a heartbeat for this time is considered dead, and the others exit."""
SHUTDOWN_SECONDS = 60
"""How long a process that exits waits for the others."""

BARRIER_SECONDS = 24 * 3600
"""How long processes wait at a barrier for one that is alive."""

Item = TypeVar("Item")

_barriers = itertools.count()  # Barriers need unique names; all processes count alike.


def initialize(
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    cluster: Cluster = "none",
    timeout: int = 300,
) -> None:
    """Connects this process to the others of its run; does nothing for a run of one process.

    Must be called before any other use of JAX. JAX replaces the signal handler of SIGTERM.

    When a process dies, JAX aborts the others (exit code 134): at once those that wait for its
    data, the rest after `HEARTBEAT_SECONDS`.

    Args:
      coordinator: "host:port" of process 0, reachable by all; any free port.
      num_processes: their number.
      process_id: number of this one, from 0.
      cluster: instead of the three above.
      timeout: seconds to wait for the others, after which the process exits with an error.
    """
    by_hand = bool(coordinator) or num_processes != 0 or process_id != -1
    if cluster == "none" and not by_hand:
        return
    if cluster != "none" and by_hand:
        raise UserError(
            f"cluster={cluster} detects the processes: omit coordinator, num_processes and "
            "process_id"
        )
    if by_hand:
        _check(coordinator, num_processes, process_id)
        if process_id > 0:
            _wait_for(coordinator, timeout)
        where = f"coordinator={coordinator} num_processes={num_processes}"
        found: dict[str, Any] = {
            "coordinator_address": coordinator,
            "num_processes": num_processes,
            "process_id": process_id,
        }
    else:
        where = f"cluster={cluster}"
        found = {"cluster_detection_method": None if cluster == "auto" else cluster}

    # On timeout JAX would abort the process with a long message instead of raising.
    watch = threading.Timer(timeout, _give_up, [where, timeout])
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            **found,
            initialization_timeout=timeout + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
        jax.devices()  # Exchanges the devices of all processes.
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{where}: the processes cannot connect: {first_line(error)}") from error
    finally:
        watch.cancel()


def _check(coordinator: str, num_processes: int, process_id: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"coordinator={coordinator!r} must be HOST:PORT of process 0, such as node1:1234"
        )
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"process_id={process_id} must be one of 0 to {num_processes - 1} "
            f"(num_processes={num_processes}), each used by one process"
        )


def _wait_for(coordinator: str, timeout: int) -> None:
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            # Brackets separate an IPv6 address from the port.
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"coordinator={coordinator}: no answer in {timeout} s ({error}): start "
                    "process 0 there, and make that port reachable from this host"
                ) from error
            time.sleep(0.5)


def _give_up(where: str, timeout: int) -> None:
    print(
        f"error: {where}: not all processes came within {timeout} s: start each of them, with the "
        "same number of processes and a distinct process_id",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.FAILURE)


def is_main() -> bool:
    """Returns whether this is the first process, which writes logs, metrics and messages."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process has called it with this name, without a short timeout."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        # JAX's public barrier is a sum over devices, which on CPUs times out after 30 s: too soon
        # for processes that wait for the first one to tokenize.
        wait = multihost.get_barrier_sync_fn()
        wait(key=f"{next(_barriers)} {name}", timeout_ms=BARRIER_SECONDS * 1000)


@contextlib.contextmanager
def first_process_first(name: str) -> Iterator[bool]:
    """The first process runs the block before all others do, which find what it has written.

    Yields whether this is the first one.
    """
    is_first = is_main()
    if not is_first:
        barrier(name)
    yield is_first
    if is_first:
        barrier(name)
    # Collectives wait for a late process for a limited time, on CPUs for 30 s.
    barrier(f"{name}: all are here")


def agree(flag: bool) -> bool:
    """Returns the logical or of a flag over all processes.

    Each of several processes waits for the work dispatched to its devices, and then some
    milliseconds for the others: call it where they wait in any case.
    """
    if jax.process_count() == 1:
        return flag
    return bool(_all_gather(np.array(flag)).any())


def share_out(items: Sequence[Item]) -> Sequence[Item]:
    """Returns this process' contiguous part of items; the parts differ in size by at most one."""
    index, count = jax.process_index(), jax.process_count()
    return items[len(items) * index // count : len(items) * (index + 1) // count]


def gather_texts(texts: Sequence[str]) -> list[str]:
    """Concatenates the texts of all processes: the inverse of `share_out`."""
    if jax.process_count() == 1:
        return list(texts)
    data = np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)
    sizes = _all_gather(np.array(len(data), np.int32))
    # JAX compiles a program for each size; powers of two keep these few.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    return [
        text
        for row, size in zip(_all_gather(padded), sizes, strict=True)
        for text in json.loads(row[:size].tobytes())
    ]


def _all_gather(value: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value))
