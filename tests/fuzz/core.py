"""Runs a command in this process, and judges its outcome.

An outcome is *right* (exit code 0 and the expected result), *refused* (one line, or the usage error
of an invalid option, with the right exit code), or wrong. `problem` says what is wrong: a
traceback, a hang, an unusable message, files left behind, or accepted nonsense, which each case
defines by its `check`.
"""

import contextlib
import dataclasses
import io
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from flaxformer_mt.cli import main
from flaxformer_mt.exit_codes import ExitCode

HANG_SECONDS = 10.0
"""Processor time after which a case counts as hanging."""
BLOCKED_SECONDS = 25.0
"""The same for waiting, in time on the clock: on a busy machine a quick command waits as well."""
MAX_MESSAGE = 4300
"""Characters of a message that a person still reads."""
MAX_GROWTH = 3e9
"""Bytes of memory that no case needs."""
WRITTEN_BY_STARTING = {"lock", "__pycache__"}
"""Names of files that a refused command may leave."""

ERROR_LINE = re.compile(r"(flaxformer-mt( train)?|train\.py): error: \s*\S")
"""A message may start with a name that starts with spaces."""
REMARK = re.compile(r"(flaxformer-mt( train)?|train\.py): ")


class Hang(BaseException):
    """Raised in the main thread when a command takes too long."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command has done."""

    code: int
    out: str
    err: str
    crash: str = ""
    """The traceback, if the command raised an exception."""
    hung: bool = False
    growth: float = 0.0
    """Bytes by which the peak memory of the process grew."""
    left: tuple[str, ...] = ()
    """Files that exist now but did not before."""

    @property
    def text(self) -> str:
        return self.out + self.err


def accept(outcome: Outcome) -> str:
    """The check of a case whose success is right whatever it prints."""
    return ""


@dataclasses.dataclass(frozen=True)
class Case:
    """A command on files that may be malformed."""

    recipe: str
    """What was done to the files, literally."""
    arguments: tuple[str, ...]
    stdin: bytes = b""
    check: Callable[[Outcome], str] = accept
    """Says what is wrong with a success, "" if nothing is."""
    names: tuple[str, ...] = ()
    """A message must contain one of these, if there are any."""
    may_write: bool = False
    """Whether files of a refused command are not checked: one that continues a run writes."""

    def problem(self, outcome: Outcome) -> str:
        """Says what is wrong with an outcome, "" if it is right or refused."""
        if outcome.code == ExitCode.FAILURE and "DIFFERS FIRST" in outcome.out:
            return ""  # Of `parity`, which has found a difference.
        return common_problem(outcome) or (
            self.check(outcome) if outcome.code == 0 else self._refusal_problem(outcome)
        )

    def _refusal_problem(self, outcome: Outcome) -> str:
        if outcome.left and not self.may_write:
            return f"refused, but it left {', '.join(outcome.left[:5])}"
        if self.names and not any(name in outcome.text for name in self.names):
            return f"the message names none of {self.names}: {outcome.err.strip()!r}"
        return ""

    def __str__(self) -> str:
        given = f" < {self.stdin[:200]!r}" if self.stdin else ""
        return f"{self.recipe}\n    flaxformer-mt {' '.join(map(repr, self.arguments))}{given}"


def common_problem(outcome: Outcome) -> str:
    """Says what no command may do; "" if it did not."""
    if outcome.hung:
        return f"hang\n{outcome.crash}"
    if outcome.crash:
        return f"traceback\n{outcome.crash}"
    if "Traceback (most recent call last)" in outcome.text:
        return f"traceback\n{outcome.text[-3000:]}"
    if outcome.growth > MAX_GROWTH:
        return f"took {outcome.growth / 1e9:.1f} GB of memory"
    if outcome.code == ExitCode.FAILURE:
        return message_problem(outcome.err)
    if outcome.code not in (ExitCode.SUCCESS, ExitCode.USAGE):
        return f"exit code {outcome.code}"
    return "" if outcome.code == ExitCode.SUCCESS or outcome.err else "exit code 2 without a word"


def message_problem(err: str) -> str:
    """Says what is wrong with the standard error of a refused command."""
    lines = err.splitlines()
    errors = [line for line in lines if ERROR_LINE.match(line)]
    if len(errors) != 1 or lines[-1] != errors[0]:
        return f"not one error line, as the last: {err[-2000:]!r}"
    stray = [line for line in lines if not REMARK.match(line)]
    if stray:
        return f"a line without the program's name: {stray[0][:500]!r}"
    if len(errors[0]) > MAX_MESSAGE:
        return f"a message of {len(errors[0]):,} characters: {errors[0][:300]!r}"
    if not errors[0].isprintable():
        return f"a message with control characters: {errors[0][:500]!r}"
    return ""


def run_command(
    arguments: tuple[str, ...],
    stdin: bytes = b"",
    folder: Path | None = None,
    seconds: float = HANG_SECONDS,
) -> Outcome:
    """Runs a command in `folder`; it hangs if it computes for more than `seconds`."""
    before = set() if folder is None else listing(folder)
    memory = peak_memory()
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    crash, hung = "", False
    with captured(stdin, out, err), contextlib.chdir(folder or Path.cwd()):
        try:
            with watched(folder, seconds):
                code = main(list(arguments))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except Hang:
            code, hung, crash = -1, True, traceback.format_exc(limit=-6)
        except Exception:
            code, crash = -1, traceback.format_exc(limit=-12)
    out.flush()
    left = set() if folder is None else listing(folder) - before
    return Outcome(
        code,
        out.buffer.getvalue().decode(errors="replace"),
        err.getvalue(),
        crash,
        hung,
        peak_memory() - memory,
        tuple(sorted(name for name in left if Path(name).name not in WRITTEN_BY_STARTING)),
    )


@contextlib.contextmanager
def captured(stdin: bytes, out: io.TextIOWrapper, err: io.StringIO) -> Iterator[None]:
    """Replaces the three streams of the process."""
    own = sys.stdin, sys.stdout, sys.stderr
    with tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        sys.stdin = types.SimpleNamespace(buffer=file)  # type: ignore[assignment]
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            sys.stdin, sys.stdout, sys.stderr = own


@contextlib.contextmanager
def watched(folder: Path | None, seconds: float) -> Iterator[None]:
    """Raises `Hang` in the main thread if the context takes too long."""
    finished, main_thread = threading.Event(), threading.get_ident()
    start, processor = time.monotonic(), time.process_time()

    def watch() -> None:
        while not finished.wait(1):
            waited = time.monotonic() - start
            computed = time.process_time() - processor
            if computed > seconds or waited > max(BLOCKED_SECONDS, seconds):
                release_readers(folder)
                signal.pthread_kill(main_thread, signal.SIGUSR1)

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise Hang

    previous = signal.signal(signal.SIGUSR1, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, previous)


def release_readers(folder: Path | None) -> None:
    """Gives whoever waits for a FIFO in a folder an end of file."""
    for path in [] if folder is None else folder.rglob("*"):
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def listing(folder: Path) -> set[str]:
    """Returns the relative paths of everything in a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def remove(folder: Path) -> None:
    """Removes a folder of malformed files."""
    for path in folder.rglob("*"):
        if not path.is_symlink() and stat.S_ISDIR(path.stat().st_mode):
            path.chmod(0o700)
    shutil.rmtree(folder)
