"""The same training on any number of devices, under either strategy, in any number of parts."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax import monitoring
from tiny_setup import DROPOUT, results

from flaxformer_mt.data.stream.batches import Shard
from flaxformer_mt.data.stream.placement import own_shard
from flaxformer_mt.decoding.parameters import on_one_device
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.devices import place

SLOW = pytest.mark.slow
MESHES = {
    "data": {},
    "fsdp": {"fsdp": 8},
    "data x fsdp": {"fsdp": 4},
    "data x tensor": {"tensor": 2},
    "fsdp x tensor": {"fsdp": 4, "tensor": 2},
    "data x fsdp x tensor": {"fsdp": 2, "tensor": 2},
}


@pytest.fixture(scope="module")
def on_one():
    """A function that gives what all others have to agree with."""
    return functools.cache(results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "parts"),
    [*((mesh, 1) for mesh in MESHES), ("data", 2), ("fsdp x tensor", 2)],
)
def test_any_mesh_agrees_with_one_device(setup, on_one, mesh, parts):
    """With dropout, whose masks depend on the row and not on the device that has it."""
    of = functools.partial(setup.of, model=DROPOUT, accumulation_steps=parts)
    on_eight = results(of(num_devices=8, parallel=MESHES[mesh]), 20)
    chex.assert_trees_all_close(on_eight, on_one(of(), 20), atol=1e-5, rtol=0)
    chex.assert_trees_all_equal_dtypes(on_eight, on_one(of(), 20))


@pytest.mark.parametrize(("num_devices", "parts"), [pytest.param(1, 4, marks=SLOW), (8, 1)])
@pytest.mark.parametrize("bigram", [True, pytest.param(False, marks=SLOW)])
def test_pmap_agrees_with_one_device(setup, on_one, num_devices, parts, bigram):
    on_many = results(setup.of("pmap", num_devices, bigram=bigram, accumulation_steps=parts), 10)
    expected = on_one(setup.of(bigram=bigram), 10)
    chex.assert_trees_all_close(on_many, expected, atol=1e-5, rtol=0)


@pytest.mark.slow_except("mesh")
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_every_device_has_its_rows_and_the_whole_state(setup, strategy):
    tiny = setup.of(strategy, 8, bigram=True)
    state = tiny.state()
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state))
    assert own_shard(tiny.devices.mesh) == Shard(0, 1)

    rows = tiny.batch(0).decoder_target_tokens
    placed = tiny.placed_batch(0).decoder_target_tokens
    shards = sorted(placed.addressable_shards, key=lambda shard: shard.device.id)
    assert len(shards) == 8
    for shard, expected in zip(shards, np.split(rows, 8), strict=True):
        np.testing.assert_array_equal(np.reshape(shard.data, expected.shape), expected)


@pytest.mark.slow_except("data x fsdp x tensor")
@pytest.mark.parametrize("mesh", ["data", "data x fsdp x tensor"])
def test_gathered_parameters_are_whole_on_one_device(setup, mesh):
    tiny = setup.of(num_devices=8, parallel=MESHES[mesh])
    params = tiny.state().params
    single = on_one_device(params)
    assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(single))
    chex.assert_trees_all_equal(jax.device_get(single), jax.device_get(params))


@pytest.mark.slow_except("mesh")
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_a_step_donates_the_placed_state_and_nothing_else(setup, strategy):
    tiny = setup.of(strategy, 8, bigram=True)
    given = on_one_device(tiny.state())
    placed = place(given, tiny.devices.mesh)
    before = jax.tree.map(np.array, given)
    tiny.train_step(placed, tiny.placed_batch(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed.params))
    chex.assert_trees_all_equal(jax.device_get(given), before)


@pytest.mark.slow_except("mesh")
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_validation_agrees_with_one_device(setup, strategy):
    one, eight = (
        jax.device_get(tiny.eval_step(tiny.state().params, tiny.placed_batch(0)))
        for tiny in (setup.of(strategy, bigram=True), setup.of(strategy, 8, bigram=True))
    )
    chex.assert_trees_all_close(one, eight, rtol=1e-5)


@pytest.mark.slow_except("mesh")
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_as_many_compilations_as_declared_shapes_and_no_more(setup, strategy):
    tiny = setup.of(strategy, 2, bigram=True)
    step = tiny.devices.compile_train_step(tiny.pure_train_step, seed=0, max_shapes=2)
    batches = [tiny.batch(number) for number in range(4)]
    short = [jax.tree.map(lambda rows: rows[:, :4], batch) for batch in batches]
    state = tiny.state()
    for batch in [batches[0], short[0]]:
        state, _ = step(state, tiny.devices.place_batch(batch))
    assert len(step.batch_shapes) == 2

    compiled = []
    monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        for batch in [*batches, *short]:
            state, _ = step(state, tiny.devices.place_batch(batch))
        assert not compiled
        assert len(step.batch_shapes) == 2
        odd = jax.tree.map(lambda rows: rows[:, :5], batches[0])
        with pytest.raises(UserError, match=r"shape \[\d+, 5\] .* 2 shapes .* 8\]; \[\d+, 4\]"):
            step(state, tiny.devices.place_batch(odd))
        assert not compiled
    finally:
        monitoring.clear_event_listeners()


def test_rows_that_cannot_be_shared_out(setup):
    tiny = setup.of(num_devices=8)
    with pytest.raises(UserError, match=r"13 rows .* 8 devices"):
        tiny.devices.place_batch(jax.tree.map(lambda rows: rows[:13], tiny.batch(0)))
