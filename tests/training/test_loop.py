"""The loop: what it writes, that it goes on exactly where it stopped, when it refuses to."""

import dataclasses
import json
import math

import chex
import jax
import jax.numpy as jnp
import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.checkpoint import Checkpointer, restore_params
from flaxformer_mt.training.loop import train
from flaxformer_mt.training.metrics import JsonLinesWriter, validate
from flaxformer_mt.training.parallel import Compiled


def run(tiny, folder, num_steps=6, batches=None, train_step=None):
    """Trains the tiny experiment in a folder and returns the last state."""
    config = tiny.experiment.train
    valid = [tiny.placed_batch(1000)]
    with Checkpointer(folder, config.keep_last, config.keep_best) as checkpointer:
        return train(
            tiny.state(),
            train_step=train_step or tiny.train_step,
            batches=batches or tiny.placed_batch,
            evaluate=lambda params, step: validate(tiny.eval_step, params, valid),
            schedule=tiny.schedule,
            checkpointer=checkpointer,
            writers=[JsonLinesWriter(folder / "metrics.jsonl")],
            config=dataclasses.replace(config, num_steps=num_steps),
        )


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_a_run_that_was_stopped_goes_on_exactly(setup, tmp_path, strategy):
    # With dropout, random numbers have to go on as well.
    tiny = setup.of(strategy, 2, bigram=True, model={"dropout_rate": 0.1})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()

    def power_cut(step):
        if step == 5:  # four steps are done, the checkpoint of the third is the newest
            raise KeyboardInterrupt
        return tiny.placed_batch(step)

    with pytest.raises(KeyboardInterrupt):
        run(tiny, stopped, batches=power_cut)
    assert [line["step"] for line in lines_of(stopped)] == [2, 3, 4]
    asked = []

    def remembered(step):
        asked.append(step)
        return tiny.placed_batch(step)

    states = jax.device_get([run(tiny, whole), run(tiny, stopped, batches=remembered)])
    chex.assert_trees_all_equal(*states)
    assert asked == [3, 4, 5]
    assert [line["step"] for line in lines_of(stopped)] == [2, 3, 4, 6, 6]
    assert lines_of(stopped)[-1] == lines_of(whole)[-1]
    assert restore_params(stopped, "last")[0] == 6


def test_a_run_may_change_devices_and_strategy_when_it_goes_on(setup, tmp_path):
    first, second = setup.of("mesh", 8), setup.of("pmap", 2)
    run(first, tmp_path, num_steps=3)
    moved = run(second, tmp_path, num_steps=6)
    (tmp_path / "alone").mkdir()
    unmoved = run(setup.of(), tmp_path / "alone", num_steps=6)
    chex.assert_trees_all_close(
        jax.device_get(moved.params), jax.device_get(unmoved.params), atol=1e-5, rtol=0
    )


def test_lines_of_figures(setup, tmp_path):
    tiny = setup.of(bigram=True)
    run(tiny, tmp_path)
    lines = lines_of(tmp_path)
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"), (3, "valid"), (4, "train"), (6, "train"), (6, "valid"),
    ]  # fmt: skip
    for line in lines:
        assert 0 < line["loss"] < 5
        assert 0 <= line["accuracy"] <= 1
        if line["split"] == "valid":
            assert line["perplexity"] == pytest.approx(math.exp(line["cross_entropy"]))
            continue
        assert line["compilations"] == 1
        assert line["target_tokens_per_second"] > 0
        assert line["gradient_norm"] > 0
        assert 0 < line["padding_fraction"] < 1
        # The rate of the update that ended the step: t is the step.
        rate = 1e-2 * min(line["step"] / 4, math.sqrt(4 / line["step"]))
        assert line["learning_rate"] == pytest.approx(rate)


def test_a_finished_run_is_left_alone(setup, tmp_path):
    tiny = setup.of(bigram=True)
    state = jax.device_get(run(tiny, tmp_path))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")}
    before = (tmp_path / "metrics.jsonl").read_text()
    again = run(tiny, tmp_path, batches=lambda step: pytest.fail("no batch is needed"))
    chex.assert_trees_all_equal(jax.device_get(again), state)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert files == {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("spoiled", ["loss", "gradient_norm"])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run(setup, tmp_path, spoiled):
    tiny = setup.of(bigram=True)

    def spoil(state, batch):
        state, metrics = tiny.pure_train_step(state, batch)
        value, weight = metrics[spoiled]
        return state, metrics | {spoiled: (jnp.where(state.step == 5, jnp.nan, value), weight)}

    with pytest.raises(UserError, match=rf"^{spoiled} is nan at step 5: .*learning_rate"):
        run(tiny, tmp_path, train_step=Compiled(spoil, jax.jit))
    assert restore_params(tmp_path, "last")[0] == 3
    assert lines_of(tmp_path)[-1]["step"] == 4
