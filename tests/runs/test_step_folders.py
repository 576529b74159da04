"""Checkpoints while others read them, on other disks, and beside what is not a checkpoint."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import averaging, checkpoint, step_folders
from flaxformer_mt.runs.averaging import average_run
from flaxformer_mt.runs.checkpoint import Checkpoints, restore_params
from flaxformer_mt.runs.manifest import damage
from flaxformer_mt.training.state import TrainState


def make_state(step):
    params = {"kernel": jax.random.normal(jax.random.key(step), (4, 3))}
    return TrainState(jnp.int32(step), params, ())


def save(folder, *steps, keep_last=10):
    with Checkpoints(folder, keep_last, announce=pytest.fail) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), metrics={"loss": 1 / step})


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    save(folder, 1, 2, 3)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    return folder


@pytest.fixture
def run(three, tmp_path):
    return shutil.copytree(three, tmp_path / "run")


def entries(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def remove(run, step):
    shutil.rmtree(run / "checkpoints" / str(step))


@pytest.fixture
def without_locks(monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_what_is_being_read_is_removed_later(run):
    with step_folders.in_use(run / "checkpoints", [1, 3]) as are_there:
        assert are_there
        save(run, 4, keep_last=1)
        assert entries(run) == ["1", "3", "4"]
        assert restore_params(run, 1)[0] == 1
    save(run, 5, keep_last=1)
    assert entries(run) == ["5"]


def test_without_locks_checkpoints_are_removed_at_once(run, without_locks):
    with step_folders.in_use(run / "checkpoints", [1]) as is_there:
        assert is_there
        save(run, 4, keep_last=1)
    assert entries(run) == ["4"]


def restore_step(run):
    return step_folders.choose(run / "checkpoints", "last")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from flaxformer_mt import atomic
    from flaxformer_mt.runs import step_folders

    folder = Path(sys.argv[1])
    atomic._exchange = lambda *names: False
    with atomic.workspace(folder) as workspace:
        partial = workspace / "3"
        (partial / "params").mkdir(parents=True)
        (partial / "params" / "new").touch()
        atomic.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        step_folders.atomic.write_text = lambda path, text: path.write_text(text)
        step_folders.commit(folder, partial, step_folders.make_record("loss", {}, {}, None))
"""


def test_a_kill_between_the_two_renamings_of_a_commit_loses_nothing(run):
    folder = run / "checkpoints"
    for step in (1, 2):
        remove(run, step)
    script = [sys.executable, "-c", textwrap.dedent(KILLED), folder]
    assert subprocess.run(script, check=False).returncode == -signal.SIGKILL
    assert step_folders.steps_in(folder) == []
    assert restore_step(run) == 3
    assert entries(run) == ["3"]
    assert damage(folder / "3") is None
    assert (folder / "3" / "params" / "new").exists()


def test_a_checkpoint_of_the_same_step_is_exchanged(run):
    save(run, 3)
    assert entries(run) == ["1", "2", "3"]
    assert damage(run / "checkpoints" / "3") is None


def then_remove(monkeypatch, module, name, action):
    """Lets the first call of a function be followed by an action of another process."""
    function, calls = getattr(module, name), []

    def called(*arguments):
        result = function(*arguments)
        calls.append(result)
        if len(calls) == 1:
            action()
        return result

    monkeypatch.setattr(module, name, called)
    return calls


@pytest.mark.parametrize(("which", "first", "then"), [("last", 3, 2), ("best", 3, 2), (3, 3, None)])
def test_a_checkpoint_that_is_removed_after_it_was_chosen(run, monkeypatch, which, first, then):
    chosen = then_remove(monkeypatch, step_folders, "choose", lambda: remove(run, first))
    if then is None:
        with pytest.raises(UserError, match=r"no checkpoint of step 3, only of 1, 2$"):
            restore_params(run, which)
        return
    step, params = restore_params(run, which)
    assert chosen == [first, step] == [first, then]
    chex.assert_trees_all_equal(params, make_state(then).params)


def test_a_checkpoint_that_is_removed_while_it_is_read(run, monkeypatch, without_locks):
    restore, steps = checkpoint._restore_params, []

    def interrupted(path, *arguments):
        steps.append(int(path.name))
        if len(steps) == 1:
            shutil.rmtree(path)
        return restore(path, *arguments)

    monkeypatch.setattr(checkpoint, "_restore_params", interrupted)
    assert restore_params(run, "last")[0] == 2
    assert steps == [3, 2]


def test_an_average_is_of_the_checkpoints_that_it_names(run, monkeypatch, tmp_path):
    found = then_remove(monkeypatch, averaging, "whole_checkpoints", lambda: remove(run, 2))
    steps = average_run(run, tmp_path / "average", 2, "last", pytest.fail)
    assert [sorted(scores) for scores in found] == [[1, 2, 3], [1, 3]]
    assert steps == [1, 3]
    chex.assert_trees_all_close(
        restore_params(tmp_path / "average")[1],
        jax.tree.map(lambda *leaves: np.mean(leaves, 0), *(make_state(s).params for s in steps)),
    )


def test_an_average_keeps_its_checkpoints_from_being_removed(run, monkeypatch, tmp_path):
    average = averaging.average

    def average_while_training_goes_on(folder, steps):
        save(folder, 4, keep_last=1)
        return average(folder, steps)

    monkeypatch.setattr(averaging, "average", average_while_training_goes_on)
    assert average_run(run, tmp_path / "average", 3, "last", pytest.fail) == [1, 2, 3]


def test_checkpoints_on_another_disk(run, tmp_path):
    """The folder of all is a link, and one of them as well; its target is not ours to remove."""
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "2").rename(tmp_path / "2")
    (tmp_path / "disk" / "2").symlink_to(tmp_path / "2")
    assert restore_params(run, 2)[0] == 2
    assert average_run(run, tmp_path / "average", 3, "last", pytest.fail) == [1, 2, 3]
    save(run, 4, keep_last=1)
    assert entries(run) == ["4"]
    assert (run / "checkpoints").is_symlink()
    assert (tmp_path / "2" / "manifest.json").exists()


def foreign(path):
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("years of work")
    return path


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("name", ["4.partial", "0.partial", "7", "x.partial", "007", "3.damaged"])
def test_what_is_not_a_checkpoint_is_never_deleted(run, tmp_path, name, is_link):
    path = run / "checkpoints" / name
    there = foreign(tmp_path / "elsewhere" if is_link else path)
    if is_link:
        path.symlink_to(there)
    (run / "checkpoints" / "3" / "manifest.json").unlink()
    lines = []
    with Checkpoints(run, keep_last=1, announce=lines.append) as checkpointer:
        assert checkpointer.latest_step() == 2
        for step in (3, 4, 7):
            checkpointer.save(step, make_state(step))
    assert restore_params(run, "last")[0] == 7
    kept = path.with_name("7.damaged") if name == "7" else path
    assert (kept / "thesis.txt").read_text() == "years of work"
    assert kept.is_symlink() == is_link
    assert len(lines) == (2 if name == "7" else 1)
    aside = "3.damaged-2" if name == "3.damaged" else "3.damaged"
    assert os.path.isdir(run / "checkpoints" / aside / "params")


def test_a_file_with_the_name_of_a_checkpoint(run):
    (run / "checkpoints" / "4").write_text("years of work")
    with (
        pytest.raises(UserError, match=r"checkpoint of step 4 could not be written"),
        Checkpoints(run) as checkpointer,
    ):
        checkpointer.save(4, make_state(4))
    assert (run / "checkpoints" / "4").read_text() == "years of work"
    assert entries(run) == ["1", "2", "3", "4"]
