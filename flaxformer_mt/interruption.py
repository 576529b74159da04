"""SIGTERM, SIGINT (Ctrl-C) and SIGHUP (a closed terminal) stop training, and lose nothing.

    with Interruption() as interruption:
        ...  # a signal raises Interrupted here
        with interruption.deferred() as requested:
            loop.train(..., should_stop=requested)  # saves, then raises Interrupted

Imports the standard library only, so that programs can install it before all other imports.
"""

import atexit
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from flaxformer_mt.exit_codes import ExitCode

GRACE_SECONDS = 5.0
"""The process exits if the main thread has not responded to a signal for this time, and nothing has
to be saved."""

_RETRY_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Raised when a signal has stopped training, and everything reached is saved."""


class Interruption:
    """Handles SIGTERM, SIGINT and SIGHUP, unless SIGHUP is ignored, as below `nohup`.

    It is a context manager for the main thread.

    The first signal raises `Interrupted` in the main thread; within `deferred` it asks training to
    stop instead. Imports are completed first. A second Ctrl-C exits at once.

    Python runs signal handlers between bytecodes of the main thread only, not during a long
    compilation. Therefore a thread watches for signals as well.

    Args:
      until_exit: keep handling signals after the context was left, until the process ends.
      may_exit: whether signals may end the process, as described above. Otherwise, as in a
        notebook, the main thread receives a second Ctrl-C as KeyboardInterrupt.
    """

    def __init__(self, until_exit: bool = False, may_exit: bool = True) -> None:
        self._until_exit = until_exit
        self._may_exit = may_exit
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._signals = _SIGNALS[:2] if is_ignored else _SIGNALS
        self._requested = threading.Event()
        self._is_deferred = False
        self.is_abrupt = False
        """Whether the main thread was interrupted at once, rather than after a step."""
        self._is_raised = False
        self._is_finished = False
        self._is_handled = False
        self._name = ""
        self._num_retries = 0
        self._overdue = threading.Timer(GRACE_SECONDS, self._exit_meanwhile)
        self._overdue.daemon = True
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> "Interruption":
        signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        watcher = threading.Thread(
            target=self._watch, args=(signals,), name="interruption", daemon=True
        )
        self._restore.callback(signals.close)
        self._restore.callback(watcher.join)
        self._restore.callback(wakeup.close)  # Ends the watcher.
        previous = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._restore.callback(signal.set_wakeup_fd, previous)
        for number in self._signals:
            self._restore.callback(signal.signal, number, signal.getsignal(number))
        self._restore.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = functools.partial(self._raise_again, sys.unraisablehook)
        if self._until_exit:
            # Python gives all other signals their default action, which ends it, while it exits.
            atexit.register(_ignore_signals)
        watcher.start()
        self.install_handlers()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._is_finished = True
        if not self._until_exit:
            self._restore.close()
            self._overdue.cancel()
        # A compiler that calls Python makes errors of its own from exceptions, with their text.
        if self._is_raised and isinstance(error, Exception) and self._reason() in str(error):
            raise Interrupted(self._reason()) from error

    def install_handlers(self) -> None:
        """Installs the signal handlers again, after a library has replaced them."""
        for number in self._signals:
            signal.signal(number, self._handle)

    @contextlib.contextmanager
    def deferred(
        self, agree: Callable[[bool], bool] | None = None, agree_every: int = 1
    ) -> Iterator[Callable[[int], bool]]:
        """Defers signals to the end of a training step, after which everything is saved.

        Args:
          agree: under several processes, returns whether any of them was asked to stop. They have
            to stop after the same step, but do not receive signals at the same time.
          agree_every: steps between calls of `agree`, which waits for all processes.

        Yields:
          A function of the step that returns whether to save and stop after it. On leaving the
          context, `Interrupted` is raised if a signal has arrived in any process.
        """

        def requested(step: int) -> bool:
            if agree is None:
                return self._requested.is_set()
            return step % agree_every == 0 and agree(self._requested.is_set())

        self._is_deferred = True
        try:
            yield requested
            # Of the steps after the last agreement.
            if agree is not None and agree(self._requested.is_set()):
                self._requested.set()
        finally:
            self._is_raised = self._requested.is_set()
            self._is_deferred = False
        if self._requested.is_set():
            self._interrupt()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_handled and number == signal.SIGINT and not self._may_exit:
            raise KeyboardInterrupt
        self._is_handled = True
        self._name = self._name or signal.Signals(number).name
        self._requested.set()
        if self._is_deferred or self._is_raised or self._is_finished:
            return
        if _is_importing(frame):
            # An exception in the initialization of a compiled module may crash, or be lost.
            self._retry_soon(number)
        else:
            self.is_abrupt = True
            self._interrupt()

    def _raise_again(self, report: Callable[[Any], object], ignored: Any) -> None:
        """Python ignores exceptions in destructors and in callbacks of its garbage collection."""
        if isinstance(ignored.exc_value, Interrupted):
            self._is_raised = False
            self._retry_soon(signal.Signals[self._name])
        else:
            report(ignored)

    def _retry_soon(self, number: int) -> None:
        timer = threading.Timer(_RETRY_SECONDS, self._retry, [number])
        timer.daemon = True
        timer.start()
        self._is_handled = False

    def _retry(self, number: int) -> None:
        self._num_retries += 1
        os.kill(os.getpid(), number)

    def _interrupt(self) -> None:
        self._is_raised = True
        raise Interrupted(self._reason())

    def _exit_meanwhile(self) -> None:
        """Ends the process while its main thread does not respond."""
        _say(f"\n{self._reason()}")
        _exit(ExitCode.INTERRUPTED)

    def _reason(self) -> str:
        name = self._name or "a signal to another process"
        return f"stopped by {name}; the same command continues"

    def _watch(self, signals: socket.socket) -> None:
        is_first = True
        while number := signals.recv(1):
            if number[0] not in self._signals:
                continue
            if self._num_retries:
                self._num_retries -= 1
                continue
            name = signal.Signals(number[0]).name
            if is_first:
                is_first = False
                if self._is_deferred:
                    # The main thread may be in a compilation.
                    self._name = self._name or name
                    self._requested.set()
                    _say(f"\n{name}: stopping after this step; Ctrl-C (again) exits without saving")
                elif self._may_exit and not self._is_finished:
                    self._name = self._name or name
                    self._overdue.start()
            elif self._may_exit and number[0] == signal.SIGINT:
                _exit(ExitCode.STOPPED)


def handle_signals() -> contextlib.AbstractContextManager[Interruption | None]:
    """Returns a context in which signals stop training, for scripts and notebooks.

    It yields None outside the main thread: other threads receive no signals.
    """
    if threading.current_thread() is threading.main_thread():
        return Interruption(may_exit=False)
    return contextlib.nullcontext()


def run_interruptibly(
    program: str, main: Callable[[Interruption], int], until_exit: bool = False
) -> int:
    """Runs the main function of a program that trains.

    Args:
      program: prefix of the message after an interruption.
      main: returns the exit code; should import other modules itself, so that signals are handled
        meanwhile.
      until_exit: see `Interruption`.
    """
    try:
        with Interruption(until_exit) as interruption:
            return main(interruption)
    except Interrupted as interrupted:
        _say(f"{program}: {interrupted}")
        if until_exit and interruption.is_abrupt:
            # A thread of JAX may still compile, which crashes when Python finalizes its modules.
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            _exit(ExitCode.INTERRUPTED)
        return ExitCode.INTERRUPTED


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the program, from `run_interruptibly` on, is within an import."""
    while frame is not None and frame.f_code is not run_interruptibly.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # The terminal may have been closed.
        print(line, file=sys.stderr, flush=True)


def _exit(code: int) -> None:
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # The status line has hidden the cursor.
    os._exit(code)
