"""A system call that fails, or a kill at one: each call that changes a file, in turn.

The calls are counted by `calls.c`, which is loaded before all other libraries, so that those of
Orbax and TensorStore are reached as well.
"""

import collections
import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest
from commands import COMMANDS, OUTPUT, arguments, result
from fuzz.core import listing

from flaxformer_mt import atomic

WRITE = """
import sys
from pathlib import Path
from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError

path = Path(sys.argv[1])
try:
    atomic.make_folder(path)
    atomic.write_text(path / "file", "new")
    with atomic.new_folder(path / "folder", replace=True) as partial:
        (partial / "content").write_text("new")
except (UserError, OSError) as error:
    sys.exit(f"refused: {error}")
"""


def run(library, folder, arguments, number=None, error=0):
    """Runs Python; the call `number` below a folder fails with `error`, or kills if that is 0.

    Returns the process, and the calls that it made, a letter for each.
    """
    count = folder.parent / "count"
    count.unlink(missing_ok=True)
    fault = {} if number is None else {"FAULT_AT": str(number), "FAULT_ERROR": str(error)}
    ended = subprocess.run(
        [sys.executable, "-c", *map(str, arguments)],
        env=os.environ
        | fault
        | {"LD_PRELOAD": str(library), "FAULT_FOLDER": str(folder), "FAULT_COUNT": str(count)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return ended, count.read_text()


@pytest.mark.parametrize("error", [0, errno.EIO])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_write_is_whole_or_absent_whichever_call_fails(library, tmp_path, error, every):
    folder = tmp_path / "all"
    for number in range(0, 200, every):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "folder").mkdir(parents=True)
        (folder / "folder" / "content").write_text("old")
        (folder / "file").write_text("old")
        ended, calls = run(library, folder, [WRITE, folder], number, error)
        if number >= len(calls):
            break
        assert "Traceback" not in ended.stderr
        if error == 0:
            assert ended.returncode == -signal.SIGKILL
        assert (folder / "file").read_text() in ("old", "new")
        assert (folder / "folder" / "content").read_text() in ("old", "new")
        atomic.remove_leftovers(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["file", "folder"]
    assert set(calls) >= set("owfrum")
    assert ended.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)  # Each call costs two starts of a command.
@pytest.mark.parametrize("error", [0, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_given_again_whichever_call_fails(
    commands, world, tmp_path, command, error
):
    folder = tmp_path / "all"
    given = arguments(command, world, folder / OUTPUT)
    folder.mkdir()
    code, said, calls = commands.run(given, folder)
    assert code == 0, said
    expected = result(command, folder)
    counts = collections.Counter()
    # FAULT_STRIDE=10 tries every tenth call.
    for number in range(0, len(calls), int(os.environ.get("FAULT_STRIDE", "1"))):
        shutil.rmtree(folder)
        folder.mkdir()
        code, said, _ = commands.run(given, folder, FAULT_AT=number, FAULT_ERROR=error)
        where = (number, calls[number], code, said)
        # Orbax logs errors of the device before the line of the command, and after it.
        assert code == 1 or "Traceback" not in said, where
        assert error or code in (-signal.SIGKILL, 0), where
        if code == 0:
            counts["unharmed"] += 1
        else:
            assert not error or [line for line in said.splitlines() if "error: " in line], where
            counts["killed" if error == 0 else "refused"] += 1
            again, said, _ = commands.run(given, folder)
            # The call was after the output had its name.
            is_there = "error: " in said and "exists" in said
            assert again == 0 or is_there, (*where, said)
        assert result(command, folder) == expected, where
        assert {name for name in listing(folder) if not name.startswith(OUTPUT)} == set()
    print(f"{command}, {os.strerror(error) if error else 'kill'}: {len(calls)} calls, {counts}")
