"""The same training on any number of devices, under either strategy, in any number of parts."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.parallel import on_one_device


def ten_steps(tiny):
    """Loss of each step, first moment of the first gradient, parameters at the end."""
    state, losses, first_moment = tiny.state(), [], None
    for number in range(10):
        state, metrics = tiny.train_step(state, tiny.placed_batch(number))
        losses.append(metrics["loss"][0] / metrics["loss"][1])
        if number == 0:
            first_moment = jax.device_get(optax.tree.get(state.opt_state, "mu"))
    assert tiny.train_step.compilations == 1
    return jax.device_get((losses, first_moment, state.params))


@pytest.fixture(scope="module")
def on_one():
    """A function that gives what all others have to agree with."""
    return functools.cache(lambda setup: ten_steps(setup.of()))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_losses_gradients_and_parameters_agree(setup, on_one, strategy, num_devices, parts):
    results = ten_steps(setup.of(strategy, num_devices, accumulation_steps=parts))
    chex.assert_trees_all_close(results, on_one(setup), atol=1e-5, rtol=0)
    chex.assert_trees_all_equal_dtypes(results, on_one(setup))


@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_every_device_has_its_rows_and_the_whole_state(setup, strategy):
    tiny = setup.of(strategy, 8)
    state = tiny.state()
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state))
    single = on_one_device(state)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(single))
    chex.assert_trees_all_equal(jax.device_get(single), jax.device_get(state))

    rows = tiny.batch(0).decoder_target_tokens
    placed = tiny.placed_batch(0).decoder_target_tokens
    shards = sorted(placed.addressable_shards, key=lambda shard: shard.device.id)
    assert len(shards) == 8
    for shard, expected in zip(shards, np.split(rows, 8), strict=True):
        np.testing.assert_array_equal(np.reshape(shard.data, expected.shape), expected)


@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_a_step_donates_the_placed_state_and_nothing_else(setup, strategy):
    tiny = setup.of(strategy, 8)
    given = on_one_device(tiny.state())
    placed = tiny.strategy.place_state(given)
    tiny.train_step(placed, tiny.placed_batch(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_validation_agrees_with_one_device(setup, strategy):
    one, eight = (
        jax.device_get(tiny.eval_step(tiny.state().params, tiny.placed_batch(0)))
        for tiny in (setup.of(strategy), setup.of(strategy, 8))
    )
    chex.assert_trees_all_close(one, eight, rtol=1e-5)


def test_rows_that_cannot_be_shared_out(setup):
    with pytest.raises(UserError, match=r"32 rows .* 8 devices .* 3 parts .* multiple of 192"):
        _ = setup.of(num_devices=8, accumulation_steps=3).strategy


def test_more_devices_than_there_are(setup):
    with pytest.raises(UserError, match=r"parallel\.num_devices=99"):
        _ = setup.of(num_devices=99).strategy
