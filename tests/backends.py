"""Kernels in tests on CPUs.

The kernels for GPUs are interpreted by themselves, with a detector of races, where JAX has an
interpreter. A whole model cannot be interpreted: the interpreter's operations have an order, which
loops over layers do not keep. There, other functions take the kernels' place, with the same
arguments and results.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.random import threefry2x32_p

from flaxformer_mt.model import normalization
from flaxformer_mt.model.kernels import OLDEST_JAX, fused_attention, fused_norm
from flaxformer_mt.model.kernels.attention_blocks import (
    Gradients,
    Operands,
    Saved,
    repeated,
    visible_keys,
)
from flaxformer_mt.model.numerics import masked_softmax

needs_gpu_interpreter = pytest.mark.skipif(
    jax.__version_info__ < OLDEST_JAX,
    reason="this JAX has no interpreter of kernels for GPUs",
)
BACKENDS = [pytest.param("pallas_gpu", marks=needs_gpu_interpreter), "pallas_tpu"]


class KernelsByEinsum:
    """Takes the place of `attention_gpu`."""

    @staticmethod
    def forward(options, operands):
        context = _context(options, operands, operands[:3])
        return context, Saved(context, jnp.zeros_like(context[..., 0], jnp.float32).swapaxes(1, 2))

    @staticmethod
    def backward(options, operands, saved, gradient):
        del saved
        of_vectors = jax.vjp(functools.partial(_context, options, operands), operands[:3])[1]
        gradients = of_vectors(gradient)[0]
        if operands.query_bias is None:
            return Gradients(*gradients)
        of_query, _, of_value = fused_attention._unpacked(Operands(*gradients, None, None))
        return Gradients(*gradients, *(jnp.sum(x, axis=1) for x in (of_query, of_value)))


def _context(options, operands, vectors):
    query, key, value = fused_attention._unpacked(operands._replace(**_named(vectors)))
    key, value = (repeated(x, query.shape[2]) for x in (key, value))
    visible = jax.vmap(lambda row, column: visible_keys(row, column, 0, 0, options.causal))(
        operands.query_segments[:, :, None], operands.key_segments[:, None]
    )
    scores = jnp.einsum("bthk,bshk->bhts", query, key) * query.shape[-1] ** -0.5
    scores = scores if operands.bias is None else scores + operands.bias
    weights = masked_softmax(scores, visible[:, None])
    assert operands.dropout is None
    return jnp.einsum("bhts,bshk->bthk", weights, value)


def _named(vectors):
    return dict(zip(("query", "key", "value"), vectors, strict=True))


def _norm_forward(options, x, y, parameters, draw):
    bias, scale, shift = parameters
    y = _dropped(options, draw, y.astype(jnp.float32) + bias)
    total = (x.astype(jnp.float32) + y).astype(x.dtype)
    rows = total.reshape(-1, x.shape[-1]).astype(jnp.float32)
    normalized = normalization.layer_norm(rows, scale, shift, options.epsilon)
    return normalized.reshape(x.shape).astype(x.dtype), total


def _norm_backward(options, total, *arrays):
    *gradients, (bias, scale, shift), draw = arrays
    gradient = sum(g.astype(jnp.float32) for g in gradients)

    def normalized(total, y_bias, scale, shift):
        y = _dropped(options, draw, jnp.broadcast_to(y_bias, total.shape))
        rows = (total + y - jax.lax.stop_gradient(y)).reshape(-1, total.shape[-1])
        return normalization.layer_norm(rows, scale, shift, options.epsilon)

    wide = total.astype(jnp.float32)
    _, vjp = jax.vjp(normalized, wide, bias, scale, shift)
    of_total, *of_parameters = vjp(gradient.reshape(-1, total.shape[-1]))
    of_y = _dropped(options, draw, of_total)
    return (
        of_total.astype(total.dtype),
        of_y.astype(total.dtype),
        jnp.stack(of_parameters)[None],
    )


def _dropped(options, draw, x):
    if not options.threshold:
        return x
    # As `random_uint16`, from a row on.
    blocks = jax.lax.iota(jnp.uint32, x.size // 4).reshape(*x.shape[:-1], -1)
    counter = blocks + draw[2] * jnp.uint32(x.shape[-1] // 4)
    words = threefry2x32_p.bind(draw[0], draw[1], counter, jnp.zeros_like(counter))
    halves = [
        jax.lax.bitcast_convert_type(word, jnp.uint16).reshape(*x.shape[:-1], -1) for word in words
    ]
    kept = jnp.concatenate(halves, axis=-1) >= jnp.uint16(options.threshold)
    return jnp.where(kept, x / (1 - options.threshold / 2**16), 0)


def replace_gpu_kernels(monkeypatch):
    """Lets models use the backend "pallas_gpu" on CPUs; see the fixture `gpu_kernels_by_einsum`."""
    kernels, refusal = fused_attention._kernels, fused_attention.refusal
    monkeypatch.setattr(
        fused_attention,
        "_kernels",
        lambda backend: KernelsByEinsum if backend == "pallas_gpu" else kernels(backend),
    )
    for module in (fused_attention, normalization):
        monkeypatch.setattr(module, "gpu_refusal", lambda *_: "")
    monkeypatch.setattr(fused_norm, "_forward_on_device", _norm_forward)
    monkeypatch.setattr(fused_norm, "_backward_on_device", _norm_backward)
    monkeypatch.setattr(
        fused_attention,
        "refusal",
        lambda backend, case: refusal(backend, case._replace(dtype=jnp.dtype("bfloat16"))),
    )
