"""SIGTERM and SIGINT (Ctrl-C): a run is asked to stop, saves, and leaves with a code of its own.

with Interruption() as interruption:
    loop.train(..., should_stop=interruption.requested)  # raises Interrupted
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

EXIT_INTERRUPTED = 75
"""Exit code of a run that was asked to stop and can be continued: EX_TEMPFAIL of sysexits.h."""

EXIT_AT_ONCE = 130
"""Exit code after a second Ctrl-C; that of a shell for programs that SIGINT ended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A run stopped because it was asked to. What it has reached is saved."""


class Interruption:
    """Notices that somebody wants a run to stop.

    A context manager, of the main thread only. The first signal is remembered. A Ctrl-C after it
    ends the process at once, even if the main thread is in a long computation or compilation,
    during which Python calls no signal handlers: a thread watches for signals.

    Args:
      agree: under several processes, says to all of them whether any was asked to stop. They have
        to stop after the same step, but signals do not reach them at the same time.
      agree_every: steps between calls of `agree`, which has to wait for all processes.
    """

    def __init__(self, agree: Callable[[bool], bool] | None = None, agree_every: int = 1) -> None:
        self._agree = agree
        self._agree_every = agree_every
        self._requested = threading.Event()
        self._restore = contextlib.ExitStack()

    def requested(self, step: int) -> bool:
        """Whether to stop after a step; under several processes, all get the same answer."""
        if self._agree is None:
            return self._requested.is_set()
        return step % self._agree_every == 0 and self._agree(self._requested.is_set())

    def __enter__(self) -> "Interruption":
        signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        watcher = threading.Thread(
            target=self._watch, args=(signals,), name="interruption", daemon=True
        )
        self._restore.callback(signals.close)
        self._restore.callback(watcher.join)
        self._restore.callback(wakeup.close)  # which ends the watcher
        previous = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._restore.callback(signal.set_wakeup_fd, previous)
        for number in _SIGNALS:
            self._restore.callback(signal.signal, number, signal.signal(number, _noted))
        watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()

    def _watch(self, signals: socket.socket) -> None:
        while number := signals.recv(1):
            if number[0] not in _SIGNALS:
                continue
            if not self._requested.is_set():
                self._requested.set()
                name = signal.Signals(number[0]).name
                _say(f"{name}: stopping after this step; Ctrl-C (again) leaves without saving")
            elif number[0] == signal.SIGINT:
                _leave_at_once()


def _noted(number: int, frame: FrameType | None) -> None:
    """Replaces what Python does by default; the watching thread is told by the system."""


def _say(line: str) -> None:
    print(f"\n{line}", file=sys.stderr, flush=True)


def _leave_at_once() -> None:
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the status line has hidden the cursor
    os._exit(EXIT_AT_ONCE)
