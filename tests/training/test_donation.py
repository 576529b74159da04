"""The memory of a state that a step is given: all of it is used again, and none of it twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flaxformer_mt as fmt
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.devices import abstract

OPTIMIZER = optax.sgd(1e-3, momentum=0.9)


def init(key):
    params = {
        f"layer_{number}": {
            "kernel": jax.random.normal(jax.random.fold_in(key, number), (64, 128)),
            "bias": jnp.zeros(128),
            "scale": jnp.ones(7),
        }
        for number in range(4)
    }
    return with_optimizer(params)


def with_optimizer(params):
    # Copies: two names of one array become two buffers only if they are computed apart.
    ema = jax.tree.map(lambda leaf: leaf * 1.0, params)
    return {"params": params, "ema": ema, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}


def update(state, batch, key, frozen):
    gradient = jax.tree.map(lambda leaf: leaf * 0.1 + batch.mean(), state["params"])
    updates, opt = OPTIMIZER.update(gradient, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["ema"], params)
    return {"params": params, "ema": ema, "opt": opt, "step": state["step"] + 1}, batch.sum()


def mesh_of(devices):
    return fmt.make_mesh(fsdp=devices, devices=jax.devices()[:devices])


def batch_on(mesh):
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    return jax.device_put(np.ones((8, 4), np.float32), rows)


def buffers(state):
    return {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
    }


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("source", ["created", "placed", "restored", "restored from a template"])
def test_the_first_step_uses_all_of_the_memory_again(tmp_path, source, devices):
    mesh = mesh_of(devices)
    state = fmt.create(init, mesh, seed=0)
    if source == "placed":
        state = fmt.place(jax.device_get(state), mesh)
    elif source.startswith("restored"):
        with fmt.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            template = (
                state if source == "restored" else abstract(jax.eval_shape(lambda: state), mesh)
            )
            state, _ = checkpoints.restore_or(template, {})
    step = fmt.compile_step(update, mesh)
    for _ in range(2):
        before = buffers(state)
        state, _ = step(state, batch_on(mesh))
        after = buffers(state)
        reused = sum(size for buffer, size in after.items() if buffer in before)
        assert reused == sum(after.values())


def alias(array):
    """Another array of JAX in the same memory."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("copy", [lambda leaf: leaf, alias], ids=["itself", "an alias"])
def test_an_array_with_two_names_in_a_state_is_refused(devices, copy):
    mesh = mesh_of(devices)
    state = fmt.create(init, mesh, seed=0)
    step = fmt.compile_step(update, mesh)
    shared = state | {"ema": jax.tree.map(copy, state["params"])}
    message = r"ema/layer_0/bias and params/layer_0/bias are the same array in memory.*jnp\.copy"
    with pytest.raises(UserError, match=message):
        step(shared, batch_on(mesh))
    # Nothing was donated, and a copy is another array.
    state, _ = step(shared | {"ema": jax.tree.map(jnp.copy, state["params"])}, batch_on(mesh))
    with pytest.raises(UserError, match="ema/layer_0/bias and params/layer_0/bias"):
        step(state | {"ema": state["params"]}, batch_on(mesh))
    assert int(step(state, batch_on(mesh))[0]["step"]) == 2


def test_an_array_of_a_state_in_the_batch_or_in_what_is_frozen_is_refused():
    mesh = mesh_of(4)
    state = fmt.create(init, mesh, seed=0)
    step = fmt.compile_step(update, mesh, frozen={"teacher": state["params"]})
    with pytest.raises(UserError, match="params/layer_0/bias and frozen/teacher/layer_0/bias are"):
        step(state, batch_on(mesh))
    state["rows"] = batch_on(mesh)
    with pytest.raises(UserError, match="rows and batch are the same array"):
        fmt.compile_step(update, mesh)(state, state["rows"])
