"""The divergence of two predictions, as R-Drop minimises it."""

import jax.numpy as jnp
from jax import Array


def num_passes(alpha: float) -> int:
    """Returns how often each row is computed with a factor `alpha` of the divergence."""
    return 2 if alpha else 1


def divergence(p: Array, q: Array, log_ratio: Array, axis: int) -> tuple[Array, Array, Array]:
    r"""Computes the mean of the two Kullback-Leibler divergences, and its gradient.

    .. math:: \tfrac{1}{2} \left( KL(p \| q) + KL(q \| p) \right)
        = \tfrac{1}{2} \sum_k (p_k - q_k) (\log p_k - \log q_k)

    Args:
      p: probabilities of the first prediction, [..., V, ...].
      q: of the second, of the same shape.
      log_ratio: log p - log q; where both are 0, any finite number.
      axis: of the classes.

    Returns:
      The divergences, without that axis, in nats; the gradients of their sum with respect to the
      logits of p, and to those of q.

    Source: Liang et al. 2021, equation 2; symmetrised as by Jeffreys 1946.
    """
    from_p = jnp.sum(p * log_ratio, axis, keepdims=True)
    from_q = -jnp.sum(q * log_ratio, axis, keepdims=True)
    of_p = 0.5 * (p - q + p * (log_ratio - from_p))
    of_q = 0.5 * (q - p - q * (log_ratio + from_q))
    return 0.5 * jnp.squeeze(from_p + from_q, axis), of_p, of_q
