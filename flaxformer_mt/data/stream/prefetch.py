"""Batches made ready in a thread of its own while the devices compute."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from flaxformer_mt.data.stream.batches import DataPosition

T = TypeVar("T")


class Prefetched(Generic[T], Iterator[tuple[T, DataPosition]]):
    """Reads an endless stream ahead of who uses it.

    An iterator over what `read` returns: each batch with the position after it, which is what a
    checkpoint has to keep once the batch was used, however far the thread has read by then. As a
    context manager it stops the thread at the end.

    Attributes:
      seconds_waited: how long `next` has waited for a batch, in all.

    Args:
      read: position -> the batch there, ready for use (read, packed, placed on the devices), and
        the position after it. Called in the thread.
      start: position of the first batch.
      depth: batches that are held ready, at most.
    """

    def __init__(
        self,
        read: Callable[[DataPosition], tuple[T, DataPosition]],
        start: DataPosition,
        depth: int = 2,
    ) -> None:
        self.seconds_waited = 0.0
        self._read = read
        self._ready: queue.Queue[tuple[T, DataPosition] | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(start,), name="prefetch", daemon=True
        )
        self._thread.start()

    def __next__(self) -> tuple[T, DataPosition]:
        """The next batch, and the position after it.

        Raises:
          Exception: what `read` raised.
          StopIteration: the stream was closed.
        """
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
        """Stops the thread, after the batch that it is at, and forgets what is ready."""
        self._closed.set()
        # The thread may be waiting for room.
        while not self._ready.empty():
            self._ready.get()
        self._thread.join()

    def __enter__(self) -> "Prefetched[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, position: DataPosition) -> None:
        """Reads until closed, or until something goes wrong, which the consumer is told."""
        while not self._closed.is_set():
            try:
                batch, position = self._read(position)
            except BaseException as error:
                self._ready.put(error)
                return
            self._ready.put((batch, position))
