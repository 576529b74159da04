"""Allocations that fail: a limit of address space, in steps, for each command that writes."""

import resource
import shutil
import subprocess
import sys

import pytest
from fuzz import kills

MIB = 2**20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", sorted(set(kills.COMMANDS)))
def test_a_command_ends_in_one_line_or_right(world, tmp_path, command):
    folder = tmp_path / "all"
    arguments = kills.arguments(command, world, folder / kills.OUTPUT)
    folder.mkdir()
    assert start(arguments).returncode == 0
    expected = kills.result(command, folder)
    for limit in (1000, 4096, 4200, 4400, 5000):
        shutil.rmtree(folder)
        folder.mkdir()
        ended = start(arguments, limit)
        if ended.returncode:
            assert ended.returncode == 1, (limit, ended.stderr)
            assert "Traceback" not in ended.stderr, (limit, ended.stderr)
            assert "error: " in ended.stderr.splitlines()[-1], (limit, ended.stderr)
            assert start(arguments).returncode == 0
        assert kills.result(command, folder) == expected, limit


def start(arguments, limit=None):
    """Runs a command, with at most `limit` MiB of address space."""

    def restrict():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit * MIB, limit * MIB))

    return subprocess.run(
        [sys.executable, "-c", kills.PROGRAM, *map(str, arguments)],
        cwd=kills.REPOSITORY,
        capture_output=True,
        text=True,
        preexec_fn=restrict,
        check=False,
    )
