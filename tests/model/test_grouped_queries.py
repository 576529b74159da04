"""Grouped queries: several query heads attend to one head of keys and values."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.exports import exports
from flaxformer_mt.model.attention import scaled_dot_product_attention
from flaxformer_mt.model.kernels.fused_attention import (
    AttentionInputs,
    AttentionOptions,
    fused_attention,
)
from flaxformer_mt.model.masks import causal_mask, segment_mask
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.flops import Work, training_flops
from tests.backends import BACKENDS

SLOW = pytest.mark.slow

GROUPED = TransformerConfig(
    source_vocab_size=23,
    target_vocab_size=23,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
    num_encoder_layers=2,
    num_decoder_layers=2,
    attention_backend="einsum",
    relative_position_buckets=8,
    relative_position_max_distance=10,
)
SOURCE = jnp.asarray(np.random.default_rng(0).integers(3, 23, size=(2, 12)), jnp.int32)
TARGET = jnp.asarray(np.random.default_rng(1).integers(3, 23, size=(2, 10)), jnp.int32)


def random_params(config, key=0):
    params = jax.jit(Transformer(config).init)(jax.random.key(key), SOURCE, TARGET)["params"]
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(key + 1), len(leaves))
    moved = [
        x + 0.1 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


def test_query_heads_of_a_group_are_neighbors():
    """Head h attends to head h // 2: a constant value per group tells which one it read."""
    query, key = jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 2, 3, 2))
    value = jnp.broadcast_to(jnp.arange(2.0)[None, :, None, None], (1, 2, 3, 1))
    context, weights = scaled_dot_product_attention(query, key, value)
    np.testing.assert_allclose(context[0, :, 0, 0], [0, 0, 1, 1], atol=1e-6)
    chex.assert_shape(weights, (1, 4, 1, 3))


@pytest.mark.parametrize("causal", [False, True])
def test_equals_pytorch(float64, causal):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, heads, 7, 4)) for heads in (6, 2, 2))
    cotangent = rng.normal(size=query.shape)
    mask = causal_mask(7) if causal else None
    ours, vjp = jax.vjp(
        lambda *qkv: scaled_dot_product_attention(*qkv, mask)[0],
        *map(jnp.asarray, (query, key, value)),
    )
    tensors = [torch.tensor(x, requires_grad=True) for x in (query, key, value)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *tensors, is_causal=causal, enable_gqa=True
    )
    theirs.backward(torch.tensor(cotangent))
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-12)
    for gradient, tensor in zip(vjp(jnp.asarray(cotangent)), tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "beams"),
    [
        ("rotary", 2),
        ("t5_relative", 1),
        pytest.param("rotary", 1, marks=SLOW),
        pytest.param("t5_relative", 2, marks=SLOW),
        pytest.param("sinusoidal", 1, marks=SLOW),
        pytest.param("sinusoidal", 2, marks=SLOW),
    ],
)
def test_cached_steps_equal_the_whole_pass(kind, beams):
    """The cache stores the heads of keys and values, not those of queries."""
    config = dataclasses.replace(GROUPED, position_kind=kind)
    model, variables = Transformer(config), {"params": random_params(config)}
    length = TARGET.shape[1]

    @jax.jit
    def begin(variables):  # One program, which encodes once.
        encoded = model.apply(variables, SOURCE, method="encode")
        cache = model.apply(variables, encoded, SOURCE, beams, length, method="init_cache")
        return model.apply(variables, SOURCE, TARGET), cache

    whole, cache = begin(variables)
    assert all(layer.value.shape[1] == 2 for layer in cache.layers)
    assert all(cross.key.shape == (2, 2, 12, 4) for cross in cache.cross)
    step = jax.jit(functools.partial(model.apply, method="decode_step"))
    for position in range(length):
        tokens = jnp.repeat(TARGET[:, position : position + 1], beams, axis=1)
        logits, cache = step(variables, tokens, cache, jnp.full(2, position, jnp.int32))
        expected = jnp.repeat(whole[:, position : position + 1], beams, axis=1)
        chex.assert_trees_all_close(logits, expected, atol=1e-5)


@pytest.mark.slow_except("True-pallas_tpu")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [pytest.param(False, marks=SLOW), True])
def test_kernels_equal_the_einsum(backend, causal):
    """With a bias of the scores, packed rows, and heads that a mesh does not shard."""
    rng = np.random.default_rng(0)
    queries, keys = (70, 70) if causal else (50, 77)
    shapes = (2, 4, queries, 32), (2, 2, keys, 32), (2, 2, keys, 32), (2, 4, queries, keys)
    *vectors, bias = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    segments = [jnp.asarray(rng.integers(0, 3, size=(2, n)), jnp.int32) for n in (queries, keys)]
    mask = segment_mask(*segments)
    mask = mask & causal_mask(queries) if causal else mask

    def fused(query, key, value, bias):
        arrays = AttentionInputs(query, key, value, *segments, bias, None)
        return fused_attention(AttentionOptions(backend, causal, 0, interpret=True), arrays)

    def einsum(query, key, value, bias):
        return scaled_dot_product_attention(query, key, value, mask, bias=bias)[0]

    cotangent = jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend, *arrays):
        context, vjp = jax.vjp(attend, *arrays)
        return context, vjp(cotangent)

    chex.assert_trees_all_close(run(fused, *vectors, bias), run(einsum, *vectors, bias), atol=5e-5)


def test_parameters_and_arithmetic_are_counted():
    shapes = jax.eval_shape(Transformer(GROUPED).init, jax.random.key(0), SOURCE, TARGET)
    assert GROUPED.parameter_count == sum(x.size for x in jax.tree.leaves(shapes))
    whole = dataclasses.replace(GROUPED, num_kv_heads=0)
    work = Work(sources=100, targets=80, source_pairs=0, target_pairs=0, cross_pairs=0)
    # Each of 2 layers projects 2 * 8 features less, for encoder, decoder and cross-attention.
    saved = 2 * 16 * 16 * (100 + 80 + 100)
    assert training_flops(whole, work) - training_flops(GROUPED, work) == 6 * saved
    pairs = work._replace(source_pairs=10, target_pairs=10, cross_pairs=10)
    added = [training_flops(c, pairs) - training_flops(c, work) for c in (whole, GROUPED)]
    assert added[0] == added[1] > 0


def test_uneven_groups_are_refused():
    with pytest.raises(UserError, match=r"num_kv_heads=3 does not divide model.num_heads=4"):
        dataclasses.replace(GROUPED, num_kv_heads=3)
    assert dataclasses.replace(GROUPED, num_kv_heads=0).kv_heads == 4


def test_published_formats_refuse_it_by_name():
    obstacles = exports(GROUPED)
    assert not obstacles["jax"]
    assert not obstacles["ctranslate2"]
    assert "num_kv_heads=2" in obstacles["marian"]
