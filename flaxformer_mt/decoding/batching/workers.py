"""Worker threads that keep several batches in flight, with results in one iterator."""

import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.errors import UserError

MAX_WORKERS = 8
CPU_BATCH_TOKENS, ACCELERATOR_BATCH_TOKENS = 1024, 16_384
"""`decode.batch_tokens` by default. An accelerator reads all parameters for every step, however few
sentences it is for."""

_T = TypeVar("_T")


def max_workers(platform: str) -> int:
    """Returns how many batches to keep in flight on a device of a platform ("cpu", "gpu", "tpu").

    XLA uses several cores only within large operations; on CPUs, each core gets its own batch. On
    accelerators, a second batch computes while the host processes the results of the first.
    """
    if platform != "cpu":
        return 2
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def batch_tokens(decode: DecodeConfig, platform: str) -> int:
    """Returns `decode.batch_tokens`, or its default for a platform."""
    default = CPU_BATCH_TOKENS if platform == "cpu" else ACCELERATOR_BATCH_TOKENS
    return decode.batch_tokens or default


def decoding_devices(decode: DecodeConfig, first: Any) -> list[Any]:
    """Returns `decode.num_devices` devices of the platform of `first`, which has the parameters.

    Raises:
      UserError: this process has fewer.
    """
    others = [each for each in jax.local_devices(backend=first.platform) if each != first]
    count = decode.num_devices or (1 if first.platform == "cpu" else 1 + len(others))
    if count > 1 + len(others):
        raise UserError(
            f"decode.num_devices={count}, but this process has only {1 + len(others)} "
            f"({first.platform}): ask for fewer, or for 0"
        )
    return [first, *others][:count]


def gather(work: Callable[[Callable[[_T], None], int], None], num_workers: int) -> Iterator[_T]:
    """Yields what `num_workers` threads pass to `put`, in the order of the calls.

    Each thread calls `work(put, number)`, with its number from 0; exceptions are raised here. If
    the consumer stops early, each thread stops at its next call of `put`.
    """
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopped = threading.Event()

    class Stopped(Exception):
        pass

    def put(item: _T) -> None:
        if stopped.is_set():
            raise Stopped
        finished.put(item)

    def run(number: int) -> None:
        try:
            work(put, number)
            finished.put(None)
        except Stopped:
            pass
        except BaseException as error:  # Raised again in the consumer's thread.
            finished.put(error)

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    try:
        working = num_workers
        while working:
            item = finished.get()
            if item is None:
                working -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def decoding_on(devices: Sequence[jax.Device], decode: DecodeConfig) -> DecodeConfig:
    """Returns search options with which no more devices translate than train.

    `devices` are those that train, of all processes. A `num_devices` chosen by the user does not
    change.
    """
    own = [each for each in devices if each.process_index == jax.process_index()]
    if decode.num_devices or not own or own[0].platform == "cpu":  # Zero means one CPU.
        return decode
    return dataclasses.replace(decode, num_devices=len(own))
