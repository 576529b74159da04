"""Position tables against their formulas, written out entry by entry."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.positions import PositionEncoding, sinusoidal_table


@pytest.mark.parametrize("base", [10000.0, 1000.0])
@pytest.mark.parametrize("d_model", [6, 7])
def test_interleaved_is_the_paper_s_formula(d_model, base):
    table = sinusoidal_table(50, d_model, base=base)
    for p in (0, 1, 49):
        for i in range(d_model):
            angle = p / base ** (2 * (i // 2) / d_model)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert table[p, i] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("d_model", [8, 9])
def test_concatenated_tensor2tensor_ends_at_the_longest_wave(d_model):
    table = sinusoidal_table(50, d_model, layout="concatenated", exponent="tensor2tensor")
    half = d_model // 2
    for p in (0, 3, 49):
        for j in range(half):
            angle = p * 10000.0 ** (-j / (half - 1))
            assert table[p, j] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[p, half + j] == pytest.approx(math.cos(angle), abs=1e-12)
    np.testing.assert_array_equal(table[:, 2 * half :], 0)


def test_concatenated_paper_exponent_leaves_the_last_cosine_out():
    table = sinusoidal_table(5, 5, layout="concatenated")
    angles = [3.0 * 10000 ** (-2 * j / 5) for j in range(3)]
    expected = [*map(math.sin, angles), *map(math.cos, angles[:2])]
    np.testing.assert_allclose(table[3], expected, atol=1e-12)


def test_offset_shifts_rows():
    np.testing.assert_array_equal(sinusoidal_table(4, 6, offset=2), sinusoidal_table(6, 6)[2:])


def encode(config, positions, length):
    module = PositionEncoding(config)
    variables = module.init(jax.random.key(0), positions, length)
    return variables, module.apply(variables, positions, length)


def test_float32_is_the_rounded_float64_table():
    config = TransformerConfig(d_model=16, num_heads=2, max_length=300)
    _, encoded = encode(config, jnp.array([[7, 250]], jnp.int32), 10)
    expected = sinusoidal_table(300, 16)[[7, 250]].astype(np.float32)
    np.testing.assert_array_equal(encoded[0], expected)


def test_a_position_outside_the_table_is_nan():
    config = TransformerConfig(d_model=16, num_heads=2, max_length=4)
    _, encoded = encode(config, jnp.array([[3, 4]], jnp.int32), 2)
    np.testing.assert_array_equal(jnp.isnan(encoded[0, :, 0]), [False, True])


def test_learned_positions_are_a_table_behind_an_offset():
    config = TransformerConfig(
        d_model=16, num_heads=2, max_length=4, position_kind="learned", position_offset=2
    )
    variables, encoded = encode(config, jnp.array([[0, 3]], jnp.int32), 4)
    table = variables["params"]["embedding"]
    assert table.shape == (6, 16)
    np.testing.assert_array_equal(encoded[0], table[jnp.array([2, 5])])
    with pytest.raises(ValueError, match="5 is more than the 4 learned positions"):
        encode(config, jnp.zeros((1, 5), jnp.int32), 5)


def test_concatenated_paper_exponent():
    table = sinusoidal_table(5, 4, layout="concatenated")
    angles = [3.0, 3.0 / 100.0]
    expected = [*map(math.sin, angles), *map(math.cos, angles)]
    np.testing.assert_allclose(table[3], expected, atol=1e-12)
