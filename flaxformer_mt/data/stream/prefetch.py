"""Prefetching of batches in a background thread while the devices compute."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from flaxformer_mt.data.stream.batches import DataPosition

_Item = TypeVar("_Item")


class Prefetched(Generic[_Item], Iterator[tuple[_Item, DataPosition]]):
    """Reads an infinite stream ahead of its consumer, in a background thread.

    An iterator over the results of `read`: each batch comes with the position after it, which a
    checkpoint must save once the batch has been used, however far the thread has read ahead.
    Leaving it as a context manager stops the thread.

    Attributes:
      seconds_waited: total time that `next` has waited for a batch.

    Args:
      read: called in the thread with a position, returns the batch there, ready for use (packed and
        on the devices), and the position after it.
      start: position of the first batch.
      depth: maximum number of prefetched batches.
    """

    def __init__(
        self,
        read: Callable[[DataPosition], tuple[_Item, DataPosition]],
        start: DataPosition,
        depth: int = 2,
    ) -> None:
        self.seconds_waited = 0.0
        self._read = read
        self._ready: queue.Queue[tuple[_Item, DataPosition] | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(start,), name="prefetch", daemon=True
        )
        self._thread.start()

    def __next__(self) -> tuple[_Item, DataPosition]:
        if self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._ready.get()
        self.seconds_waited += time.perf_counter() - start
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stops the thread after its current batch, and discards prefetched batches."""
        self._closed.set()
        # The thread may be blocked on a full queue.
        while not self._ready.empty():
            self._ready.get()
        self._thread.join()

    def __enter__(self) -> "Prefetched[_Item]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, position: DataPosition) -> None:
        """Reads until closed, or until an exception, which is passed on to the consumer."""
        while not self._closed.is_set():
            try:
                batch, position = self._read(position)
            except BaseException as error:
                self._ready.put(error)
                return
            self._ready.put((batch, position))
