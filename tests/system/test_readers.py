"""Commands that read a run while it is being trained, with a checkpoint after every step."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from talker import make_talker

from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.runs.averaging import average_run
from flaxformer_mt.runs.checkpoint import Checkpoints, restore_params
from flaxformer_mt.runs.folder import write_run
from flaxformer_mt.trained_model import describe_run
from flaxformer_mt.training.state import TrainState

KEPT, READERS, READINGS = 3, 10, 10


def params_of(talker, step):
    """The parameters that "training" has after a step."""
    return jax.tree.map(lambda leaf: np.float32(leaf * (1 + step / 100)), talker.params)


def save(checkpointer, talker, step):
    """Saves the checkpoint of a step; the best one changes now and then."""
    state = TrainState(jnp.int32(step), params_of(talker, step), ())
    checkpointer.save(step, state, metrics={"loss": abs(step % 7 - 3) + 1 / step})


def translate(run, output):
    Translator.from_run(run)


def inspect(run, output):
    describe_run(run)


def average(run, output):
    return average_run(run, output, KEPT, "last", announce=pytest.fail)


def read(number, run, outputs):
    """Runs a command again and again, in a process of its own; returns all results by output."""
    command = (average, translate, inspect)[number % 3]
    results = {}
    for reading in range(READINGS):
        output = outputs / f"{number}-{reading}"
        results[output] = command(run, output)
    return results


@pytest.mark.slow  # Decided by tests/runs/test_step_folders.py.
def test_readers_never_fail_while_a_run_is_trained(tmp_path):
    talker = make_talker()
    run = tmp_path / "run"
    write_run(run, talker.config, talker.tokenizers.files, {})
    steps = KEPT
    with Checkpoints(run, keep_last=KEPT, announce=pytest.fail) as checkpointer:
        for step in range(1, KEPT + 1):
            save(checkpointer, talker, step)
    context = multiprocessing.get_context("spawn")  # JAX cannot be forked.
    with ProcessPoolExecutor(READERS, context) as pool:
        readings = [pool.submit(read, number, run, tmp_path) for number in range(READERS)]
        with Checkpoints(run, keep_last=KEPT, keep_best=2, announce=pytest.fail) as checkpointer:
            while not all(reading.done() for reading in readings):
                steps += 1
                save(checkpointer, talker, steps)
        results = {}
        for reading in readings:
            results |= reading.result()
    averages = {output: steps for output, steps in results.items() if steps}
    print(f"{steps} steps, {len(results)} readings, {len(averages)} averages")
    for output, averaged in averages.items():
        mean = jax.tree.map(
            lambda *parts: np.mean([np.float64(part) for part in parts], 0).astype(np.float32),
            *(params_of(talker, step) for step in averaged),
        )
        chex.assert_trees_all_equal(restore_params(output)[1], mean)
