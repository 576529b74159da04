"""Signals and the lock, in processes of their own."""

import contextlib
import errno
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from flaxformer_mt import interruption
from flaxformer_mt.errors import UserError
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.interruption import Interrupted, Interruption, run_interruptibly
from flaxformer_mt.runs.folder import locked


@contextlib.contextmanager
def process(script, *arguments):
    """A Python process that has printed "ready"."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    with subprocess.Popen(
        command, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), text=True
    ) as running:
        try:
            assert running.stdout.readline() == "ready\n", running.stderr.read()
            yield running
        finally:
            running.kill()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """This process may be slow: its main thread is not given up."""
    monkeypatch.setattr(interruption, "GRACE_SECONDS", 10_000.0)


LONG_COMPUTATION = """
    import hashlib
    from flaxformer_mt.interruption import Interruption
    with Interruption() as interruption, interruption.deferred():
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
        running.send_signal(signal.SIGINT)
        assert running.wait() == ExitCode.STOPPED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_deferred_signal_asks_to_stop(number, capfd):
    before = signal.getsignal(number)
    with Interruption() as interruption:

        def train():
            with interruption.deferred() as requested:
                assert not requested(1)
                os.kill(os.getpid(), number)
                assert requested(2)
                os.kill(os.getpid(), signal.SIGTERM)  # Another one changes nothing.
                while f"{number.name}: stopping" not in capfd.readouterr().err:
                    time.sleep(0.01)

        with pytest.raises(Interrupted, match=f"stopped by {number.name}"):
            train()
    assert signal.getsignal(number) is before
    assert "interruption" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_where_nothing_has_to_be_saved(number, capsys):
    def main(interruption):
        os.kill(os.getpid(), number)
        pytest.fail("not reached")

    assert run_interruptibly("program", main) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == (
        f"program: stopped by {number.name}; the same command continues\n"
    )


def test_an_import_is_completed_before_a_signal_raises(tmp_path, monkeypatch):
    """An exception in the initialization of a compiled module may crash the process."""
    (tmp_path / "signalled_module.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGTERM)\ntime.sleep(0.2)\nend = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    imported = []

    def main(interruption):
        imported.append(importlib.import_module("signalled_module").end)
        time.sleep(600)

    assert run_interruptibly("program", main) == ExitCode.INTERRUPTED
    assert imported == [True]


def test_a_signal_while_the_interpreter_exits_changes_no_exit_code():
    script = """
        import os, sys
        from flaxformer_mt.interruption import run_interruptibly
        class Late:
            def __del__(self, write=os.write, read=os.read):
                write(1, b"ready\\n")
                read(0, 1)
        late = Late()
        sys.exit(run_interruptibly("program", lambda interruption: 0, until_exit=True))
    """
    with process(script) as running:
        running.send_signal(signal.SIGTERM)
        running.stdin.close()
        assert running.wait() == ExitCode.SUCCESS


COMPILING = """
    import sys
    import jax, jax.numpy as jnp
    from flaxformer_mt import interruption

    interruption.GRACE_SECONDS = 0.5

    def long(x):
        for _ in range(1500):
            x = jnp.sin(x @ x)
        return x

    def main(interruption):
        lowered = jax.jit(long).lower(jnp.ones((4, 4)))
        print("ready", flush=True)
        lowered.compile()
        return 0

    sys.exit(interruption.run_interruptibly("program", main, until_exit=True))
"""


def test_a_compilation_is_not_waited_for():
    """No Python runs in the main thread until it is over, and nothing has to be saved."""
    with process(COMPILING) as running:
        running.send_signal(signal.SIGTERM)
        assert running.wait() == ExitCode.INTERRUPTED
        assert "stopped by SIGTERM; the same command continues" in running.stderr.read()


def test_an_interruption_that_a_library_takes_for_its_own_error_is_one():
    def compile_it(interruption):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError(f"Exception raised in callback: {error}") from None

    assert interruption.run_interruptibly("program", compile_it) == ExitCode.INTERRUPTED
    with pytest.raises(RuntimeError, match="its own"), Interruption():
        raise RuntimeError("its own")


def test_several_processes_agree_now_and_then():
    asked = []

    def agree(is_requested):
        asked.append(is_requested)
        return len(asked) == 2  # Another process was asked to stop.

    with Interruption() as interruption, interruption.deferred(agree, agree_every=5) as requested:
        answers = [requested(step) for step in range(1, 13)]
    assert answers == [False] * 9 + [True, False, False]
    assert asked == [False] * 3  # The last time at the end.


def test_several_processes_agree_on_a_signal_after_the_last_step():
    with (
        pytest.raises(Interrupted, match=r"^stopped by a signal to another process; the same"),
        Interruption() as interruption,
        interruption.deferred(lambda is_requested: True, agree_every=50) as requested,
    ):
        assert not requested(7)


HOLD_LOCK = """
    import sys
    from flaxformer_mt.runs.folder import locked
    with locked(sys.argv[1]):
        print("ready", flush=True)
        sys.stdin.read()
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


def test_a_file_of_another_program_is_locked_but_not_written_to(tmp_path):
    (tmp_path / "lock").write_text("foreign")
    with locked(tmp_path):
        with pytest.raises(UserError, match="another process is training"), locked(tmp_path):
            pytest.fail("both have it")
        assert (tmp_path / "lock").read_text() == "foreign"


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    lines = []
    with locked(tmp_path, lines.append):
        (line,) = lines
    assert "without locks" in line
