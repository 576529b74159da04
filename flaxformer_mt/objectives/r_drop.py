"""R-Drop: two predictions of each row, with different dropout, shall agree."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from flaxformer_mt.objectives.chunked import Chunk


@dataclasses.dataclass(frozen=True)
class RDrop:
    r"""R-Drop's term of `objectives.cross_entropy`: the divergence of two predictions.

    The objective is

    .. math:: -\log p_1(y) - \log p_2(y)
        + \alpha \tfrac{1}{2} \left( KL(p_1 \| p_2) + KL(p_2 \| p_1) \right)

    p_1 and p_2 are the predictions of the same model with two dropout masks. (With label smoothing,
    the first two terms are the smoothed cross-entropy, as in the authors' code.) The gradient is
    therefore twice as long as without R-Drop, even if alpha is small: Adam is invariant to that,
    but `optimizer.clip_norm` must be doubled. The reported loss and accuracy are the means of the
    two passes.

    Source: Liang et al. 2021, equation 4.
    """

    weight: float
    """alpha; 5 is usual for translation."""
    loss_weight: float = 1.0
    passes: int = 2
    name: str = "r_drop"

    def __call__(self, chunk: Chunk) -> tuple[Array, Array]:
        """Implements `chunked.Term`: the second predictions of a chunk follow the first ones."""
        axis = chunk.axis
        (p, q), (log_p, log_q) = (
            jnp.split(array, 2, 1 - axis)
            for array in (chunk.probabilities, chunk.log_probabilities)
        )
        each, *of_logits = divergence(p, q, log_p - log_q, axis)
        return each, jnp.concatenate(of_logits, 1 - axis)


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

    Source: Liang et al. 2021, equation 2; symmetrized as by Jeffreys 1946.
    """
    from_p = jnp.sum(p * log_ratio, axis, keepdims=True)
    from_q = -jnp.sum(q * log_ratio, axis, keepdims=True)
    of_p = 0.5 * (p - q + p * (log_ratio - from_p))
    of_q = 0.5 * (q - p - q * (log_ratio + from_q))
    return 0.5 * jnp.squeeze(from_p + from_q, axis), of_p, of_q
