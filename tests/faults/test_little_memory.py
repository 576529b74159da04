"""Allocations that fail: a limit of address space, in steps, for each command that writes."""

import shutil
import subprocess
import sys

import pytest
from fuzz import kills


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
            assert "error: " in ended.stderr.splitlines()[-1], (limit, ended.stderr)
            assert start(arguments).returncode == 0
        assert kills.result(command, folder) == expected, limit


def start(arguments, limit=None):
    """Runs a command, with at most `limit` MiB of address space."""
    # By a shell: code of `preexec_fn` could wait for ever for a lock of a thread of this process.
    set_limit = f'ulimit -v {limit and limit * 1024} && exec "$@"'
    restricted = ["sh", "-c", set_limit, "sh"] if limit else []
    return subprocess.run(
        [*restricted, sys.executable, "-c", kills.PROGRAM, *map(str, arguments)],
        cwd=kills.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
