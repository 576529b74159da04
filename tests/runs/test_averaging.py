"""Averaging of checkpoints: selection, mean, and the run folder written."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.cli import main
from flaxformer_mt.runs.averaging import average_run
from flaxformer_mt.runs.checkpoint import Checkpoints, restore_params
from flaxformer_mt.training.state import TrainState


def make_state(step, with_ema=False):
    params = {
        "kernel": jax.random.normal(jax.random.key(step), (4, 3)),
        "bias": jnp.full(3, step, jnp.bfloat16),
    }
    return TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=(),
        ema=jax.tree.map(lambda leaf: leaf + 1, params) if with_ema else None,
    )


def make_run(folder, with_ema=False, losses=((1, 3.0), (2, 1.0), (3, 2.0), (4, None))):
    """A run folder with four checkpoints, the last of which was not validated."""
    with Checkpoints(folder, keep_last=10) as checkpointer:
        for step, loss in losses:
            metrics = {"loss": loss} if loss else None
            checkpointer.save(step, make_state(step, with_ema), metrics=metrics)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "source.model").write_text("pieces")
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def mean(*trees):
    return jax.tree.map(
        lambda *leaves: np.mean([np.asarray(leaf, np.float64) for leaf in leaves], axis=0).astype(
            leaves[0].dtype
        ),
        *trees,
    )


@pytest.mark.parametrize(
    ("which", "count", "steps"),
    [("last", 2, [3, 4]), ("last", 4, [1, 2, 3, 4]), ("best", 2, [2, 3]), ("best", 1, [2])],
)
def test_the_mean_of_the_right_checkpoints(run, which, count, steps):
    output = run / "averaged"
    assert average_run(run, output, count, which) == steps
    step, params = restore_params(output)
    assert step == max(steps)
    chex.assert_trees_all_equal(params, mean(*(make_state(step).params for step in steps)))
    chex.assert_trees_all_equal_dtypes(params, make_state(1).params)
    assert {path.name for path in output.iterdir()} == {
        "checkpoints", "config.json", "tokenizer",
    }  # fmt: skip
    assert (output / "tokenizer" / "source.model").read_text() == "pieces"


def test_where_there_is_a_moving_average_it_is_averaged(tmp_path):
    run = make_run(tmp_path / "run", with_ema=True)
    average_run(run, tmp_path / "output", 2, "last")
    chex.assert_trees_all_equal(
        restore_params(tmp_path / "output")[1],
        mean(*(make_state(step, with_ema=True).ema for step in (3, 4))),
    )


def test_a_damaged_checkpoint_is_left_out_and_told(run, tmp_path):
    (run / "checkpoints" / "3" / "manifest.json").unlink()
    lines = []
    assert average_run(run, tmp_path / "output", 3, "last", lines.append) == [1, 2, 4]
    (line,) = lines
    assert "checkpoints/3 is damaged: manifest.json is missing" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--last", "5"], "holds 4 intact checkpoints, fewer than --last 5: .*train.keep_last=5"),
        (
            ["--best", "4"],
            "holds 3 validated checkpoints, fewer than --best 4: .*train.keep_best=4",
        ),
        (["--last", "0"], "must be at least 1"),
        (["--last", "1", "--best", "1"], "give --last or --best"),
        ([], "give --last or --best"),
    ],
)
def test_what_the_command_refuses(run, capsys, arguments, message):
    assert main(["average", "--run", str(run), *arguments]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert not list(run.glob("averaged*"))


def test_what_exists_is_not_written_over(run, capsys):
    command = ["average", "--run", str(run), "--last", "2"]
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("averaged: the mean of the checkpoints of steps 3, 4\n")
    assert main(command) == 1
    assert "averaged exists: remove it, or give another output" in capsys.readouterr().err
