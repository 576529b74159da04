"""Fused attention of queries, keys and values that one matrix product writes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxformer_mt.model.kernels import fused_attention as kernels
from flaxformer_mt.model.linear import Dense, linear
from flaxformer_mt.model.logical_axes import constrain


def packed_attention(
    options: kernels.AttentionOptions,
    maps: tuple[Dense, Dense, Dense],
    width: int,
    inputs: Array,
    attended: Array,
    arrays: Callable[..., kernels.AttentionInputs],
    recompute: bool,
) -> Array:
    """Projects queries, keys and values, and attends; the kernel adds the biases.

    One product gives all three in self-attention, unless several query heads share keys; otherwise
    one gives the queries and another one keys and values. A key bias would not change the weights.

    Args:
      options: with the backend "pallas_gpu".
      maps: of queries, keys and values.
      width: K.
      inputs: [B, T, D].
      attended: [B, S, D], `inputs` itself in self-attention.
      arrays: makes the kernel's inputs of queries, keys, values, `query_bias` and `value_bias`.
      recompute: whether the backward pass computes the one product again.

    Returns:
      The context [B, H, T, K].
    """
    query, key, value = maps

    def heads_of(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, width)

    def kernel_of(*maps: Dense) -> Array:
        # [D, G, P, K] of P maps: tensor parallelism shards the heads.
        return jnp.stack([heads_of(each.effective_kernel()) for each in maps], axis=2)

    def multiply(x: Array, kernel: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1]).astype(query.dtype)
        products = linear(rows, kernel.reshape(x.shape[-1], -1), None)
        products = constrain(products.reshape(*x.shape[:-1], -1), "batch", "length", "heads")
        return products.reshape(*x.shape[:-1], *kernel.shape[1:])  # [B, S, G, P, K]

    def attend(x: Array, of_keys: Array | None = None) -> Array:
        return kernels.fused_attention(options, arrays(x, of_keys, None, **biases))

    biases = {
        name: None if bias is None else heads_of(bias)
        for name, bias in (
            ("query_bias", query.effective_bias()),
            ("value_bias", value.effective_bias()),
        )
    }
    if attended is not inputs or query.features != key.features:
        # XLA would merge this product with those of other layers, and copy a part for each kernel.
        # (It would also merge barriers of the same array alone.)
        inputs, attended = lax.optimization_barrier((inputs, attended))
        of_keys = multiply(attended, kernel_of(key, value))
        return attend(multiply(inputs, kernel_of(query)), of_keys)

    def project_and_attend(x: Array, kernel: Array) -> Array:
        return attend(multiply(x, kernel))

    if recompute:
        project_and_attend = jax.checkpoint(project_and_attend, policy=kernels.is_fused_attention)
    return project_and_attend(inputs, kernel_of(query, key, value))
