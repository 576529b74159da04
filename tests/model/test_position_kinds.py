"""Rotary, ALiBi and T5 positions: against their equations, in whole passes and in cached steps."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.cache import reorder_cache
from flaxformer_mt.model.position_biases import (
    AlibiBias,
    RelativeBias,
    alibi_slopes,
)
from flaxformer_mt.model.positions import (
    rotate,
    rotation_table,
    rotations,
)
from flaxformer_mt.model.transformer import Transformer

TINY = TransformerConfig(
    source_vocab_size=23,
    target_vocab_size=23,
    d_model=12,
    num_heads=3,
    d_ff=20,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_length=16,
    relative_position_buckets=4,
    relative_position_max_distance=5,
    dtype="float64",
    param_dtype="float64",
)
KINDS = {
    "rotary": {"position_kind": "rotary"},
    "rotary, concatenated": {"position_kind": "rotary", "position_layout": "concatenated"},
    "window": {"position_kind": "rotary", "attention_window": 2},
    "alibi": {"position_kind": "alibi"},
    "t5_relative": {"position_kind": "t5_relative"},
    "t5_relative, by layer": {
        "position_kind": "t5_relative",
        "relative_position_sharing": "layer",
    },
}
SOURCE = jnp.array([[3, 4, 5, 6, 9, 2], [7, 8, 5, 2, 0, 0]], jnp.int32)
TARGET = jnp.array([[1, 4, 5, 9, 3], [1, 8, 5, 2, 0]], jnp.int32)


# Most of the time would go into optimising programs that run a few times.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Compiled(Transformer):
    """The model with its methods compiled whole: op by op, each would compile dozens of times."""

    @functools.partial(compiled, static_argnums=0, static_argnames="method")
    def apply(self, *args, **kwargs):
        return super().apply(*args, **kwargs)


@functools.cache
def of(kind, **overrides):
    """Model and random parameters of a position kind."""
    model = Compiled(dataclasses.replace(TINY, **KINDS[kind] | overrides))
    return model, {"params": drawn_params(model.config)}


def test_slopes_are_those_of_the_paper():
    np.testing.assert_array_equal(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(16)[:2], [2**-0.5, 2**-1.0])
    # The slopes for 4 heads, then the first and third of those for 8.
    np.testing.assert_array_equal(alibi_slopes(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    np.testing.assert_array_equal(alibi_slopes(1), [2**-8])


def test_the_alibi_bias_is_its_equation(float64):
    config = dataclasses.replace(TINY, num_heads=6)
    queries, keys = jnp.array([[0, 1, 2], [4, 0, 1]]), jnp.array([[0, 5], [2, 3]])
    bias = AlibiBias(config, True).apply({}, queries, keys)
    assert bias.shape == (2, 6, 3, 2)
    for b, h, t, s in np.ndindex(bias.shape):
        expected = -alibi_slopes(6)[h] * abs(int(queries[b, t]) - int(keys[b, s]))
        assert float(bias[b, h, t, s]) == expected


def published_bucket(distance, bidirectional, num_buckets, max_distance):
    """The bucket of key position - query position, transcribed from Mesh TensorFlow in float32."""
    result, n = 0, -distance
    if bidirectional:
        num_buckets //= 2
        result += num_buckets * (n < 0)
        n = abs(n)
    else:
        n = max(n, 0)
    exact = num_buckets // 2
    if n < exact:
        return result + n
    ratio = np.log(np.float32(n) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    return result + min(exact + int(ratio * np.float32(num_buckets - exact)), num_buckets - 1)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 3), (16, 64)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_are_the_published_ones(float64, buckets, max_distance, bidirectional):
    config = dataclasses.replace(
        TINY,
        position_kind="t5_relative",
        relative_position_buckets=buckets,
        relative_position_max_distance=max_distance,
    )
    distances = np.arange(-150, 151)
    module = RelativeBias(config, bidirectional)
    table = np.random.default_rng(0).normal(size=(buckets, 3))
    bias = module.apply(
        {"params": {"embedding": table}}, jnp.array([[150]]), jnp.asarray(distances[None] + 150)
    )
    expected = [published_bucket(int(d), bidirectional, buckets, max_distance) for d in distances]
    np.testing.assert_array_equal(bias[0, :, 0].T, table[expected])


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_rotation_is_a_complex_product(float64, layout):
    """Pair j of features is a complex number, multiplied by exp(i * position * frequency j)."""
    config = dataclasses.replace(
        TINY, head_dim=6, position_kind="rotary", position_layout=layout, position_base=100.0
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 6))
    positions = jnp.array([[0, 1, 2, 3], [7, 0, 1, 15]])
    y = np.asarray(rotate(config, jnp.asarray(x), rotations(config, positions, 4)))
    for b, t, j in np.ndindex(2, 4, 3):
        pair = [2 * j, 2 * j + 1] if layout == "interleaved" else [j, j + 3]
        angle = float(positions[b, t]) * 100.0 ** (-2 * j / 6)
        expected = (x[b, :, t, pair[0]] + 1j * x[b, :, t, pair[1]]) * np.exp(1j * angle)
        found = y[b, :, t, pair[0]] + 1j * y[b, :, t, pair[1]]
        np.testing.assert_allclose(found, expected, atol=1e-14)


def test_angles_are_exact_in_float32_and_reach_beyond_max_length():
    config = dataclasses.replace(TINY, position_kind="rotary", dtype="float32")
    positions = jnp.array([[5, 900]], jnp.int32)
    found = rotations(config, positions, 1000)[0, 0]
    np.testing.assert_array_equal(found, rotation_table(1000, 4, 1e4)[[5, 900]].astype("float32"))
    assert bool(jnp.isnan(rotations(config, positions, 900)[0, 0, 1]).all())


@pytest.mark.slow_except("rotary-False", "t5_relative-False")
@pytest.mark.parametrize(
    ("kind", "has_inputs"),
    [
        *((kind, True) for kind in ("rotary", "t5_relative")),
        *((kind, False) for kind in ("rotary", "t5_relative")),
        *(
            pytest.param(kind, True, marks=pytest.mark.slow)
            for kind in KINDS
            if kind not in ("rotary", "t5_relative")
        ),
    ],
)
def test_cached_steps_equal_the_whole_pass(float64, kind, has_inputs):
    """Each of three hypotheses, also after they have continued one another."""
    model, params = of(kind, has_inputs=has_inputs)
    source = SOURCE if has_inputs else None
    targets = jnp.array(
        [[[1, 4, 5, 9], [1, 4, 7, 3], [1, 6, 6, 8]], [[1, 8, 5, 5], [1, 3, 3, 3], [1, 3, 9, 4]]],
        jnp.int32,
    )  # [B, W, T]
    parents = jnp.array([[0, 0, 2], [2, 1, 1]])
    encoded = model.apply(params, source, method="encode") if has_inputs else None
    cache = Transformer(model.config).apply(params, encoded, source, 3, 6, 2, method="init_cache")
    written = targets
    for position in range(4):
        if position == 2:  # From here on, hypotheses continue others.
            cache = reorder_cache(cache, parents)
            earlier = jnp.take_along_axis(targets[:, :, :2], parents[:, :, None], axis=1)
            written = jnp.concatenate([earlier, targets[:, :, 2:]], axis=2)
        logits, cache = model.apply(
            params, written[:, :, position], cache, jnp.full(2, position), method="decode_step"
        )
        for beam in range(3):
            whole = model.apply(params, source, written[:, beam])
            chex.assert_trees_all_close(logits[:, beam], whole[:, position], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_kind": "rotary", "head_dim": 5}, "head has 5: model.head_dim must be even"),
        (
            {"position_kind": "t5_relative", "relative_position_buckets": 5},
            "=5 must be even",
        ),
        (
            {"position_kind": "t5_relative", "relative_position_buckets": 10},
            "max_distance=5 must be more than half",
        ),
        ({"position_kind": "alibi", "decoder_kind": "ssru"}, "kind=alibi acts in self-attention"),
    ],
)
def test_configurations_that_cannot_be(fields, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **fields)
