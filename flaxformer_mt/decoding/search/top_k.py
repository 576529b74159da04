"""The largest of many numbers, without sorting them."""

import math

import jax.numpy as jnp
from jax import Array, lax


def top_k(scores: Array, count: int) -> tuple[Array, Array]:
    """`jax.lax.top_k`, which on CPUs takes as long as half of the product that gives the logits.

    The columns are parted into blocks. The `count` largest numbers of a row are in those `count`
    blocks whose largest numbers are the largest, and finding the largest number of each block is
    no more than reading the row once.

    Args:
      scores: [..., V].
      count: if it is more than V, V.

    Returns:
      The largest numbers of each row, falling, and their columns int32, both [..., count]. Of
      equals those further left come first, as in `jax.lax.top_k`.
    """
    best, places = _top_k_of_blocks(in_blocks(scores), min(count, scores.shape[-1]))
    shape = (*scores.shape[:-1], -1)
    return best.reshape(shape), places.reshape(shape)


def logsumexp(scores: Array) -> Array:
    """`jax.nn.logsumexp` of each row, [..., V] to [..., 1], by the blocks of `top_k`.

    Where both are asked for, there is one array of blocks to be written, and one search for the
    largest number of each.
    """
    blocks = in_blocks(scores)
    # Without barriers XLA makes one step of two, and reads the rows undivided, from another array.
    largest = lax.optimization_barrier(blocks.max(axis=-1)).max(axis=-1)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    sums = lax.optimization_barrier(jnp.exp(blocks - largest[:, None, None]).sum(axis=-1))
    return (jnp.log(sums.sum(axis=-1)) + largest).reshape(*scores.shape[:-1], 1)


def in_blocks(scores: Array) -> Array:
    """All rows of [..., V], each as about sqrt(V) blocks of sqrt(V): [rows, blocks, columns].

    The last block is filled up with minus infinity.
    """
    size = scores.shape[-1]
    width = math.isqrt(size)
    flat = scores.reshape(-1, size)  # XLA is fast with matrices only.
    filled = jnp.pad(flat, ((0, 0), (0, -size % width)), constant_values=-jnp.inf)
    return filled.reshape(flat.shape[0], -1, width)


def _top_k_of_blocks(blocks: Array, count: int) -> tuple[Array, Array]:
    rows, num_blocks, width = blocks.shape
    if num_blocks < 2 * count:  # Hardly anything could be left out.
        return lax.top_k(blocks.reshape(rows, -1), count)
    _, chosen = lax.top_k(blocks.max(axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # So that of equals the first is found.
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    places = (chosen[:, :, None] * width + jnp.arange(width, dtype=jnp.int32)).reshape(rows, -1)
    best, index = lax.top_k(candidates, count)
    return best, jnp.take_along_axis(places, index, axis=1)
