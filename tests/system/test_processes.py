"""Two processes with two devices each train as one process with four."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from small_runs import TINY_MODEL, xla_flags

from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.runs.checkpoint import whole_checkpoints
from flaxformer_mt.runs.metrics_file import read_metrics
from flaxformer_mt.runs.step_folders import folder_of, read_record

STEPS = 12
OPTIONS = (
    "--config=configs/quickstart.py",
    *TINY_MODEL,
    "--data.generated-pairs=10000",  # Enough for two virtual streams.
    "--optimizer.total-steps=12",  # The same warm-up for any number of steps.
    "--data.vocab-size=500",
    "--train.batch-tokens=1024",
    "--train.log-every=1",
    "--train.eval-every=12",
    "--train.eval-sentences=4",
    "--train.checkpoint-every=2",
    "--train.keep-last=4",
    "--train.show-translations=0",
    "--decode.beam-size=1",
    "--decode.max-length-factor=0",
    "--decode.max-length-extra=2",
    "--parallel.fsdp=2",
)


@dataclasses.dataclass
class Run:
    """Processes that train together, and where they write what they say."""

    processes: list[subprocess.Popen]
    logs: list

    def finish(self):
        """Waits for all to end well."""
        for process, log in zip(self.processes, self.logs, strict=True):
            assert process.wait() == 0, log.read_text()


@pytest.fixture
def start(tmp_path, cache):
    """A function that starts the processes of a run; they are killed at the end of the test."""
    started = []

    def start(workdir, num_processes, num_steps=STEPS, options=()):
        command = [sys.executable, "train.py", *OPTIONS, *options]
        command += [f"--workdir={workdir}", f"--train.num-steps={num_steps}"]
        environment = {
            **os.environ,
            "XLA_FLAGS": xla_flags(f"--xla_force_host_platform_device_count={4 // num_processes}"),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        run = Run([], [])
        port = free_port()
        for number in range(num_processes):
            several = [
                f"--coordinator=127.0.0.1:{port}",
                f"--num-processes={num_processes}",
                f"--process-id={number}",
            ]
            log = tmp_path / f"{len(started)}-{number}.log"
            with log.open("w") as file:
                run.processes.append(
                    subprocess.Popen(
                        command + several * (num_processes > 1),
                        env=environment,
                        stdout=file,
                        stderr=file,
                    )
                )
            run.logs.append(log)
            started.append(run.processes[-1])
        return run

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs, which all processes of the same number of devices share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def losses(workdir):
    """By split and step; test metrics are taken after the last step."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return {(line["split"], line["step"]): line["loss"] for line in lines}


def assert_same_losses(workdir, expected):
    found = losses(workdir)
    assert set(expected) == {("train", step) for step in range(1, STEPS + 1)} | {
        ("valid", STEPS),
        ("test", STEPS),
    }
    for place, loss in expected.items():
        np.testing.assert_allclose(found[place], loss, atol=1e-5, rtol=0, err_msg=str(place))


@pytest.fixture(scope="module")
def uninterrupted():
    """Losses of one process with four devices, which the first test that needs them fills in."""
    return {}


@pytest.fixture
def expected(start, folders, uninterrupted):
    """What all others have to agree with."""
    if not uninterrupted:
        start(folders / "one", 1).finish()
        uninterrupted.update(losses(folders / "one"))
    return uninterrupted


def wait_for_checkpoint(run, workdir):
    while not whole_checkpoints(workdir):
        said = [log.read_text() for log in run.logs]
        assert all(process.poll() is None for process in run.processes), said
        time.sleep(0.05)


@pytest.mark.slow
def test_a_model_that_is_sharded_over_processes_is_trained_and_translates(start, folders, expected):
    workdir = folders / "sharded"
    own = ("--parallel.fsdp=4", "--decode.devices-per-model=4")
    start(
        workdir, 2, options=(*own, "--train.teacher-forced-metrics", "teacher_forced_bleu")
    ).finish()
    assert_same_losses(workdir, expected)
    found, of_one = (
        [line["chrf"] for line in read_metrics(folder / "metrics.jsonl") if "chrf" in line]
        for folder in (workdir, folders / "one")
    )
    assert found == of_one
    assert len(found) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_each_continues_the_others_checkpoint(start, folders, expected, first, second):
    workdir = folders / f"{first} then {second}"
    start(workdir, first, num_steps=4).finish()
    record = read_record(folder_of(workdir) / "4")
    assert len(record["progress"]["position"]["streams"]) == 2
    start(workdir, second).finish()
    assert_same_losses(workdir, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "successors"), [(1, 1), (0, 2)])
def test_when_one_is_killed_the_other_ends_and_the_run_goes_on(
    start, folders, expected, victim, successors
):
    workdir = folders / f"{victim} killed"
    run = start(workdir, 2, num_steps=100_000)
    wait_for_checkpoint(run, workdir)
    run.processes[victim].send_signal(signal.SIGKILL)
    assert run.processes[1 - victim].wait() != 0  # it does not wait for ever

    start(workdir, successors).finish()
    assert_same_losses(workdir, expected)


@pytest.mark.slow
def test_a_signal_to_one_stops_all_and_the_run_goes_on(start, folders, expected):
    workdir = folders / "signalled"
    run = start(workdir, 2, num_steps=100_000)
    wait_for_checkpoint(run, workdir)
    run.processes[1].send_signal(signal.SIGTERM)
    for process, log in zip(run.processes, run.logs, strict=True):
        assert process.wait() == ExitCode.INTERRUPTED, log.read_text()
    reached = max(whole_checkpoints(workdir))
    assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == reached
    if reached < STEPS:
        start(workdir, 2).finish()
        assert_same_losses(workdir, expected)


@pytest.mark.slow
def test_the_others_not_coming_is_said_in_one_line(tmp_path):
    """Of the first process, which waits, and of another, which finds nobody."""
    port = free_port()
    code = (
        "import sys; from flaxformer_mt import distributed\n"
        f"distributed.initialize('127.0.0.1:{port}', 2, int(sys.argv[1]), timeout=3)"
    )
    late = subprocess.run([sys.executable, "-c", code, "1"], capture_output=True, text=True)
    assert f"UserError: coordinator=127.0.0.1:{port}: no answer in 3 s" in late.stderr
    first = subprocess.run([sys.executable, "-c", code, "0"], capture_output=True, text=True)
    assert first.returncode == 1
    assert "not all processes came within 3 s" in first.stderr
    assert len(first.stderr.splitlines()) == 1
