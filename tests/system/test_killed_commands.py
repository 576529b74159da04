"""A command that is killed repeatedly and then repeated has the result of an undisturbed one.

tests/runs/test_atomic.py kills a process amid a write, which is the cheap case of the same kind.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import chex
import pytest

from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.checkpoint import restore_params

pytestmark = pytest.mark.slow  # Each kill costs the start of a program.

KILLS = 20
LINES = "".join(f"the {animal} is old\n" for animal in ("dog", "cat", "bird"))
COMMANDS = {
    "prepare": (
        "prepare --path {text} --output {output} --source-language en --target-language de "
        "--splits train=train validation=valid"
    ),
    "convert": "convert --from flaxformer_mt --to marian {run} {output}",
    "average": "average --run {run} --last 1 --output {output}",
    "translate": "translate --run {run} --beam-size 1 --input {lines} --output {output}",
    "translate --resume": (
        "translate --run {run} --beam-size 1 --input {lines} --output {output} --resume"
    ),
}


def start(name, workplace, output):
    """Starts a command that writes `output`."""
    texts = {"run": workplace / "run", "text": workplace / "text", "lines": workplace / "lines"}
    arguments = COMMANDS[name].format(output=output, **texts).split()
    program = "import sys; from flaxformer_mt.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Waits for a command that nobody disturbs."""
    _, error = process.communicate()
    assert process.returncode == 0, error


def kill(process, output, longest, rng):
    """Kills a command at any moment, or soon after it has begun to write."""
    deadline = time.monotonic() + rng.uniform(0, longest)
    begins_to_write = rng.random() < 0.5
    while process.poll() is None and (begins_to_write or time.monotonic() < deadline):
        if begins_to_write and any(output.parent.glob(".*")):
            time.sleep(rng.choice([0, 0.01, 0.1, 1]) * rng.random())
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def result_of(name, output):
    """The files that a command has written, and parameters if Orbax, whose files differ, has."""
    if name.startswith("translate"):
        return output.read_bytes(), ()
    files = {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in output.rglob("*")
        if path.is_file() and "checkpoints" not in path.relative_to(output).parts
    }
    return files, restore_params(output) if name == "average" else ()


def assert_equal(found, wanted):
    assert found[0] == wanted[0]
    chex.assert_trees_all_equal(found[1], wanted[1])


@pytest.fixture(scope="module")
def workplace(trained_run, text, tmp_path_factory):
    """A folder with the inputs of all commands."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(trained_run, folder / "run", ignore=shutil.ignore_patterns("averaged"))
    shutil.copytree(text, folder / "text")
    (folder / "lines").write_text(LINES)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_can_be_repeated(workplace, tmp_path, name):
    undisturbed = tmp_path / "undisturbed" / "output"
    undisturbed.parent.mkdir()
    for _ in range(2):  # The second time, its programs are compiled.
        began = time.monotonic()
        finish(start(name, workplace, undisturbed))
        longest = time.monotonic() - began
        wanted = result_of(name, undisturbed)
        atomic.delete(undisturbed)

    rng = random.Random(name)
    output = tmp_path / "killed" / "output"
    foreign = [output.with_name(f"output{end}") for end in (".partial", ".new", ".unfinished")]
    for folder in foreign:
        folder.mkdir(parents=True)
        (folder / "foreign").write_text("kept")
    leftovers = completed = 0
    for _ in range(KILLS):
        kill(start(name, workplace, output), output, longest, rng)
        leftovers += any(output.parent.glob(".*"))
        if output.exists():
            assert_equal(result_of(name, output), wanted)
            completed += 1
            atomic.delete(output)
    print(f"{name}: {KILLS} kills, {leftovers} left something behind, {completed} came too late")
    finish(start(name, workplace, output))
    assert_equal(result_of(name, output), wanted)
    settings = [output.with_name("output.settings.json")] if name.endswith("--resume") else []
    assert sorted(output.parent.iterdir()) == sorted([output, *settings, *foreign])
    assert all((folder / "foreign").read_text() == "kept" for folder in foreign)
