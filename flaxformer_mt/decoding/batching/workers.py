"""Worker threads that keep several batches in flight, with results in one iterator."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

MAX_WORKERS = 8

_T = TypeVar("_T")


def max_workers(platform: str) -> int:
    """Returns how many batches to keep in flight on a device of a platform ("cpu", "gpu", "tpu").

    XLA uses several cores only within large operations; on CPUs, each core gets its own batch. On
    accelerators, a second batch computes while the host processes the results of the first.
    """
    if platform != "cpu":
        return 2
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def gather(work: Callable[[Callable[[_T], None]], None], num_workers: int) -> Iterator[_T]:
    """Yields what `num_workers` threads pass to `put`, in the order of the calls.

    If the consumer stops early, each thread stops at its next call of `put`.

    Args:
      work: what each thread runs, with `put` as its argument. Its exceptions are raised here.
      num_workers: number of threads.
    """
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopped = threading.Event()

    class Stopped(Exception):
        pass

    def put(item: _T) -> None:
        if stopped.is_set():
            raise Stopped
        finished.put(item)

    def run() -> None:
        try:
            work(put)
            finished.put(None)
        except Stopped:
            pass
        except BaseException as error:  # Raised again in the consumer's thread.
            finished.put(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(num_workers)]
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
