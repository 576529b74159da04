"""Commands that read a run while it is being trained, with a checkpoint after every step."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from talker import make_talker

from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.runs.averaging import average_run
from flaxformer_mt.runs.checkpoint import Checkpointer, restore_params
from flaxformer_mt.runs.folder import write_run
from flaxformer_mt.runs.trained_model import describe_run
from flaxformer_mt.training.state import TrainState

KEPT = 3


def params_of(talker, step):
    """The parameters that "training" has after a step."""
    return jax.tree.map(lambda leaf: np.float32(leaf * (1 + step / 100)), talker.params)


def train(talker, run, stopped, started):
    """Saves a checkpoint after every step; the best one changes as well."""
    step = 0
    with Checkpointer(run, keep_last=KEPT, keep_best=2, announce=pytest.fail) as checkpointer:
        while not stopped.is_set():
            step += 1
            state = TrainState(
                jnp.int32(step), params_of(talker, step), (), jnp.zeros(2, jnp.uint32), None
            )
            checkpointer.save(step, state, metrics={"loss": abs(step % 7 - 3) + 1 / step})
            if step == 2 * KEPT:
                started.set()
    return step


def translate(run, output):
    Translator.from_run(run)


def inspect(run, output):
    describe_run(run)


def average(run, output):
    return average_run(run, output, KEPT, "last", announce=pytest.fail)


@pytest.mark.parametrize(
    ("readers", "seconds"),
    [
        (3, 1.5),
        pytest.param(10, 120, marks=pytest.mark.slow),  # Decided by tests/runs.
    ],
)
def test_readers_never_fail_while_a_run_is_trained(tmp_path, readers, seconds):
    talker = make_talker()
    run = tmp_path / "run"
    write_run(run, talker.config, {}, talker.tokenizers)
    stopped, started = threading.Event(), threading.Event()
    averages = {}

    def read(number):
        command = (average, translate, inspect)[number % 3]
        started.wait(60)
        repetition = 0
        while not stopped.is_set():
            output = tmp_path / f"{number}-{repetition}"
            result = command(run, output)
            if command is average:
                averages[output] = result
            repetition += 1
        return repetition

    with ThreadPoolExecutor(readers + 1) as pool, contextlib.ExitStack() as stack:
        stack.callback(stopped.set)
        training = pool.submit(train, talker, run, stopped, started)
        readings = [pool.submit(read, number) for number in range(readers)]
        assert started.wait(60)
        time.sleep(seconds)
        stopped.set()
        steps = training.result()
        counts = [reading.result() for reading in readings]
    print(f"{steps} steps, {sum(counts)} readings, {len(averages)} averages")
    assert steps > 2 * KEPT + 1
    assert averages
    for output, of in averages.items():
        leaves = [params_of(talker, step) for step in of]
        mean = jax.tree.map(
            lambda *parts: np.mean([np.float64(part) for part in parts], 0).astype(np.float32),
            *leaves,
        )
        chex.assert_trees_all_equal(restore_params(output)[1], mean)
