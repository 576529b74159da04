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

PROGRAMS = {
    "train.py": [sys.executable, "train.py"],
    "flaxformer-mt train": [
        sys.executable,
        "-c",
        "import sys; from flaxformer_mt.cli import main; sys.exit(main())",
        "train",
    ],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Of compilations, so that a restart is quick."""
    return tmp_path_factory.mktemp("compilations")


@pytest.fixture
def start(text, tmp_path, cache):
    """A function that starts training; the process is killed at the end of the test."""
    processes = []

    def start(*options, program="train.py"):
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
                    [*PROGRAMS[program], *arguments], env=environment, stdout=log, stderr=log
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("is_ignored", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_closed_terminal(text, tmp_path, cache, program, is_ignored):
    """Stops training, unless SIGHUP is ignored, as below `nohup`."""
    arguments = flags(text, tmp_path / "run", "--parallel.num-devices=1", "--train.num-steps=60")
    controller, terminal = pty.openpty()

    def prepare():
        os.setsid()
        os.close(os.open(os.ttyname(terminal), os.O_RDWR))  # It becomes the controlling terminal.
        if is_ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = subprocess.Popen(
        [*PROGRAMS[program], *arguments],
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
        stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=prepare,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    while b"step 2/" not in shown:
        shown += os.read(controller, 1000)
    os.close(controller)
    assert process.wait(timeout=120) == (0 if is_ignored else ExitCode.INTERRUPTED)
    lines = metrics(tmp_path / "run")
    if is_ignored:
        assert lines[-1]["split"] == "test"
        return
    steps = [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()]
    assert 2 <= max(steps) < 60
    again = subprocess.run([*PROGRAMS[program], *arguments], capture_output=True, check=False)
    assert again.returncode == 0, again.stderr
    assert metrics(tmp_path / "run")[-1]["split"] == "test"


def log(tmp_path):
    return (tmp_path / "log").read_text()


def wait_until(process, holds, tmp_path):
    while not holds():
        assert process.poll() is None, log(tmp_path)
        time.sleep(0.01)


@pytest.mark.parametrize(
    "seconds",
    [0.3, *(pytest.param(0.5 + 0.7 * number, marks=pytest.mark.slow) for number in range(12))],
)
@pytest.mark.parametrize(
    "program", ["train.py", pytest.param("flaxformer-mt train", marks=pytest.mark.slow)]
)
def test_at_start_up_and_later(start, tmp_path, seconds, program):
    process = start("--train.num-steps=100000", program=program)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == ExitCode.INTERRUPTED, log(tmp_path)
    assert "the same command continues" in log(tmp_path)


@pytest.mark.slow
def test_while_compiling(start, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    process = start(
        "--train.num-steps=100000", "--model.num-encoder-layers=6", "--model.scan-layers=False"
    )
    wait_until(process, lambda: "exports  " in log(tmp_path), tmp_path)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == ExitCode.INTERRUPTED, log(tmp_path)
    assert "stopped by SIGTERM; the same command continues" in log(tmp_path)


@pytest.mark.slow
def test_while_training(start, tmp_path):
    process = start("--train.num-steps=100000", program="flaxformer-mt train")
    wait_until(process, lambda: "step 2/" in log(tmp_path), tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == ExitCode.INTERRUPTED, log(tmp_path)
    assert "flaxformer-mt train: stopped after step" in log(tmp_path)


@pytest.mark.slow
def test_in_the_final_evaluation(start, tmp_path):
    """Which the same command then repeats."""
    process = start("--train.num-steps=2", "--decode.max-length-extra=200")
    wait_until(process, lambda: "step 2/2 valid" in log(tmp_path), tmp_path)
    wait_until(process, lambda: (tmp_path / "run/checkpoints/2").exists(), tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == ExitCode.INTERRUPTED, log(tmp_path)
    assert start("--train.num-steps=2").wait(timeout=120) == ExitCode.SUCCESS, log(tmp_path)
    assert metrics(tmp_path / "run")[-1]["split"] == "test"
