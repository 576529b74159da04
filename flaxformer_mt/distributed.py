"""Several processes as one run: how they find each other, and what they tell each other.

Each process controls the devices of its machine, and all run the same program on all devices
(JAX's multi-controller model): what one does to shared arrays, all have to do, in the same order.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jax._src.distributed import global_state

from flaxformer_mt.errors import UserError

Cluster: TypeAlias = Literal["none", "auto", "slurm", "ompi", "mpi4py"]
"""Who started the processes: nobody ("none"), or what tells a process its number and where the
first one is. "auto" finds SLURM, Open MPI and Cloud TPU by itself."""

HEARTBEAT_SECONDS = 60
"""A process that was silent for so long is dead, and the others end."""
SHUTDOWN_SECONDS = 60
"""How long a process that ends waits for the others to end."""

BARRIER_SECONDS = 24 * 3600
"""How long processes wait for one that is alive."""

Item = TypeVar("Item")

_barriers = itertools.count()  # Names must not be used twice; all processes count alike.


def initialize(
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    cluster: Cluster = "none",
    timeout: int = 300,
) -> None:
    """Joins this process to the others of its run; does nothing for a run of one process.

    Has to be called before JAX is used for anything else, and before signal handlers are set,
    because JAX sets one for SIGTERM.

    A process whose run has lost another one ends: at once if it waits for data of that process,
    otherwise `HEARTBEAT_SECONDS` later. JAX aborts it (exit code 134); it cannot go on.

    Args:
      coordinator: "host:port" of process 0, where all can reach it; the port is free to choose.
      num_processes: how many there are.
      process_id: number of this one, from 0.
      cluster: instead of the three above.
      timeout: seconds to wait for the others. When they are over, the process says so and exits.

    Raises:
      UserError: arguments are missing or do not go together, the first process cannot be
        reached, or the cluster does not say what it should.
    """
    by_hand = bool(coordinator) or num_processes > 0 or process_id >= 0
    if cluster == "none" and not by_hand:
        return
    if cluster != "none" and by_hand:
        raise UserError(
            f"--cluster={cluster} finds the processes by itself: leave --coordinator, "
            "--num-processes and --process-id away"
        )
    if by_hand:
        _check(coordinator, num_processes, process_id)
        if process_id > 0:
            _wait_for(coordinator, timeout)
        where = f"--coordinator={coordinator} --num-processes={num_processes}"
        found: dict[str, Any] = {
            "coordinator_address": coordinator,
            "num_processes": num_processes,
            "process_id": process_id,
        }
    else:
        where = f"--cluster={cluster}"
        found = {"cluster_detection_method": None if cluster == "auto" else cluster}

    # JAX would end the process with a page of its own on timeout; it does not raise.
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
        jax.devices()  # All processes tell each other of their devices.
    except (ValueError, RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{where}: the processes do not come together: {reason}") from error
    finally:
        watch.cancel()


def _check(coordinator: str, num_processes: int, process_id: int) -> None:
    """Refuses arguments that do not go together."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"--coordinator={coordinator!r} must be HOST:PORT of process 0, such as node1:1234"
        )
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"--process-id={process_id} must be one of 0 to {num_processes - 1} "
            f"(--num-processes={num_processes}), each given to one process"
        )


def _wait_for(coordinator: str, timeout: int) -> None:
    """Returns when something answers at an address; raises UserError if nothing does in time."""
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"--coordinator={coordinator}: no answer in {timeout} s ({error}): start "
                    "process 0 there, and let this machine reach that port"
                ) from error
            time.sleep(0.5)


def _give_up(where: str, timeout: int) -> None:
    print(
        f"error: {where}: not all processes came within {timeout} s: start each of them, with the "
        "same number of processes and a --process-id of its own",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def is_main() -> bool:
    """Whether this is the process that writes what is written once: logs, figures, messages."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when every process has called it with this name, however long that takes."""
    if jax.process_count() > 1:
        # JAX's public barrier is a sum over devices, which on CPUs gives up after 30 s: too soon
        # for processes that wait until the first one has read the data.
        client: Any = global_state.client
        number = next(_barriers)
        client.wait_at_barrier(f"{number} {name}", timeout_in_ms=BARRIER_SECONDS * 1000)


def agree(flag: bool) -> bool:
    """Whether any process says so; all get the same answer.

    Of several processes each waits here for the work that its devices have been given, and then
    some milliseconds for the others: call it where they wait anyway. Of one it costs nothing.
    """
    if jax.process_count() == 1:
        return flag
    return bool(_all_gather(np.array(flag)).any())


def share_out(items: Sequence[Item]) -> Sequence[Item]:
    """This process' part of items that all processes have: neighbours, as many as the others'."""
    index, count = jax.process_index(), jax.process_count()
    return items[len(items) * index // count : len(items) * (index + 1) // count]


def gather_texts(texts: Sequence[str]) -> list[str]:
    """The texts of all processes, one after the other: the inverse of `share_out`."""
    if jax.process_count() == 1:
        return list(texts)
    data = np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)
    sizes = _all_gather(np.array(len(data), np.int32))
    # JAX compiles a program for each size: powers of two are few.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    return [
        text
        for row, size in zip(_all_gather(padded), sizes, strict=True)
        for text in json.loads(row[:size].tobytes())
    ]


def _all_gather(value: np.ndarray) -> np.ndarray:
    """The values of all processes, which have the same shape: [processes, ...]."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value))
