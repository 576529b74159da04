"""A system call that fails, or a kill at one: each call that changes a file, in turn.

The calls are counted by `calls.c`, which is loaded before all other libraries, so that those of
Orbax and TensorStore are reached as well.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.checkpoint import restore_params

WRITE = """
import sys
from pathlib import Path
from flaxformer_mt.runs import atomic
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
COMMAND = "import sys; from flaxformer_mt.cli import main; sys.exit(main())"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("this test compiles a library for Linux")
    path = tmp_path_factory.mktemp("calls") / "calls.so"
    source = Path(__file__).with_name("calls.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return path


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
@pytest.mark.timeout(3600)  # Each call costs the start of a program.
@pytest.mark.parametrize("error", [0, errno.EIO])
def test_an_average_is_whole_or_absent_whichever_call_fails(library, trained_run, tmp_path, error):
    folder = tmp_path / "all"
    output = folder / "average"
    arguments = [COMMAND, "average", "--run", trained_run, "--last", "1", "--output", output]
    folder.mkdir()
    expected, calls = run(library, folder, arguments)
    assert expected.returncode == 0, expected.stderr
    step, params = restore_params(output)
    assert step >= 0
    assert params
    # FAULT_STRIDE=10 tries every tenth call.
    for number in range(0, len(calls), int(os.environ.get("FAULT_STRIDE", "1"))):
        shutil.rmtree(folder)
        folder.mkdir()
        ended, _ = run(library, folder, arguments, number, error)
        assert "Traceback" not in ended.stderr, (number, ended.stderr)
        if not output.exists():
            again, _ = run(library, folder, arguments)
            assert again.returncode == 0, (number, again.stderr)
        assert restore_params(output)[0] == step
        atomic.remove_leftovers(folder)
        assert [path.name for path in folder.iterdir()] == ["average"]
