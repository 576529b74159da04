"""Prefetching of batches in a background thread while the devices compute."""

import collections
import concurrent.futures
import contextlib
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
      read: called in the thread with a position, returns the batch there and the position after it.
      start: position of the first batch.
      depth: maximum number of batches that wait, besides the one that is being read.
      on_close: called once, after the thread has stopped.
    """

    def __init__(
        self,
        read: Callable[[DataPosition], tuple[_Item, DataPosition]],
        start: DataPosition,
        depth: int = 2,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.seconds_waited = 0.0
        self._read = read
        self._position = start
        self._closing = contextlib.ExitStack()
        self._closing.callback(on_close)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "prefetch")
        self._batches = collections.deque(
            self._thread.submit(self._read_next) for _ in range(depth + 1)
        )

    def __next__(self) -> tuple[_Item, DataPosition]:
        if not self._batches:
            raise StopIteration
        start = time.perf_counter()
        try:
            item = self._batches.popleft().result()
        except BaseException:
            self.close()
            raise
        self.seconds_waited += time.perf_counter() - start
        self._batches.append(self._thread.submit(self._read_next))
        return item

    def close(self) -> None:
        """Stops the thread after its current batch, and discards prefetched batches."""
        self._batches.clear()
        self._thread.shutdown(cancel_futures=True)
        self._closing.close()

    def __enter__(self) -> "Prefetched[_Item]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_next(self) -> tuple[_Item, DataPosition]:
        batch, self._position = self._read(self._position)
        return batch, self._position
