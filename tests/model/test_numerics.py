"""Linear maps, sums and dropout against what they stand for."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from flaxformer_mt.model.linear import Dense
from flaxformer_mt.model.numerics import Dropout, column_sums, random_uint16


def test_a_linear_map_and_its_gradients_are_those_of_the_equation(float64):
    rng = np.random.default_rng(0)
    x, kernel, bias, cotangents = (rng.normal(size=s) for s in ((2, 3, 4), (4, 5), 5, (2, 3, 5)))
    dense = Dense(4, 5, dtype=jnp.float64, param_dtype=jnp.float64)

    def ours(x, kernel, bias):
        return jnp.sum(dense.apply({"params": {"kernel": kernel, "bias": bias}}, x) * cotangents)

    value, gradients = jax.value_and_grad(ours, (0, 1, 2))(x, kernel, bias)
    np.testing.assert_allclose(value, np.sum((x @ kernel + bias) * cotangents), rtol=1e-12)
    expected = (
        cotangents @ kernel.T,
        np.einsum("btd,btf->df", x, cotangents),
        cotangents.sum((0, 1)),
    )
    chex.assert_trees_all_close(gradients, expected, rtol=1e-12)


def test_column_sums_of_bfloat16_are_taken_in_float32():
    sums = column_sums(jnp.ones((1025, 3), jnp.bfloat16))  # bfloat16 cannot count beyond 256
    assert sums.dtype == jnp.float32
    np.testing.assert_array_equal(sums, 1025)


def test_gradients_of_float32_parameters_are_not_rounded_to_bfloat16():
    dense = Dense(1, 2, dtype=jnp.bfloat16)
    params = {"kernel": jnp.zeros((1, 2)), "bias": jnp.zeros(2)}
    x = jnp.ones((1025, 1), jnp.bfloat16)

    def total(params):
        return jnp.sum(dense.apply({"params": params}, x), dtype=jnp.float32)

    gradients = jax.grad(total)(params)
    chex.assert_trees_all_equal(
        gradients, {"kernel": jnp.full((1, 2), 1025.0), "bias": jnp.full(2, 1025.0)}
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dropout_keeps_the_mean(dtype):
    x = jnp.ones((64, 1001), dtype)
    y = Dropout(0.3).apply({}, x, False, rngs={"dropout": jax.random.key(0)})
    assert y.dtype == x.dtype
    share = np.mean(np.asarray(y) == 0)
    # Five standard deviations of a share of that many draws.
    assert abs(share - 0.3) < 5 * np.sqrt(0.3 * 0.7 / x.size)
    np.testing.assert_allclose(np.unique(y.astype(jnp.float32)), [0, 1 / 0.7], rtol=1e-2)
    np.testing.assert_array_equal(Dropout(0.3).apply({}, x, True), x)


def test_random_numbers_are_uniform_and_independent():
    draw = jax.jit(random_uint16, static_argnums=1)
    numbers = np.asarray(draw(jax.random.key(1), (256, 1024)))
    bits = np.unpackbits(numbers.view(np.uint8), axis=1).reshape((*numbers.shape, 16))
    share = bits.mean((0, 1))
    deviation = 0.5 / np.sqrt(numbers.size)
    assert np.abs(share - 0.5).max() < 5 * deviation
    # Every bit of a number, with every bit of the numbers next to it in any of both directions,
    # of one that comes from the same block, and of one drawn by another key.
    signs = 1 - 2.0 * bits
    other = 1 - 2.0 * np.unpackbits(
        np.asarray(draw(jax.random.key(2), (256, 1024))).view(np.uint8), axis=1
    ).reshape(signs.shape)
    for neighbour in (
        np.roll(signs, 1, 1), np.roll(signs, 1, 0), np.roll(signs, 512, 1), other,
    ):  # fmt: skip
        correlation = np.einsum("rci,rcj->ij", signs, neighbour) / numbers.size
        assert np.abs(correlation).max() < 5.5 / np.sqrt(numbers.size)
    values, counts = np.unique(numbers >> 6, return_counts=True)
    assert len(values) == 1024
    expected = numbers.size / 1024
    chi_squared = np.sum((counts - expected) ** 2 / expected)  # mean 1023, deviation 45
    assert abs(chi_squared - 1023) < 5 * 45


def test_random_numbers_do_not_depend_on_how_they_are_sharded():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    draw = jax.jit(random_uint16, static_argnums=1, out_shardings=rows)
    expected = random_uint16(jax.random.key(0), (16, 6))
    np.testing.assert_array_equal(draw(jax.random.key(0), (16, 6)), expected)
    np.testing.assert_array_equal(random_uint16(jax.random.key(0), (16, 8))[:, :3], expected[:, :3])


def test_random_numbers_of_the_default_generator_never_change():
    """A run that is continued with another version draws the same dropout masks."""
    numbers = random_uint16(jax.random.key(0), (2, 5))
    first, second = threefry_2x32(
        jax.random.key_data(jax.random.key(0)), jnp.array([0, 1, 2, 3, 0, 0, 0, 0], jnp.uint32)
    ).reshape(2, 2, 2)
    blocks = np.concatenate(
        [np.asarray(w).view(np.uint16).reshape(2, 4) for w in (first, second)], 1
    )
    np.testing.assert_array_equal(numbers, blocks[:, :5])


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_dropout_uses_the_configured_generator(implementation):
    """Keys of another implementation are not Threefry keys, and draw their own numbers."""
    key = jax.random.key(3, impl=implementation)
    numbers = random_uint16(key, (64, 1001))
    words = np.asarray(jax.random.bits(key, (64, 501), jnp.uint32))
    expected = words.view(np.uint16).reshape(64, 1002)[:, :1001]
    np.testing.assert_array_equal(numbers, expected)
    y = Dropout(0.3).apply({}, jnp.ones((64, 1001)), False, rngs={"dropout": key})
    assert abs(np.mean(np.asarray(y) == 0) - 0.3) < 5 * np.sqrt(0.3 * 0.7 / y.size)
