"""SIGTERM at any moment of the program gives exit code 75, and loses nothing."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from small_runs import flags, metrics, xla_flags

from flaxformer_mt.exit_codes import ExitCode

# Sends SIGTERM to itself at a moment: when it first imports a module, or opens a file.
SIGNALLED = """
import os, runpy, signal, sys
event, end = sys.argv.pop(1).split(":")

def signal_once(found, arguments):
    global event
    if found == event and str(arguments[0]).endswith(end):
        event = None
        os.kill(os.getpid(), signal.SIGTERM)

sys.addaudithook(signal_once)
sys.argv.insert(1, "train")
runpy.run_module("flaxformer_mt", run_name="__main__")
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Of compilations, so that a restart is quick."""
    return tmp_path_factory.mktemp("compilations")


@pytest.fixture
def start(text, tmp_path, cache):
    """A function that starts training; the process is killed at the end of the test."""
    processes = []

    def start(*options, moment="none:"):
        environment = {
            **os.environ,
            "XLA_FLAGS": xla_flags(),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
        }
        arguments = flags(text, tmp_path / "run", "--parallel.num-devices=1", *options)
        with (tmp_path / "log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", SIGNALLED, moment, *arguments],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_closed_terminal(text, tmp_path, cache, is_ignored):
    """Stops training, unless SIGHUP is ignored, as below `nohup`."""
    steps = f"--train.num-steps={60 if is_ignored else 100_000}"
    arguments = flags(text, tmp_path / "run", "--parallel.num-devices=1", steps)
    controller, terminal = pty.openpty()

    def prepare():
        os.setsid()
        os.close(os.open(os.ttyname(terminal), os.O_RDWR))  # It becomes the controlling terminal.
        if is_ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, "none:", *arguments],
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
        stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=prepare,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    while b"step 2/" not in shown:
        shown += os.read(controller, 1000)
    os.close(controller)
    assert process.wait() == (0 if is_ignored else ExitCode.INTERRUPTED)
    if is_ignored:
        assert metrics(tmp_path / "run")[-1]["split"] == "test"
    else:
        assert max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()) >= 2


def log(tmp_path):
    return (tmp_path / "log").read_text()


def wait_until(process, holds, tmp_path):
    while not holds():
        assert process.poll() is None, log(tmp_path)
        time.sleep(0.01)


@pytest.mark.slow_except("import:jax")
@pytest.mark.parametrize(
    "moment", ["import:jax", "import:orbax.checkpoint", "open:lock", "open:progress.json"]
)
def test_at_start_up_and_later(start, tmp_path, moment):
    process = start("--train.num-steps=100000", moment=moment)
    assert process.wait() == ExitCode.INTERRUPTED, log(tmp_path)
    assert "the same command continues" in log(tmp_path)
