"""Rows of embedding tables, with gradients that are the same bits whenever they are computed.

On GPUs, XLA adds the gradients of rows that were looked up by a scatter with atomic additions,
whose order, and thus rounding, changes from run to run. Here they are added in the order of the
batch, by sorting and by products with zeros and ones.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from flaxformer_mt.model.logical_axes import (
    constrain,
    dividing_axes,
    mesh_platform,
    num_parts,
    on_each_device,
)

BLOCK = 128
"""The number of vectors that are added by one product. Its cost grows with it, that of combining
the blocks falls."""

Lookup = Callable[[Array, Array, jnp.dtype], Array]


def look_up(table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    """Looks up the rows [B, T, D] of a table [V, D]; ids outside the vocabulary give NaN.

    The vectors are rounded to `dtype` after the lookup, so that the gradients of all tokens are
    added up in the table's dtype.
    """
    return _with_ordered_gradient(_rows_of_parts, table, tokens, dtype)


def look_up_positions(table: Array, positions: Array, dtype: jnp.dtype) -> Array:
    """Looks up the rows [B, T, D] of a small table [P, D]; positions outside of it give NaN."""

    def rows(table: Array, positions: Array, dtype: jnp.dtype) -> Array:
        return table.astype(dtype).at[positions].get(mode="fill", fill_value=jnp.nan)

    return _with_ordered_gradient(rows, table, positions, dtype)


def _rows_of_parts(table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    size, width = table.shape
    parts = num_parts("parts", size)
    # Where the table's columns are sharded, each device holds a slice of every vector. XLA does not
    # find the resharding to whole vectors of a device's own rows directly; these constraints give
    # it the intermediate layout.
    tokens = constrain(tokens, "lookup_batch", "length")
    if parts == 1:
        columns = constrain(table, "vocabulary", "lookup_embed")
        rows = jnp.asarray(columns).at[tokens]  # Parameters may be NumPy arrays.
        vectors = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        vectors = vectors.astype(dtype)
        return constrain(vectors, "lookup_batch", "length", "lookup_embed")
    # Each device looks all tokens up in its part of the vocabulary, and finds zeros for those of
    # other parts. Otherwise XLA would gather the parts, and those of the gradient.
    tables = table.reshape(parts, -1, width)
    tables = constrain(tables, "parts", "vocabulary", "lookup_embed")
    firsts = jnp.arange(0, size, size // parts, dtype=tokens.dtype)

    def in_part(part: Array, first: Array) -> Array:
        found = part.at[tokens - first].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return found.astype(dtype)

    found = jax.vmap(in_part)(tables, firsts)
    found = constrain(found, "parts", "lookup_batch", "length", "lookup_embed")
    # `jnp.sum` would send float32.
    vectors = lax.reduce(found, np.zeros((), dtype), lax.add, (0,))
    return jnp.where(((tokens < 0) | (tokens >= size))[..., None], jnp.nan, vectors)


def _with_ordered_gradient(lookup: Lookup, table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    """Applies a lookup; on GPUs, with the gradient of `sum_by_token`."""
    if mesh_platform() != "gpu":
        return lookup(table, tokens, dtype)

    @jax.custom_vjp
    def ordered(table: Array, tokens: Array) -> Array:
        return lookup(table, tokens, dtype)

    def forward(table: Array, tokens: Array) -> tuple[Array, Array]:
        return lookup(table, tokens, dtype), tokens

    def backward(tokens: Array, gradient: Array) -> tuple[Array, None]:
        return _sum_on_each_device(gradient, tokens, table.shape, table.dtype), None

    ordered.defvjp(forward, backward)
    return ordered(table, tokens)


def _sum_on_each_device(
    gradient: Array, tokens: Array, shape: tuple[int, ...], dtype: jnp.dtype
) -> Array:
    """Sums gradients [B, T, D] by token as the table [V, D] is sharded: [V, D]."""
    size, width = shape
    data = dividing_axes("lookup_batch", len(tokens))
    columns = dividing_axes("lookup_embed", width)
    parts = dividing_axes("parts", size)
    local_size = size // num_parts("parts", size)

    def local(gradient: Array, tokens: Array) -> Array:
        first = lax.axis_index(parts) * local_size if parts else 0
        vectors = gradient.reshape(-1, gradient.shape[-1])
        sums = sum_by_token(vectors, tokens.reshape(-1) - first, local_size, dtype)
        return lax.psum(sums, data) if data else sums

    in_specs = (P(data or None, None, columns or None), P(data or None, None))
    return on_each_device(local, in_specs, P(parts or None, columns or None))(gradient, tokens)


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def sum_by_token(vectors: Array, tokens: Array, size: int, dtype: jnp.dtype) -> Array:
    """Sums the vectors of each token, in the order in which they are given.

    The vectors are sorted by token and divided into blocks of R. A product with a matrix of zeros
    and ones gives every position of a block the sum of the vectors of its token up to there.
    Another one gives every block what earlier blocks add to its first token. The sum of a token
    then stands at its last position.

    Args:
      vectors: [N, D].
      tokens: int [N]; those outside of 0 .. size - 1 are ignored.
      size: V.
      dtype: of the sums; float32 or float64.

    Returns:
      [V, D], zeros for tokens without a vector.
    """
    number, width = vectors.shape
    missing = -number % BLOCK
    tokens = jnp.where((tokens < 0) | (tokens >= size), size, tokens)
    tokens = jnp.pad(tokens, (0, missing), constant_values=size)
    order = jnp.argsort(tokens, stable=True)
    ordered = tokens[order]  # [N]
    blocks = ordered.reshape(-1, BLOCK)  # [C, R]
    add = functools.partial(
        jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )

    same = blocks[:, :, None] == blocks[:, None, :]
    up_to_here = same & np.tri(BLOCK, dtype=bool)  # [C, R, R]
    rows = jnp.pad(vectors, ((0, missing), (0, 0)))[order].reshape(-1, BLOCK, width)
    sums = add("crs,csd->crd", up_to_here.astype(rows.dtype), rows)

    firsts, lasts = blocks[:, 0], blocks[:, -1]
    earlier = (firsts[:, None] == lasts[None, :]) & np.tri(len(blocks), k=-1, dtype=bool)
    carried = add("bc,cd->bd", earlier.astype(dtype), sums[:, -1])  # [C, D]

    wanted = jnp.arange(size, dtype=ordered.dtype)
    # The unrolled search is one kernel, the default a loop of many.
    last = jnp.searchsorted(ordered, wanted, side="right", method="scan_unrolled") - 1
    block = last // BLOCK
    total = sums.reshape(-1, width)[last]
    total = total + jnp.where((firsts[block] == wanted)[:, None], carried[block], 0)
    return jnp.where((ordered[last] == wanted)[:, None], total, 0)
