"""The kernel for TPUs, in Pallas' Mosaic dialect.

JAX's own kernels (`jax.experimental.pallas.ops.tpu.flash_attention`, `splash_attention`) take
[B, H, T, K], which TPUs store in rows of 128: heads of width 64 take twice the memory and, with the
transpositions, several times the traffic. This one takes the heads side by side, as the projections
write them, and holds all keys of a row at once, so that the softmax needs a single pass and the
backward pass nothing of the forward pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from flaxformer_mt.model.kernels import attention_blocks as blocks
from flaxformer_mt.model.kernels.attention_blocks import (
    AttentionOptions,
    Gradients,
    Operands,
    Saved,
)


def forward(options: AttentionOptions, operands: Operands) -> tuple[Array, Saved]:
    """Computes the context [B, T, H, K]; `backward` needs only the operands."""
    shape, length = operands.query.shape, operands.query.shape[1]
    operands = _in_kernel_layout(operands)
    specs, grid = _specs_and_grid(operands, shape)
    context = pl.pallas_call(
        functools.partial(_forward_kernel, options, shape[3]),
        grid=grid,
        in_specs=[specs],
        out_specs=specs.query,
        out_shape=jax.ShapeDtypeStruct(operands.query.shape, operands.query.dtype),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel")
        ),
        interpret=options.interpret,
        name="attention_forward",
    )(operands)
    return context[:, :length].reshape(shape), Saved()


def backward(
    options: AttentionOptions, operands: Operands, saved: Saved, gradient: Array
) -> Gradients:
    """Computes the gradients of query, key and value from that of the context [B, T, H, K]."""
    shape, key_shape = operands.query.shape, operands.key.shape
    operands = _in_kernel_layout(operands)
    specs, grid = _specs_and_grid(operands, shape)
    sums = tpu.VMEM(specs.key.block_shape[1:], jnp.float32)
    of_query, of_key, of_value = pl.pallas_call(
        functools.partial(_backward_kernel, options, shape[3]),
        grid=grid,
        in_specs=[specs, specs.query],
        out_specs=list(specs[:3]),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3]],
        scratch_shapes=[sums, sums],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=options.interpret,
        name="attention_backward",
    )(operands, blocks.padded(_joined(gradient), 1, _multiple(gradient)))
    return Gradients(
        of_query[:, : shape[1]].reshape(shape),
        *(
            blocks.summed(x[:, : key_shape[1]].reshape(*key_shape[:2], *shape[2:]), key_shape[2])
            for x in (of_key, of_value)
        ),
    )


def _multiple(x: Array) -> int:
    """Returns what the length of [B, T, H, K] is padded to multiples of."""
    return blocks.LANES if x.shape[1] > blocks.LANES else blocks.SUBLANES


def _joined(x: Array) -> Array:
    """[B, T, H, K] to [B, T, H * K], which does not move anything."""
    return x.reshape(*x.shape[:2], -1)


def _in_kernel_layout(operands: Operands) -> Operands:
    """Joins heads, pads lengths, and gives rows of segments two axes, as registers have.

    Keys and values are repeated for each query head of their group, because a block has the same
    features of queries and keys.
    """
    heads = operands.query.shape[2]
    operands = blocks.padded_operands(operands, _multiple(operands.query), _multiple(operands.key))
    return operands._replace(
        query=_joined(operands.query),
        key=_joined(blocks.repeated(operands.key, heads)),
        value=_joined(blocks.repeated(operands.value, heads)),
        query_segments=operands.query_segments[:, None],
        key_segments=operands.key_segments[:, None],
    )


def _specs_and_grid(
    operands: Operands, shape: tuple[int, ...]
) -> tuple[Operands, tuple[int, int, int]]:
    """Returns the blocks of the operands, and the grid: rows, groups of heads, query blocks."""
    rows, queries, features = operands.query.shape
    keys = operands.key.shape[1]
    together = blocks.heads_per_block(*shape[2:])
    assert together is not None  # `refusal` has checked it.
    lanes = together * shape[3]
    # The longest block whose scores are no more than those of LANES queries and MAX_KEYS keys.
    block = queries
    if block > blocks.LANES:
        most = blocks.MAX_KEYS * blocks.LANES // keys
        block = max(
            b
            for b in range(blocks.LANES, queries + 1, blocks.LANES)
            if queries % b == 0 and b <= most
        )

    def pair_spec(array: Array | None) -> pl.BlockSpec | None:
        if array is None:
            return None
        has_rows = array.shape[0] > 1
        return pl.BlockSpec(
            (None, together, block, keys), lambda b, g, i: (b if has_rows else 0, g, i, 0)
        )

    of_keys = pl.BlockSpec((None, keys, lanes), lambda b, g, i: (b, 0, g))
    specs = Operands(
        pl.BlockSpec((None, block, lanes), lambda b, g, i: (b, i, g)),
        of_keys,
        of_keys,
        pl.BlockSpec((None, 1, block), lambda b, g, i: (b, 0, i)),
        pl.BlockSpec((None, 1, keys), lambda b, g, i: (b, 0, 0)),
        pair_spec(operands.bias),
        pair_spec(operands.dropout),
    )
    return specs, (rows, features // lanes, queries // block)


def _visible(inputs: Operands, options: AttentionOptions) -> Array:
    block = inputs.query.shape[0]
    query_segments = inputs.query_segments[...].reshape(block, 1)
    return blocks.visible_keys(
        query_segments, inputs.key_segments[...], pl.program_id(2) * block, 0, options.causal
    )


def _of_head(x: Array, head: int, width: int) -> Array:
    """Sets the features of the other heads to 0.

    A product over all features is then one over those of this head, and takes no longer: the
    multiplier is as wide as all of them.
    """
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    of_head = (lane >= head * width) & (lane < (head + 1) * width)
    return jnp.where(of_head, x, jnp.zeros_like(x))


def _weights(query: Array, key: Array, bias: Array | None, visible: Array, scale: float) -> Array:
    """Returns the weights [Q, S], before dropout, in float32."""
    masked = jnp.where(visible, blocks.scores(query, key, bias, scale), blocks.LOWEST)
    highest = jnp.max(masked, axis=1, keepdims=True)
    exponentials = jnp.where(visible, jnp.exp(masked - highest), 0.0)
    total = jnp.sum(exponentials, axis=1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1.0, total)


def _head(reference: Any, head: int) -> Array | None:
    return None if reference is None else reference[head]


def _forward_kernel(options, width, inputs, context_ref):
    visible, scale = _visible(inputs, options), width**-0.5
    query, key, value = (reference[...] for reference in inputs[:3])
    context = jnp.zeros(query.shape, jnp.float32)
    for head in range(query.shape[1] // width):
        weights = _weights(
            _of_head(query, head, width), key, _head(inputs.bias, head), visible, scale
        )
        factors = blocks.dropout_factors(_head(inputs.dropout, head), options.dropped)
        weights = weights if factors is None else weights * factors
        context += _of_head(blocks.product(weights.astype(value.dtype), value, (1, 0)), head, width)
    context_ref[...] = context.astype(context_ref.dtype)


def _backward_kernel(
    options,
    width,
    inputs,
    gradient_ref,
    of_query_ref,
    of_key_ref,
    of_value_ref,
    of_key_sum,
    of_value_sum,
):
    """Adds up the gradients of the keys and values over the blocks of queries."""
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        of_key_sum[...] = jnp.zeros_like(of_key_sum)
        of_value_sum[...] = jnp.zeros_like(of_value_sum)

    visible, scale = _visible(inputs, options), width**-0.5
    query, key, value = (reference[...] for reference in inputs[:3])
    gradient = gradient_ref[...]
    of_query = jnp.zeros(query.shape, jnp.float32)
    for head in range(query.shape[1] // width):
        head_query, head_gradient = (_of_head(x, head, width) for x in (query, gradient))
        weights = _weights(head_query, key, _head(inputs.bias, head), visible, scale)
        factors = blocks.dropout_factors(_head(inputs.dropout, head), options.dropped)
        of_weights = blocks.product(head_gradient, value, (1, 1))
        kept = weights if factors is None else weights * factors
        along = jnp.sum(kept * of_weights, axis=1, keepdims=True)
        kept, of_scores = blocks.score_gradients(weights, of_weights, along, factors)
        kept, of_scores = kept.astype(value.dtype), of_scores.astype(value.dtype)
        of_query += _of_head(blocks.product(of_scores, key, (1, 0)), head, width)
        of_key_sum[...] += blocks.product(of_scores, head_query, (0, 0))
        of_value_sum[...] += blocks.product(kept, head_gradient, (0, 0))
    of_query_ref[...] = (of_query * scale).astype(of_query_ref.dtype)

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        of_key_ref[...] = (of_key_sum[...] * scale).astype(of_key_ref.dtype)
        of_value_ref[...] = of_value_sum[...].astype(of_value_ref.dtype)
