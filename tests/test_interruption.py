"""Signals and the lock, in processes of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.interruption import EXIT_AT_ONCE, Interruption
from flaxformer_mt.runs.lock import locked


@contextlib.contextmanager
def process(script, *arguments):
    """A Python process that has printed "ready"."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout.readline() == "ready\n", running.stderr.read()
            yield running
        finally:
            running.kill()


LONG_COMPUTATION = """
    import hashlib
    from flaxformer_mt.interruption import Interruption
    with Interruption():
        print("ready", flush=True)
        # Like a compilation: no Python runs in this thread until it is over.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_leaves_at_once_whatever_the_main_thread_does(first):
    with process(LONG_COMPUTATION) as running:
        running.send_signal(first)
        assert running.stderr.readline() == "\n"
        assert running.stderr.readline().startswith(f"{first.name}: stopping after this step")
        running.send_signal(signal.SIGTERM)  # as a batch system may do
        time.sleep(0.1)
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=5) == EXIT_AT_ONCE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop(number, capfd):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.requested(1)
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while not interruption.requested(2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert number.name in capfd.readouterr().err
    assert signal.getsignal(number) is before
    assert "interruption" not in {thread.name for thread in threading.enumerate()}


def test_several_processes_agree_now_and_then():
    asked = []

    def agree(is_requested):
        asked.append(is_requested)
        return True  # another process was asked to stop

    with Interruption(agree, agree_every=5) as interruption:
        answers = [interruption.requested(step) for step in range(1, 11)]
    assert answers == [False] * 4 + [True] + [False] * 4 + [True]
    assert asked == [False, False]


HOLD_LOCK = """
    import sys, time
    from flaxformer_mt.runs.lock import locked
    with locked(sys.argv[1]):
        print("ready", flush=True)
        time.sleep(100)
"""


def test_only_one_process_trains_in_a_folder(tmp_path):
    folder = tmp_path / "run"
    with process(HOLD_LOCK, folder) as other:
        with (
            pytest.raises(
                UserError, match=rf"^process {other.pid} on \S+ is training in {folder} "
            ),
            locked(folder),
        ):
            pytest.fail("both have it")
        other.kill()  # it cannot clean up
        other.wait()
        with locked(folder):
            assert (folder / "lock").read_text().startswith(f"{os.getpid()} on ")
    with locked(folder):
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with (
        pytest.raises(UserError, match=r"file/run cannot be written to: Not a directory"),
        locked(tmp_path / "file" / "run"),
    ):
        pytest.fail("there is no folder")


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    lines = []
    with locked(tmp_path, lines.append):
        (line,) = lines
    assert "without locks" in line
