"""`flaxformer-mt doctor` finds out what would stop a run of several processes."""

import fcntl
import os
import socket
import subprocess
import sys

import pytest
from small_runs import xla_flags

from flaxformer_mt import cluster_checks, distributed
from flaxformer_mt.cli import main


def subjects(text):
    """The first column by the second."""
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line[:4] in ("ok  ", "FAIL")]
    return {line[1]: line[0] for line in lines}


EVERYTHING = ("versions", "devices", "all-reduce", "clocks", "folder", "renaming", "lock", "free")


def test_one_process(tmp_path, capsys):
    folder = tmp_path / "runs" / "mine"
    assert main(["doctor", "--workdir", str(folder), "--megabytes", "1"]) == 0
    assert subjects(capsys.readouterr().out) == dict.fromkeys(EVERYTHING, "ok")
    assert not folder.parent.exists()


def run_two(folders):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=2")}
    command = [sys.executable, "-m", "flaxformer_mt", "doctor", "--megabytes=1"]
    command += [f"--coordinator=127.0.0.1:{port}", "--num-processes=2"]
    processes = [
        subprocess.Popen(
            [*command, f"--process-id={number}", f"--workdir={folder}"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number, folder in enumerate(folders)
    ]  # fmt: skip
    outputs = [process.communicate() for process in processes]
    return outputs, [process.returncode for process in processes]


@pytest.mark.slow
def test_two_processes(tmp_path):
    (first, second), codes = run_two([tmp_path / "shared"] * 2)
    assert codes == [0, 0], first[1] + second[1]
    assert subjects(first[0]) == dict.fromkeys(EVERYTHING, "ok")
    assert "4 devices" in first[0]
    assert "in each of 2 processes" in first[0]
    assert not subjects(second[0])
    assert not (tmp_path / "shared").exists()


def test_versions_that_differ():
    check = cluster_checks._same("versions", ["jax 1", "jax 1", "jax 2"])
    assert not check.passed
    assert check.text == "jax 1 in process 0, but jax 2 in process 2"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    check = cluster_checks._lock(tmp_path)
    assert not check.passed
    assert "two runs in one folder would go unnoticed" in check.text


def test_clocks_that_differ(monkeypatch):
    monkeypatch.setattr(distributed, "gather_texts", lambda texts: ["10.0", "13.5"])
    check = cluster_checks._clocks()
    assert (check.passed, check.text) == (False, "differ by at most 3.5 s")


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    assert main(["doctor", "--workdir", str(tmp_path / "file" / "run"), "--megabytes", "1"]) == 1
    assert "FAIL  folder      process 0: " in capsys.readouterr().out
