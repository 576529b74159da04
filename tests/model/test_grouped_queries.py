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


def test_uneven_groups_are_refused():
    with pytest.raises(UserError, match=r"num_kv_heads=3 does not divide model.num_heads=4"):
        dataclasses.replace(GROUPED, num_kv_heads=3)
    assert dataclasses.replace(GROUPED, num_kv_heads=0).kv_heads == 4


def test_published_formats_refuse_it_by_name():
    obstacles = exports(GROUPED)
    assert not obstacles["jax"]
    assert not obstacles["ctranslate2"]
    assert "num_kv_heads=2" in obstacles["marian"]
