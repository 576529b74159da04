"""The kernel for NVIDIA GPUs, in Pallas' Triton dialect.

JAX's own kernel (`jax.experimental.pallas.ops.gpu.attention`) has the same structure. It knows one
row of segments for queries and keys, so that it cannot do cross-attention of packed sentences; a
query without any key gets the mean of all values; and it has neither a bias nor dropout.

Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from flaxformer_mt.model.fused_attention.blocks import (
    LOWEST,
    Form,
    Operands,
    dropout_factors,
    like,
    padded,
    padded_operands,
    product,
    score_gradients,
    scores,
    visible_keys,
)

BLOCK = 64
"""Queries, and keys, for which a program computes results; it steps through the others."""
STEP = 32
"""Queries or keys of one step of the backward pass."""


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    context: Any
    """[B, T, H, K]."""
    logsumexp: Any
    """float32 [B, H, T], of the scores; of a query without keys, far below any score."""


def saved_specs(vectors: PartitionSpec, pairs: PartitionSpec) -> Saved:
    """Returns the partition specs of what `backward` needs of `forward`.

    Args:
      vectors: of [B, T, H, K].
      pairs: of [B, H, T].
    """
    return Saved(vectors, pairs)


def forward(operands: Operands, *, form: Form) -> tuple[Array, Saved]:
    """Computes the context [B, T, H, K] in the dtype of the query, and what `backward` needs."""
    length = operands.query.shape[1]
    operands = padded_operands(operands, BLOCK, BLOCK)
    rows, queries, heads, width = operands.query.shape
    keys = operands.key.shape[1]
    # The programs of one row and head are neighbours: they read the same keys.
    grid = (queries // BLOCK, heads, rows)
    of_queries = pl.BlockSpec((None, BLOCK, None, width), lambda i, h, b: (b, i, h, 0))
    of_keys = pl.BlockSpec((None, keys, None, width), lambda i, h, b: (b, 0, h, 0))
    specs = Operands(
        of_queries,
        of_keys,
        of_keys,
        pl.BlockSpec((None, BLOCK), lambda i, h, b: (b, i)),
        pl.BlockSpec((None, keys), lambda i, h, b: (b, 0)),
        _pair_spec(operands.bias, BLOCK, lambda i, b, h: (b, h, i, 0)),
        _pair_spec(operands.kept, BLOCK, lambda i, b, h: (b, h, i, 0)),
    )
    context, logsumexp = pl.pallas_call(
        functools.partial(_forward_kernel, form=form),
        grid=grid,
        in_specs=[specs],
        out_specs=[of_queries, pl.BlockSpec((None, None, BLOCK), lambda i, h, b: (b, h, i))],
        out_shape=[
            like(operands.query),
            jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32),
        ],
        compiler_params=_compiler_params(operands),
        interpret=form.interpret,
        name="attention_forward",
    )(operands)
    context = context[:, :length]
    return context, Saved(context, logsumexp)


def backward(
    operands: Operands, saved: Saved, gradient: Array, *, form: Form
) -> tuple[Array, Array, Array]:
    """Computes the gradients of query, key and value from that of the context [B, T, H, K]."""
    lengths = operands.query.shape[1], operands.key.shape[1]
    operands = padded_operands(operands, BLOCK, BLOCK)
    context, gradient = (padded(x, 1, BLOCK) for x in (saved.context, gradient))
    rows, queries, heads, width = operands.query.shape
    keys = operands.key.shape[1]

    def row_spec(length: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h, 0))

    of_queries, of_keys = row_spec(queries), row_spec(keys)
    specs = Operands(
        of_queries,
        of_keys,
        of_keys,
        pl.BlockSpec((None, queries), lambda i, h, b: (b, 0)),
        pl.BlockSpec((None, keys), lambda i, h, b: (b, 0)),
        _pair_spec(operands.bias, queries, lambda i, b, h: (b, h, 0, 0)),
        _pair_spec(operands.kept, queries, lambda i, b, h: (b, h, 0, 0)),
    )
    saved_specs = Saved(of_queries, pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0)))
    of_query, of_key, of_value = pl.pallas_call(
        functools.partial(_backward_kernel, form=form),
        grid=(max(queries, keys) // BLOCK, heads, rows),
        in_specs=[specs, saved_specs, of_queries],
        out_specs=[of_queries, of_keys, of_keys],
        out_shape=[like(x) for x in operands[:3]],
        compiler_params=_compiler_params(operands),
        interpret=form.interpret,
        name="attention_backward",
    )(operands, Saved(context, saved.logsumexp), gradient)
    return of_query[:, : lengths[0]], of_key[:, : lengths[1]], of_value[:, : lengths[1]]


def _compiler_params(operands: Operands) -> triton.CompilerParams:
    # Wide heads in float32 would not fit into shared memory twice.
    stages = 2 if operands.query.dtype.itemsize * operands.query.shape[3] <= 256 else 1
    return triton.CompilerParams(num_warps=4, num_stages=stages)


def _pair_spec(array: Array | None, queries: int, index: Any) -> pl.BlockSpec | None:
    """The block of an array [B or 1, H, T, S]: some queries of a row and head, and all keys."""
    if array is None:
        return None
    has_rows = array.shape[0] > 1
    return pl.BlockSpec(
        (None, None, queries, array.shape[3]),
        lambda i, h, b: index(i, b if has_rows else 0, h),
    )


def _part(reference: Any, queries: Any, keys: Any) -> Array | None:
    """Loads a part of a reference to [T, S]."""
    return None if reference is None else reference[queries, keys]


def _forward_kernel(inputs: Operands, context_ref: Any, logsumexp_ref: Any, *, form: Form) -> None:
    block, width = context_ref.shape
    first_query = pl.program_id(0) * block
    query = inputs.query[...]
    query_segments = inputs.query_segments[...][:, None]

    def attend_to_block(i: Any, carry: Any) -> Any:
        context, highest, total = carry
        keys = pl.ds(i * BLOCK, BLOCK)
        key, value = inputs.key[keys, :], inputs.value[keys, :]
        visible = visible_keys(
            query_segments, inputs.key_segments[keys][None], first_query, i * BLOCK, form.causal
        )
        block_scores = scores(query, key, _part(inputs.bias, slice(None), keys), form.scale)
        block_scores = jnp.where(visible, block_scores, LOWEST)
        new_highest = jnp.maximum(highest, jnp.max(block_scores, axis=1))
        weights = jnp.where(visible, jnp.exp(block_scores - new_highest[:, None]), 0.0)
        rescaled = jnp.exp(highest - new_highest)
        total = total * rescaled + jnp.sum(weights, axis=1)
        factors = dropout_factors(_part(inputs.kept, slice(None), keys), form.dropped)
        weights = weights if factors is None else weights * factors
        context = context * rescaled[:, None] + product(weights.astype(value.dtype), value, (1, 0))
        return context, new_highest, total

    last = inputs.key.shape[0] // BLOCK
    stop = jnp.minimum(last, pl.cdiv(first_query + block, BLOCK)) if form.causal else last
    start = (
        jnp.zeros((block, width), jnp.float32),
        jnp.full((block,), LOWEST, jnp.float32),
        jnp.zeros((block,), jnp.float32),
    )
    context, highest, total = lax.fori_loop(0, stop, attend_to_block, start)
    total = jnp.where(total == 0, 1.0, total)  # A query without keys gets zeros.
    context_ref[...] = (context / total[:, None]).astype(context_ref.dtype)
    logsumexp_ref[...] = highest + jnp.log(total)


def _backward_kernel(
    inputs: Operands,
    saved: Saved,
    gradient_ref: Any,
    of_query_ref: Any,
    of_key_ref: Any,
    of_value_ref: Any,
    *,
    form: Form,
) -> None:
    """Program i computes the gradients of block i of the keys and of block i of the queries."""
    block = pl.program_id(0)
    first = block * BLOCK
    width = of_key_ref.shape[1]
    queries, keys = inputs.query.shape[0], inputs.key.shape[0]

    def gradients(
        first_query: Any, num_queries: int, first_key: Any, num_keys: int
    ) -> tuple[Array, ...]:
        """Returns query, key, gradient, the weights after dropout and the scores' gradient."""
        q, k = pl.ds(first_query, num_queries), pl.ds(first_key, num_keys)
        query, key, value = inputs.query[q, :], inputs.key[k, :], inputs.value[k, :]
        gradient = gradient_ref[q, :]
        along = gradient.astype(jnp.float32) * saved.context[q, :].astype(jnp.float32)
        visible = visible_keys(
            inputs.query_segments[q][:, None],
            inputs.key_segments[k][None],
            first_query,
            first_key,
            form.causal,
        )
        exponents = scores(query, key, _part(inputs.bias, q, k), form.scale)
        exponents -= saved.logsumexp[q][:, None]
        weights, of_scores = score_gradients(
            jnp.where(visible, jnp.exp(exponents), 0.0),
            product(gradient, value, (1, 1)),
            jnp.sum(along, axis=1)[:, None],
            dropout_factors(_part(inputs.kept, q, k), form.dropped),
        )
        return query, key, gradient, weights.astype(value.dtype), of_scores.astype(value.dtype)

    @pl.when(first < keys)
    def _() -> None:
        def add(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            query, _, gradient, weights, of_scores = gradients(i * STEP, STEP, first, BLOCK)
            of_key = sums[0] + product(of_scores, query, (0, 0))
            return of_key, sums[1] + product(weights, gradient, (0, 0))

        zeros = jnp.zeros((BLOCK, width), jnp.float32)
        start = jnp.minimum(first, queries) // STEP if form.causal else 0
        of_key, of_value = lax.fori_loop(start, queries // STEP, add, (zeros, zeros))
        of_key_ref[pl.ds(first, BLOCK), :] = (of_key * form.scale).astype(of_key_ref.dtype)
        of_value_ref[pl.ds(first, BLOCK), :] = of_value.astype(of_value_ref.dtype)

    @pl.when(first < queries)
    def _() -> None:
        def add(i: Any, of_query: Array) -> Array:
            _, key, _, _, of_scores = gradients(first, BLOCK, i * STEP, STEP)
            return of_query + product(of_scores, key, (1, 0))

        zeros = jnp.zeros((BLOCK, width), jnp.float32)
        last = keys // STEP
        stop = jnp.minimum(last, pl.cdiv(first + BLOCK, STEP)) if form.causal else last
        of_query = lax.fori_loop(0, stop, add, zeros)
        of_query_ref[pl.ds(first, BLOCK), :] = (of_query * form.scale).astype(of_query_ref.dtype)
