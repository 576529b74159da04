"""Worker processes that make blocks ahead, outside of Python's lock.

Each is a new Python, which imports neither JAX nor the script of the user, and makes the blocks
that it is asked for. What is in a block depends neither on who makes it, nor on when. Arrays are
passed in anonymous files in shared memory, which no kill leaves behind: one file for all workers
with the corpora that are not memory-mapped, and one for each block. A worker ends when its sockets
are closed, in whatever way the process ends that started it.
"""

import concurrent.futures
import contextlib
import io
import logging
import math
import os
import pickle
import queue
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from flaxformer_mt.data.stream.blocks import Block, BlockMaker

SAMPLED_PAIRS, MANY_PAIRS = 2**17, 2**22
"""Numbers of pairs from which on there are workers by default, with and without subword sampling.
"""
MOST_WORKERS = 8
"""Limit of the default."""
SILENT_SECONDS = 30.0
"""A worker that does not answer is named in a warning as often."""

_REQUESTS = 2  # To each worker that are not answered yet, so that it need not wait for one.
_ADDRESS = struct.Struct("3q")
_ALIGNMENT = 64

_log = logging.getLogger(__name__)


def default_workers(pairs: int, is_sampled: bool, platform: str) -> int:
    """Returns the number of workers for data and devices ("cpu", "gpu", "tpu").

    Two cores are left to this process. Training on CPUs needs all of them, and few tokens.
    """
    is_large = pairs >= (SAMPLED_PAIRS if is_sampled else MANY_PAIRS)
    if platform == "cpu" or not is_large:
        return 0
    return min(max(len(os.sched_getaffinity(0)) - 2, 0), MOST_WORKERS)


class BlockWorkers:
    """Worker processes that make blocks.

    If one is killed, a warning says so, and this process makes its blocks. If one does not answer,
    a warning names it.

    Args:
      count: number of processes.
      *arguments: those of `BlockMaker`.
    """

    def __init__(self, count: int, *arguments: Any) -> None:
        self._arguments = arguments
        self._own: BlockMaker | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._named: dict[int, float] = {}
        self._sockets: queue.SimpleQueue[tuple[socket.socket, int] | None] = queue.SimpleQueue()
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        with _file_with(arguments) as file:
            for _ in range(count):
                pairs = [socket.socketpair() for _ in range(_REQUESTS)]
                numbers = [file.fileno(), *(theirs.fileno() for _, theirs in pairs)]
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                    pass_fds=numbers,
                    start_new_session=True,  # Ctrl-C is for this process alone.
                )
                self._processes.append(process)
                for own, theirs in pairs:
                    theirs.close()
                    self._sockets.put((own, process.pid))
        self._threads = concurrent.futures.ThreadPoolExecutor(count * _REQUESTS, "workers")

    def submit(self, *address: int) -> concurrent.futures.Future[Block]:
        """Starts `BlockMaker.make`."""
        return self._threads.submit(self._make, *address)

    def close(self) -> None:
        """Ends the processes; blocks that are not finished are cancelled."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
        while not self._sockets.empty():
            if worker := self._sockets.get():
                worker[0].close()

    def _make(self, *address: int) -> Block:
        worker = self._sockets.get()
        try:
            result = None if worker is None else self._answer(*worker, address)
            if worker is not None and result is None:
                worker[0].close()
                worker = None
                if not self._is_closed:
                    _log.warning(
                        "a worker process that prepares batches was killed (data.workers=%d): this "
                        "process prepares its batches now",
                        len(self._processes),
                    )
        finally:
            self._sockets.put(worker)
        if isinstance(result, BaseException):
            raise result
        if self._is_closed:
            raise concurrent.futures.CancelledError
        if result is not None:
            return result
        with self._lock:
            self._own = self._own or BlockMaker(*self._arguments)
            return self._own.make(*address)

    def _answer(
        self, worker: socket.socket, pid: int, address: Sequence[int]
    ) -> Block | BaseException | None:
        """Returns the block that a worker makes, or its error, or None if it has ended."""
        try:
            worker.sendall(_ADDRESS.pack(*address))
            while not select.select([worker], [], [], SILENT_SECONDS)[0]:
                self._name_silent(pid)
            _, files, _, _ = socket.recv_fds(worker, 1, 1)
        except ConnectionError:
            return None
        if not files:
            return None
        with open(files[0], "rb") as file:
            file.seek(0)
            return _content(np.fromfile(file, np.uint8))

    def _name_silent(self, pid: int) -> None:
        """Warns of a worker, once for all requests that wait for it."""
        now = time.monotonic()
        with self._lock:
            if now - self._named.get(pid, -math.inf) < SILENT_SECONDS / 2:
                return
            self._named[pid] = now
        _log.warning(
            "process %d, which prepares batches (data.workers=%d), has not answered for %g s: "
            "if it is stopped, `kill -CONT %d` continues it; after `kill -KILL %d`, this process "
            "prepares its batches",
            *(pid, len(self._processes), SILENT_SECONDS, pid, pid),
        )


def _serve(arguments: int, *sockets: int) -> None:
    """Makes blocks until the sockets are closed; the arguments are numbers of open files."""
    # The process that started this one ends it.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    for number in sockets:
        selector.register(socket.socket(fileno=number), selectors.EVENT_READ)
    maker = None
    with contextlib.suppress(ConnectionError):
        while True:
            for key, _ in selector.select():
                asked: Any = key.fileobj
                address = asked.recv(_ADDRESS.size, socket.MSG_WAITALL)
                if len(address) < _ADDRESS.size:
                    return
                try:
                    if maker is None:
                        with open(arguments, "rb") as file:
                            maker = BlockMaker(*_content(np.memmap(file, np.uint8, "r")))
                    result: Block | BaseException = maker.make(*_ADDRESS.unpack(address))
                except Exception as error:
                    result = _sent(error)
                with _file_with(result) as file:
                    socket.send_fds(asked, [b"\0"], [file.fileno()])


def _sent(error: Exception) -> Exception:
    """Returns the error with its traceback as a note, or another one if it cannot be pickled."""
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In a worker process (data.workers):\n{traceback.format_exc()}")
    return error


class _Pickler(pickle.Pickler):
    """Pickles arrays that are memory-mapped as the names of their files, while these exist."""

    def reducer_override(self, value: Any) -> Any:
        mapped = value.base if isinstance(value, np.ndarray) else None
        if not isinstance(mapped, np.memmap) or not len(value):
            return NotImplemented
        if mapped.filename is None or not os.path.exists(mapped.filename):
            return NotImplemented
        start = value.ctypes.data - mapped.ctypes.data + mapped.offset
        return _mapped, (mapped.filename, value.dtype, start, value.shape)


def _mapped(path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype, "r", offset, shape))


def _file_with(value: Any) -> BinaryIO:
    """Returns an anonymous file in memory with a value."""
    pickled, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(pickled, 5, buffer_callback=buffers.append).dump(value)
    parts = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = np.array([len(parts), *(part.nbytes for part in parts)])
    file = os.fdopen(os.memfd_create("blocks"), "w+b")
    for start, part in zip(_starts(sizes), [sizes.data, *parts], strict=True):
        file.seek(start)
        file.write(part)
    file.flush()
    return file


def _content(memory: np.ndarray) -> Any:
    """Returns the value that `_file_with` wrote; its arrays are in `memory`, uint8."""
    numbers = memory[: memory.nbytes // 8 * 8].view(np.int64)
    sizes = numbers[: 1 + int(numbers[0])]
    ends = zip(_starts(sizes), [sizes.nbytes, *sizes[1:].tolist()], strict=True)
    _, pickled, *buffers = (memory[start : start + size] for start, size in ends)
    return pickle.loads(pickled, buffers=buffers)


def _starts(sizes: np.ndarray) -> list[int]:
    """Returns where the number of parts with their sizes, and each part are in a file."""
    rounded = -(-np.array([sizes.nbytes, *sizes[1:]]) // _ALIGNMENT) * _ALIGNMENT
    return (np.cumsum(rounded) - rounded).tolist()


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
