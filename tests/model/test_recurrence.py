"""The simple recurrent unit, against its equation as a loop."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.recurrence import SSRU

BATCH, LENGTH = 3, 11
STARTS = jnp.arange(LENGTH) % np.array([[LENGTH], [4], [7]]) == 0


def example(dtype="float32"):
    """A unit of that dtype with random parameters, and inputs [B, T, D]."""
    unit = SSRU(TransformerConfig(d_model=6, num_heads=1, dtype=dtype, param_dtype=dtype))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, 6)), dtype)
    shapes = jax.eval_shape(unit.init, jax.random.key(0), x, None)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), dtype), shapes)
    return unit, params, x


def loop(params, x, starts):
    """The equation, number by number."""
    arrays = flatten_dict(jax.tree.map(np.asarray, params["params"]), sep="/")
    outputs = np.zeros_like(x)
    for row in range(len(x)):
        memory = np.zeros(x.shape[-1])
        for t, vector in enumerate(np.asarray(x[row])):
            gate = vector @ arrays["forget/kernel"] + arrays["forget/bias"]
            forget = 1 / (1 + np.exp(-gate))
            memory = np.zeros_like(memory) if starts[row, t] else memory
            memory = forget * memory + (1 - forget) * (vector @ arrays["candidate/kernel"])
            outputs[row, t] = np.maximum(memory, 0)
    return outputs


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("starts", [None, STARTS], ids=["one sentence a row", "packed"])
def test_a_whole_target_is_the_loop(starts):
    unit, params, x = example("float64")
    outputs = jax.jit(unit.apply)(params, x, starts)
    first = np.arange(LENGTH)[None].repeat(BATCH, 0) == 0
    expected = loop(params, x, first if starts is None else starts)
    assert 0.2 < np.mean(expected == 0) < 0.8
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-12)


def test_a_step_goes_on_from_the_memory_and_forgets_it_at_position_0():
    unit, params, x = example()
    expected = loop(params, x, STARTS)
    step = jax.jit(functools.partial(unit.apply, method="step"))
    memory = jnp.full((BATCH, 1, 6), jnp.nan)  # What another sentence has left there.
    positions = np.arange(LENGTH) % np.array([[LENGTH], [4], [7]])
    for t in range(LENGTH):
        outputs, memory = step(params, x[:, t, None], memory, jnp.asarray(positions[:, t]))
        np.testing.assert_allclose(outputs[:, 0], expected[:, t], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("float64")
def test_gradients_are_those_of_the_loop():
    unit, params, x = example("float64")
    weights = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

    def loss(params, x):
        return jnp.sum(weights * unit.apply(params, x, STARTS))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    chex.assert_tree_all_finite(gradients)
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), (params, x))
    values = []
    for distance in (1e-6, -1e-6):
        moved = jax.tree.map(lambda a, b, d=distance: a + d * b, (params, x), direction)
        values.append(np.sum(np.asarray(weights) * loop(*moved, STARTS)))
    along = optax.tree.vdot(gradients, direction)
    assert along == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)
