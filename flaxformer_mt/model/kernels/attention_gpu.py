"""The kernel for NVIDIA GPUs of the Hopper generation, in Pallas' Mosaic GPU dialect.

A program is a warpgroup. It holds one block of queries (or of keys) and steps through the keys (or
the queries), whose next block the memory engine (TMA) fetches while the tensor cores (wgmma)
multiply this one. There are several programs on a core, so that some multiply while others compute
exponentials.

JAX's own kernel (`jax.experimental.pallas.ops.gpu.attention_mgpu`) divides this work among
warpgroups that wait for each other, for longer rows than those of sentences. It has neither
segments, which packed sentences need, nor biases, nor dropout.

Source: Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work
Partitioning", algorithms 1 and 2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from flaxformer_mt.model.kernels import attention_blocks as blocks
from flaxformer_mt.model.kernels.attention_blocks import (
    AttentionOptions,
    Gradients,
    Operands,
    Saved,
)
from flaxformer_mt.model.kernels.mosaic import launch, mosaic_gpu

BLOCK = 64
"""Queries, or keys, of a block: a warpgroup multiplies 64 rows."""
STAGES = 2
"""Blocks in shared memory at once: one that is multiplied, and the next one."""
LAYOUT = mosaic_gpu.Layout.WGMMA
"""How the tensor cores divide a block of scores among registers."""
GRID = ("row", "head", "block")
"""The axes of the programs. Those of one row and head are neighbors: they read the same keys."""


class Vectors(NamedTuple):
    """What the kernels read of one row and head besides queries, keys and values."""

    query_segments: Any
    """[T]."""
    key_segments: Any
    """[S]."""
    bias: Any
    """[T, S] or None; [S, T] where queries are columns."""
    words: Any
    """[T], see `kept_weights`; None without dropout."""
    logsumexp: Any = None
    """[T]; None in the forward pass."""
    along: Any = None
    """[T], the sum over the features of the context and its gradient; None in the forward pass."""


def forward(options: AttentionOptions, operands: Operands) -> tuple[Array, Saved]:
    """Computes the context [B, T, H, K] in the dtype of the query, and what `backward` needs."""
    length = operands.query.shape[1]
    operands = blocks.padded_operands(operands, BLOCK, BLOCK)
    rows, queries, heads, *_, width = operands.query.shape
    context, logsumexp = launch(
        _forward_kernel,
        options,
        out_type=[
            jax.ShapeDtypeStruct((rows, queries, heads, width), operands.query.dtype),
            jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32),
        ],
        grid=(rows, heads, queries // BLOCK),
        grid_names=GRID,
        kernel_name="attention_forward",
    )(operands)
    context = context[:, :length]
    return context, Saved(context, logsumexp)


def backward(
    options: AttentionOptions, operands: Operands, saved: Saved, gradient: Array
) -> Gradients:
    """Computes the gradients from that of the context [B, T, H, K]."""
    vectors = [x for x in operands[:3] if x is not None]
    operands = blocks.padded_operands(operands, BLOCK, BLOCK)
    context, gradient = (blocks.padded(x, 1, BLOCK) for x in (saved.context, gradient))
    rows, queries, heads, width = context.shape
    # D of algorithm 2, line 4.
    along = jnp.sum(context.astype(jnp.float32) * gradient.astype(jnp.float32), axis=3)
    bias = None if operands.bias is None else operands.bias.swapaxes(2, 3)
    lengths = queries, operands.key_segments.shape[1]
    # Each program writes the gradients of its own head; those of a group are added up below.
    of_vectors = [
        jax.ShapeDtypeStruct((*x.shape[:2], heads, *x.shape[3:]), x.dtype)
        for x in operands[:3]
        if x is not None
    ]
    # And sums over its own block for the gradients of the biases.
    of_biases = [
        jax.ShapeDtypeStruct((rows, heads, length // BLOCK, width), jnp.float32)
        for length in lengths
        if operands.query_bias is not None
    ]
    of_vectors, of_biases = launch(
        _backward_kernel,
        options,
        out_type=(of_vectors, of_biases),
        grid=(rows, heads, max(lengths) // BLOCK),
        grid_names=GRID,
        kernel_name="attention_backward",
    )(operands, bias, gradient, saved.logsumexp, along.swapaxes(1, 2))
    gradients = [
        blocks.summed(result[:, : x.shape[1]], x.shape[2])
        for result, x in zip(of_vectors, vectors, strict=True)
    ]
    sums = [jnp.sum(result, axis=2) for result in of_biases]
    return Gradients(*gradients, *[None] * (3 - len(gradients)), *sums)


def _forward_kernel(options, inputs, context_ref, logsumexp_ref):
    row, head, block = (lax.axis_index(name) for name in GRID)
    first_query = block * BLOCK
    query, key, value = _views(inputs[:3], row, head)
    query_bias, value_bias = _biases(inputs, head)
    vectors = _vectors(inputs, inputs.bias, row, head)
    last = inputs.key_segments.shape[1] // BLOCK

    def attend(query_block, logsumexp_block):
        _add_bias(query_block, query_bias)

        def attend_to_block(first_key, key_block, value_block, carry):
            context, highest, total = carry
            _add_bias(value_block, value_bias)
            scores = Scores(options, vectors, first_query, first_key, 0)
            exponents = scores.masked(query_block, key_block)
            # Algorithm 1, line 9.
            new_highest = jnp.maximum(highest, jnp.max(exponents, axis=1))
            weights = jnp.exp(exponents - _rows(new_highest, BLOCK))
            rescaled = jnp.exp(highest - new_highest)
            total = total * rescaled + jnp.sum(weights, axis=1)
            if (factors := scores.dropout_factors()) is not None:
                weights = weights * factors
            # Line 10.
            context = context * _rows(rescaled, context.shape[1])
            return _add_product(context, weights, value_block, options), new_highest, total

        stop = jnp.minimum(last, block + 1) if options.causal else last
        start = (
            _full((BLOCK, query.shape[1]), 0.0, LAYOUT),
            # Higher than a hidden score, whose weight is then 0 in a block without others.
            _full((BLOCK,), blocks.LOWEST / 2, LAYOUT.reduce(1)),
            _full((BLOCK,), 0.0, LAYOUT.reduce(1)),
        )
        context, highest, total = _stream(attend_to_block, [key, value], 0, stop, start)
        total = jnp.where(total == 0, 1.0, total)  # A query without keys gets zeros.
        query_block[...] = (context / _rows(total, context.shape[1])).astype(query_block.dtype)
        logsumexp_block[...] = highest + jnp.log(total)
        of_block = pl.ds(first_query, BLOCK)
        _store(query_block, _views([context_ref], row, head)[0].at[of_block])
        _store(logsumexp_block, logsumexp_ref.at[row, head, of_block])

    _with_blocks(attend, [query], first_query, mosaic_gpu.SMEM((BLOCK,), jnp.float32))


def _backward_kernel(
    options, inputs, bias_of_keys, gradient, logsumexp, along, of_vectors, of_biases
):
    """Program i computes the gradients of block i of the keys and of block i of the queries."""
    row, head, block = (lax.axis_index(name) for name in GRID)
    first = block * BLOCK
    query, key, value = _views(inputs[:3], row, head)
    query_bias, value_bias = _biases(inputs, head)
    of_query, of_key, of_value = (x.at[pl.ds(first, BLOCK)] for x in _views(of_vectors, row, head))
    of_query_bias, of_value_bias = of_biases or (None, None)
    row_of_sums = mosaic_gpu.SMEM(query.shape[1:], jnp.float32)
    (gradient,) = _views([gradient], row, head)
    (last_query, width), last_key = query.shape, key.shape[0]
    scale = width**-0.5
    zeros = _full((BLOCK, width), 0.0, LAYOUT)

    def sum_for_keys(key_block, value_block, sums_block):
        _add_bias(value_block, value_bias)
        vectors = _vectors(inputs, bias_of_keys, row, head, logsumexp, along)

        def add(first_query, query_block, gradient_block, sums):
            of_keys, of_values = sums
            _add_bias(query_block, query_bias)
            scores = Scores(options, vectors, first_query, first, 1)
            exponents = scores.masked(query_block, key_block)
            of_weights = scores.product(gradient_block, value_block)
            weights, of_scores = scores.gradients(exponents, of_weights)
            # Lines 12 and 16 of algorithm 2.
            of_values = _add_product(of_values, weights, gradient_block, options)
            return _add_product(of_keys, of_scores, query_block, options), of_values

        start = jnp.minimum(block, last_query // BLOCK) if options.causal else 0
        of_keys, of_values = _stream(
            add, [query, gradient], start, last_query // BLOCK, (zeros, zeros)
        )
        key_block[...] = (of_keys * scale).astype(key_block.dtype)
        value_block[...] = of_values.astype(value_block.dtype)
        _store(key_block, of_key)
        _store(value_block, of_value)
        if of_value_bias is not None:
            sums_block[...] = jnp.sum(of_values, axis=0)
            _store(sums_block, of_value_bias.at[row, head, block])

    def sum_for_queries(query_block, gradient_block, sums_block):
        _add_bias(query_block, query_bias)
        vectors = _vectors(inputs, inputs.bias, row, head, logsumexp, along)

        def add(first_key, key_block, value_block, of_queries):
            _add_bias(value_block, value_bias)
            scores = Scores(options, vectors, first, first_key, 0)
            exponents = scores.masked(query_block, key_block)
            of_weights = scores.product(gradient_block, value_block)
            _, of_scores = scores.gradients(exponents, of_weights)
            return _add_product(of_queries, of_scores, key_block, options)  # Line 15.

        stop = jnp.minimum(last_key // BLOCK, block + 1) if options.causal else last_key // BLOCK
        of_queries = _stream(add, [key, value], 0, stop, zeros) * scale
        query_block[...] = of_queries.astype(query_block.dtype)
        _store(query_block, of_query)
        if of_query_bias is not None:
            sums_block[...] = jnp.sum(of_queries, axis=0)
            _store(sums_block, of_query_bias.at[row, head, block])

    @pl.when(first < last_key)
    def _() -> None:
        _with_blocks(sum_for_keys, [key, value], first, row_of_sums)

    @pl.when(first < last_query)
    def _() -> None:
        _with_blocks(sum_for_queries, [query, gradient], first, row_of_sums)


class Scores(NamedTuple):
    """The scores of a block of queries and a block of keys, [64, 64].

    Queries are the rows, or the columns where gradients of keys are added up: what one product
    leaves in registers can only be the left factor of the next.
    """

    options: AttentionOptions
    vectors: Vectors
    first_query: Any
    first_key: Any
    query_axis: int
    """0 or 1."""

    def of_queries(self, vector: Any) -> Array:
        """Loads the numbers of the block's queries, from [T], for each score."""
        return _along(vector, self.first_query, self.query_axis)

    def of_keys(self, vector: Any) -> Array:
        """Loads the numbers of the block's keys, from [S], for each score."""
        return _along(vector, self.first_key, 1 - self.query_axis)

    def product(self, of_queries: Any, of_keys: Any) -> Array:
        """Multiplies blocks [64, K] over the features."""
        left, right = (of_queries, of_keys) if self.query_axis == 0 else (of_keys, of_queries)

        def multiply(accumulator: Any) -> Array:
            mosaic_gpu.wgmma(accumulator, left, right.transpose((1, 0)))
            return accumulator[...]

        return pl.run_scoped(multiply, mosaic_gpu.ACC((BLOCK, BLOCK), jnp.float32))

    def masked(self, query: Any, key: Any) -> Array:
        """Computes the scores of blocks [64, K], `LOWEST` for hidden keys."""
        key_segments = self.of_keys(self.vectors.key_segments)
        visible = self.of_queries(self.vectors.query_segments) == key_segments
        visible &= key_segments > 0
        if self.options.causal:
            queries = self.first_query + _iota(self.query_axis)
            visible &= self.first_key + _iota(1 - self.query_axis) <= queries
        scaled = self.product(query, key) * query.shape[1] ** -0.5
        if self.vectors.bias is not None:
            firsts = (self.first_query, self.first_key)
            firsts = firsts if self.query_axis == 0 else firsts[::-1]
            rows, columns = (pl.ds(first, BLOCK) for first in firsts)
            block = self.vectors.bias.at[rows, columns]
            scaled += mosaic_gpu.load(block, layout=LAYOUT, optimized=False)
        return jnp.where(visible, scaled, blocks.LOWEST)

    def dropout_factors(self) -> Array | None:
        """Returns the factors, 0 or 1 / (1 - dropped), of the weights; None without dropout."""
        if self.vectors.words is None:
            return None
        words = self.of_queries(self.vectors.words)
        keys = (self.first_key + _iota(1 - self.query_axis)).astype(jnp.uint32)
        kept = blocks.kept_weights(words, keys, self.options.dropout_threshold)
        return blocks.dropout_factors(kept, self.options.dropped)

    def gradients(self, scores: Array, of_weights: Array) -> tuple[Array, Array]:
        """Returns the weights after dropout, and the gradient of the scores."""
        # Algorithm 2, line 11.
        weights = jnp.exp(scores - self.of_queries(self.vectors.logsumexp))
        along = self.of_queries(self.vectors.along)
        return blocks.score_gradients(weights, of_weights, along, self.dropout_factors())


def _views(arrays: Any, row: Any, head: Any) -> list[Any]:
    """Returns the queries, keys and values [T, K] of a row and query head, packed or not."""
    views = []
    heads = arrays[0].shape[2]
    for array in arrays:
        if array is None:
            continue
        place = row, slice(None), lax.div(head, jnp.int32(heads // array.shape[2]))
        parts = [()] if len(array.shape) == 4 else [(part,) for part in range(array.shape[3])]
        views += [array.at[(*place, *part)] for part in parts]
    return views


def _biases(inputs: Operands, head: Any) -> list[Any]:
    """Returns the biases [K] of the queries and values of a query head, or None."""
    heads = inputs.query.shape[2]
    return [
        None if bias is None else bias.at[lax.div(head, jnp.int32(heads // bias.shape[0]))]
        for bias in (inputs.query_bias, inputs.value_bias)
    ]


def _vectors(inputs: Operands, bias: Any, row: Any, head: Any, *of_backward: Any) -> Vectors:
    if bias is not None:
        bias = bias.at[row if bias.shape[0] > 1 else 0, head]
    words = None if inputs.dropout is None else inputs.dropout.at[row, head]
    segments = inputs.query_segments.at[row], inputs.key_segments.at[row]
    return Vectors(*segments, bias, words, *(array.at[row, head] for array in of_backward))


def _with_blocks(body: Callable, arrays: list[Any], first: Any, *scratch: Any) -> None:
    """Calls a function with a block [64, K] of each array [T, K] in shared memory, and scratch."""

    def load_and_run(barrier: Any, *buffers: Any) -> None:
        for array, buffer in zip(arrays, buffers, strict=False):
            mosaic_gpu.copy_gmem_to_smem(array.at[pl.ds(first, BLOCK)], buffer, barrier)
        mosaic_gpu.barrier_wait(barrier)
        body(*buffers)

    shared = [
        mosaic_gpu.SMEM((BLOCK, x.shape[1]), x.dtype, transforms=_transforms(x)) for x in arrays
    ]
    barrier = mosaic_gpu.Barrier(num_arrivals=len(arrays))
    pl.run_scoped(load_and_run, barrier, *shared, *scratch)


def _stream(body: Callable, arrays: list[Any], start: Any, stop: Any, carry: Any) -> Any:
    """Steps through blocks `start` to `stop` of arrays [T, K], which are fetched ahead.

    Each step computes carry = body(first, *blocks, carry).
    """
    specs = [
        mosaic_gpu.BlockSpec(
            (BLOCK, x.shape[1]), lambda i: (start + i, 0), transforms=_transforms(x)
        )
        for x in arrays
    ]

    def step(indices: Any, *arguments: Any) -> Any:
        return body((start + indices[0]) * BLOCK, *arguments)

    return mosaic_gpu.emit_pipeline(
        step,
        grid=(stop - start,),
        in_specs=specs,
        max_concurrent_steps=STAGES,
        init_carry=carry,
    )(*arrays)


def _transforms(array: Any) -> tuple[Any, ...]:
    """Returns the layout of blocks [64, K] in shared memory that the tensor cores read."""
    size = array.dtype.itemsize
    swizzle = mosaic_gpu.find_swizzle(array.shape[1] * size * 8)
    return (
        mosaic_gpu.TilingTransform((8, swizzle // size)),
        mosaic_gpu.SwizzleTransform(swizzle),
    )


def _add_bias(block: Any, bias: Any) -> None:
    """Adds a bias [K], if there is one, to a block [64, K] in shared memory."""
    if bias is None:
        return
    row = mosaic_gpu.load(bias, layout=LAYOUT.reduce(0), optimized=False)
    rows = lax.broadcast_in_dim(row, block.shape, [1])
    block[...] = (block[...].astype(jnp.float32) + rows).astype(block.dtype)
    mosaic_gpu.commit_smem()


def _store(block: Any, place: Any) -> None:
    """Writes a block in shared memory to its place in an array."""
    mosaic_gpu.commit_smem()
    mosaic_gpu.copy_smem_to_gmem(block, place)
    mosaic_gpu.wait_smem_to_gmem(0)


def _add_product(total: Array, left: Array, right: Any, options: AttentionOptions) -> Array:
    """Adds the product of registers [64, 64], rounded, and a block [64, K]."""
    left = left.astype(right.dtype)
    if options.interpret:  # The interpreter multiplies shared memory only.
        product = jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        mosaic_gpu.commit_smem()
        return total + product

    def multiply(accumulator: Any) -> None:
        mosaic_gpu.wgmma(accumulator, left, right)

    return pl.run_state(multiply)(mosaic_gpu.ACC.init(total))


def _along(vector: Any, first: Any, axis: int) -> Array:
    block = mosaic_gpu.load(
        vector.at[pl.ds(first, BLOCK)], layout=LAYOUT.reduce(1 - axis), optimized=False
    )
    return lax.broadcast_in_dim(block, (BLOCK, BLOCK), [axis])


def _rows(vector: Array, columns: int) -> Array:
    return lax.broadcast_in_dim(vector, (BLOCK, columns), [0])


def _iota(axis: int) -> Array:
    return mosaic_gpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis, layout=LAYOUT)


def _full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    return mosaic_gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
