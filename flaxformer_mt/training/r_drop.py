"""The divergence of two predictions, as R-Drop minimises it."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flaxformer_mt.model.numerics import at_least_float32


def divergence(first: Array, second: Array, weights: ArrayLike) -> tuple[Array, Array]:
    r"""Computes the mean of the two Kullback-Leibler divergences, summed over positions.

    .. math:: \tfrac{1}{2} \left( KL(p \| q) + KL(q \| p) \right)
        = \tfrac{1}{2} \sum_k (p_k - q_k) (\log p_k - \log q_k)

    Args:
      first: logits of p, [B, T, V].
      second: logits of q, [B, T, V].
      weights: [B, T], 0 where there is no target.

    Returns:
      The weighted sum, in nats, and the sum of the weights, in float32 (float64 if the logits
      are).

    Source: Liang et al. 2021, equation 2; symmetrised as by Jeffreys 1946.
    """
    dtype = at_least_float32(first.dtype)
    log_p = jax.nn.log_softmax(first.astype(dtype))
    log_q = jax.nn.log_softmax(second.astype(dtype))
    each = 0.5 * jnp.sum((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q), axis=-1)
    weights = jnp.asarray(weights, dtype)
    return jnp.sum(each * weights), jnp.sum(weights)
