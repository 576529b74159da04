"""Lookups and their gradients: those of the plain formula, in an order that does not change."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.model import lookup
from flaxformer_mt.model.lookup import look_up, look_up_positions
from flaxformer_mt.training.devices import make_mesh
from flaxformer_mt.training.sharding import ACTIVATION_RULES

sum_by_token = jax.jit(lookup.sum_by_token, static_argnums=(2, 3))


def batch(number, size, width=8, most=None):
    rng = np.random.default_rng(number)
    tokens = rng.integers(-1, most or size + 2, number).astype(np.int32)
    return rng.normal(size=(number, width)).astype(np.float32), tokens


def expected(vectors, tokens, size):
    sums = np.zeros((size, vectors.shape[1]))
    known = (tokens >= 0) & (tokens < size)
    np.add.at(sums, tokens[known], vectors[known])
    return sums


@pytest.mark.parametrize(
    ("number", "size", "most"),
    [(1, 5, 5), (257, 3, 1), (1000, 50, 60), (300, 2000, 2000)],
)
def test_sums_are_those_of_each_token(number, size, most):
    vectors, tokens = batch(number, size, most=most)
    sums = sum_by_token(jnp.asarray(vectors), jnp.asarray(tokens), size, jnp.dtype("float32"))
    np.testing.assert_allclose(sums, expected(vectors, tokens, size), atol=1e-4)


def test_the_order_of_a_batch_changes_no_bit_of_a_sum_of_two():
    vectors, tokens = batch(2 * 300, 300)
    tokens = np.repeat(np.arange(300, dtype=np.int32), 2)
    first = None
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(tokens))
        sums = sum_by_token(
            jnp.asarray(vectors[order]), jnp.asarray(tokens[order]), 300, jnp.dtype("float32")
        )
        first = sums if first is None else first
        chex.assert_trees_all_equal(sums, first)


def test_vectors_of_bfloat16_are_added_in_float32():
    vectors, tokens = batch(1025, 4, most=2)
    vectors = jnp.asarray(vectors, jnp.bfloat16)
    sums = sum_by_token(vectors, jnp.asarray(tokens), 4, jnp.dtype("float32"))
    assert sums.dtype == jnp.float32
    exact = expected(np.asarray(vectors, np.float64), tokens, 4)
    np.testing.assert_allclose(sums, exact, atol=1e-3)


@pytest.mark.parametrize("sizes", [None, {"fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("function", [look_up, look_up_positions])
def test_the_gradient_is_that_of_a_lookup_wherever_the_table_is(monkeypatch, function, sizes):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(48, 16)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 48, (16, 10)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(16, 10, 16)), jnp.float32)

    def gradient(table, tokens, weights):
        def loss(table):
            return jnp.sum(function(table, tokens, jnp.dtype("float32")) * weights)

        return jax.grad(loss)(table)

    plain = jax.jit(gradient)(table, tokens, weights)
    monkeypatch.setattr(lookup, "mesh_platform", lambda: "gpu")
    if sizes is None:
        ordered = jax.jit(lambda *arrays: gradient(*arrays))(table, tokens, weights)
    else:
        mesh = make_mesh(**sizes)
        everywhere = NamedSharding(mesh, PartitionSpec())
        rules = nn.logical_axis_rules(ACTIVATION_RULES)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), rules:
            on_mesh = jax.jit(gradient, in_shardings=everywhere, out_shardings=everywhere)
            ordered = on_mesh(table, tokens, weights)
    chex.assert_trees_all_close(ordered, plain, atol=1e-5)
