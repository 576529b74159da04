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

from flaxformer_mt.model.kernels.attention_blocks import (
    LOWEST,
    AttentionOptions,
    Gradients,
    Operands,
    Saved,
    dropout_factors,
    padded,
    padded_operands,
    product,
    score_gradients,
    scores,
    summed,
    visible_keys,
)

BLOCK = 64
"""Queries, and keys, for which a program computes results; it steps through the others."""
STEP = 32
"""Queries or keys of one step of the backward pass."""


class Blocks(NamedTuple):
    """Operands as the kernels take them: blocks of whole rows, of one head."""

    vectors: Any
    """Queries, keys and values [B, T, H, P, K]: one array or several, of P of the three each."""
    query_segments: Any
    key_segments: Any
    bias: Any
    kept: Any
    query_bias: Any
    value_bias: Any


def forward(options: AttentionOptions, operands: Operands) -> tuple[Array, Saved]:
    """Computes the context [B, T, H, K] in the dtype of the query, and what `backward` needs."""
    length = operands.query.shape[1]
    blocks = _blocks(operands)
    rows, queries, heads, _, width = blocks.vectors[0].shape
    # The programs of one row and head are neighbours: they read the same keys.
    grid = (queries // BLOCK, heads, rows)
    specs = _specs(blocks)._replace(
        query_segments=pl.BlockSpec((None, BLOCK), lambda i, h, b: (b, i)),
        bias=_pair_spec(blocks.bias, BLOCK, lambda i, b, h: (b, h, i, 0)),
        kept=_pair_spec(blocks.kept, BLOCK, lambda i, b, h: (b, h, i, 0)),
    )
    context, logsumexp = pl.pallas_call(
        functools.partial(_forward_kernel, options),
        grid=grid,
        in_specs=[specs],
        out_specs=[
            pl.BlockSpec((None, BLOCK, None, width), lambda i, h, b: (b, i, h, 0)),
            pl.BlockSpec((None, None, BLOCK), lambda i, h, b: (b, h, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, queries, heads, width), operands.query.dtype),
            jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32),
        ],
        compiler_params=_compiler_params(operands),
        interpret=options.interpret,
        name="attention_forward",
    )(blocks)
    context = context[:, :length]
    return context, Saved(context, logsumexp)


def backward(
    options: AttentionOptions, operands: Operands, saved: Saved, gradient: Array
) -> Gradients:
    """Computes the gradients from that of the context [B, T, H, K]."""
    blocks = _blocks(operands)
    context, gradient = (padded(x, 1, BLOCK) for x in (saved.context, gradient))
    rows, queries, heads, width = context.shape
    programs = max(queries, blocks.key_segments.shape[1]) // BLOCK
    specs = _specs(blocks)
    of_queries = pl.BlockSpec((None, queries, None, width), lambda i, h, b: (b, 0, h, 0))
    saved_specs = Saved(of_queries, pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0)))
    # Each program writes the gradients of its own head; those of a group are added up below.
    shapes = [(*x.shape[:2], heads, *x.shape[3:]) for x in blocks.vectors]
    outputs: list[Any] = [
        [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, blocks.vectors, strict=True)]
    ]
    out_specs: list[Any] = [[_vectors_spec(shape, heads) for shape in shapes]]
    if operands.query_bias is not None:
        outputs.append(jax.ShapeDtypeStruct((rows, programs, heads, 2, width), jnp.float32))
        out_specs.append(
            pl.BlockSpec((None, None, None, 2, width), lambda i, h, b: (b, i, h, 0, 0))
        )
    vectors, *biases = pl.pallas_call(
        functools.partial(_backward_kernel, options),
        grid=(programs, heads, rows),
        in_specs=[specs, saved_specs, of_queries],
        out_specs=out_specs,
        out_shape=outputs,
        compiler_params=_compiler_params(operands),
        interpret=options.interpret,
        name="attention_backward",
    )(blocks, Saved(context, saved.logsumexp), gradient)
    of_vectors = iter(vectors)
    of_operands = (
        None
        if x is None
        else summed(next(of_vectors)[:, : x.shape[1]], x.shape[2]).reshape(x.shape)
        for x in operands[:3]
    )
    return Gradients(*of_operands, *biases)


def _blocks(operands: Operands) -> Blocks:
    operands = padded_operands(operands, BLOCK, BLOCK)
    arrays = [x for x in operands[:3] if x is not None]
    vectors = [x if x.ndim == 5 else x[:, :, :, None] for x in arrays]
    return Blocks(vectors, *operands[3:])


def _specs(blocks: Blocks) -> Blocks:
    """Returns the blocks of one row and head, with all queries and keys."""
    queries, keys = blocks.query_segments.shape[1], blocks.key_segments.shape[1]
    heads = blocks.vectors[0].shape[2]

    def of_bias(array: Array | None) -> pl.BlockSpec | None:
        if array is None:
            return None
        group = heads // array.shape[0]
        return pl.BlockSpec((None, array.shape[1]), lambda i, h, b: (_quotient(h, group), 0))

    return Blocks(
        [_vectors_spec(array.shape, heads) for array in blocks.vectors],
        pl.BlockSpec((None, queries), lambda i, h, b: (b, 0)),
        pl.BlockSpec((None, keys), lambda i, h, b: (b, 0)),
        _pair_spec(blocks.bias, queries, lambda i, b, h: (b, h, 0, 0)),
        _pair_spec(blocks.kept, queries, lambda i, b, h: (b, h, 0, 0)),
        of_bias(blocks.query_bias),
        of_bias(blocks.value_bias),
    )


def _vectors_spec(shape: tuple[int, ...], heads: int) -> pl.BlockSpec:
    """Returns the block [T, P, K] of a query head in an array [B, T, G, P, K]."""
    _, length, groups, parts, width = shape
    group = heads // groups
    return pl.BlockSpec(
        (None, length, None, parts, width), lambda i, h, b: (b, 0, _quotient(h, group), 0, 0)
    )


def _quotient(head: Any, group: int) -> Any:
    return head if group == 1 else lax.div(head, group)


def _compiler_params(operands: Operands) -> triton.CompilerParams:
    # Wide heads in float32 would not fit into shared memory twice.
    stages = 2 if operands.query.dtype.itemsize * operands.query.shape[-1] <= 256 else 1
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


class Place(NamedTuple):
    """Where a block has the queries, the keys or the values."""

    reference: Any
    """[T, P, K]."""
    part: int
    """Which of the P."""

    def load(self, rows: Any, bias: Any = None) -> Array:
        """Loads some rows, and adds a bias, a reference to [K]."""
        x = self.reference[rows, self.part, :]
        return x if bias is None else (x.astype(jnp.float32) + bias[...][None]).astype(x.dtype)

    def store(self, rows: Any, x: Array) -> None:
        """Stores some rows in the dtype of the reference."""
        self.reference[rows, self.part, :] = x.astype(self.reference.dtype)


def _places(vectors: list[Any]) -> list[Place]:
    """Returns the places of queries, keys and values."""
    return [Place(x, part) for x in vectors for part in range(x.shape[1])]


def _forward_kernel(options, inputs, context_ref, logsumexp_ref):
    block, width = context_ref.shape
    scale = width**-0.5
    first_query = pl.program_id(0) * block
    of_query, of_key, of_value = _places(inputs.vectors)
    query = of_query.load(pl.ds(first_query, block), inputs.query_bias)
    query_segments = inputs.query_segments[...][:, None]

    def attend_to_block(i: Any, carry: Any) -> Any:
        context, highest, total = carry
        keys = pl.ds(i * BLOCK, BLOCK)
        key, value = of_key.load(keys), of_value.load(keys, inputs.value_bias)
        visible = visible_keys(
            query_segments, inputs.key_segments[keys][None], first_query, i * BLOCK, options.causal
        )
        block_scores = scores(query, key, _part(inputs.bias, slice(None), keys), scale)
        block_scores = jnp.where(visible, block_scores, LOWEST)
        new_highest = jnp.maximum(highest, jnp.max(block_scores, axis=1))
        weights = jnp.where(visible, jnp.exp(block_scores - new_highest[:, None]), 0.0)
        rescaled = jnp.exp(highest - new_highest)
        total = total * rescaled + jnp.sum(weights, axis=1)
        factors = dropout_factors(_part(inputs.kept, slice(None), keys), options.dropped)
        weights = weights if factors is None else weights * factors
        context = context * rescaled[:, None] + product(weights.astype(value.dtype), value, (1, 0))
        return context, new_highest, total

    last = inputs.key_segments.shape[0] // BLOCK
    stop = jnp.minimum(last, pl.cdiv(first_query + block, BLOCK)) if options.causal else last
    start = (
        jnp.zeros((block, width), jnp.float32),
        jnp.full((block,), LOWEST, jnp.float32),
        jnp.zeros((block,), jnp.float32),
    )
    context, highest, total = lax.fori_loop(0, stop, attend_to_block, start)
    total = jnp.where(total == 0, 1.0, total)  # A query without keys gets zeros.
    context_ref[...] = (context / total[:, None]).astype(context_ref.dtype)
    logsumexp_ref[...] = highest + jnp.log(total)


def _backward_kernel(options, inputs, saved, gradient_ref, of_vectors, of_biases=None):
    """Program i computes the gradients of block i of the keys and of block i of the queries."""
    first = pl.program_id(0) * BLOCK
    block = pl.ds(first, BLOCK)
    queries, keys = inputs.query_segments.shape[0], inputs.key_segments.shape[0]
    width = gradient_ref.shape[1]
    scale = width**-0.5
    of_query, of_key, of_value = _places(inputs.vectors)
    to_query, to_key, to_value = _places(of_vectors)
    if of_biases is not None:
        of_biases[...] = jnp.zeros(of_biases.shape, jnp.float32)

    def gradients(
        first_query: Any, num_queries: int, first_key: Any, num_keys: int
    ) -> tuple[Array, ...]:
        """Returns query, key, gradient, the weights after dropout and the scores' gradient."""
        q, k = pl.ds(first_query, num_queries), pl.ds(first_key, num_keys)
        query = of_query.load(q, inputs.query_bias)
        key, value = of_key.load(k), of_value.load(k, inputs.value_bias)
        gradient = gradient_ref[q, :]
        along = gradient.astype(jnp.float32) * saved.context[q, :].astype(jnp.float32)
        visible = visible_keys(
            inputs.query_segments[q][:, None],
            inputs.key_segments[k][None],
            first_query,
            first_key,
            options.causal,
        )
        exponents = scores(query, key, _part(inputs.bias, q, k), scale)
        exponents -= saved.logsumexp[q][:, None]
        weights, of_scores = score_gradients(
            jnp.where(visible, jnp.exp(exponents), 0.0),
            product(gradient, value, (1, 1)),
            jnp.sum(along, axis=1)[:, None],
            dropout_factors(_part(inputs.kept, q, k), options.dropped),
        )
        return query, key, gradient, weights.astype(value.dtype), of_scores.astype(value.dtype)

    @pl.when(first < keys)
    def _() -> None:
        def add(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            query, _, gradient, weights, of_scores = gradients(i * STEP, STEP, first, BLOCK)
            of_key = sums[0] + product(of_scores, query, (0, 0))
            return of_key, sums[1] + product(weights, gradient, (0, 0))

        zeros = jnp.zeros((BLOCK, width), jnp.float32)
        start = jnp.minimum(first, queries) // STEP if options.causal else 0
        of_keys, of_values = lax.fori_loop(start, queries // STEP, add, (zeros, zeros))
        to_key.store(block, of_keys * scale)
        to_value.store(block, of_values)
        if of_biases is not None:
            of_biases[1, :] = jnp.sum(of_values, axis=0)

    @pl.when(first < queries)
    def _() -> None:
        def add(i: Any, of_query: Array) -> Array:
            _, key, _, _, of_scores = gradients(first, BLOCK, i * STEP, STEP)
            return of_query + product(of_scores, key, (1, 0))

        zeros = jnp.zeros((BLOCK, width), jnp.float32)
        last = keys // STEP
        stop = jnp.minimum(last, pl.cdiv(first + BLOCK, STEP)) if options.causal else last
        of_queries = lax.fori_loop(0, stop, add, zeros) * scale
        to_query.store(block, of_queries)
        if of_biases is not None:
            of_biases[0, :] = jnp.sum(of_queries, axis=0)
