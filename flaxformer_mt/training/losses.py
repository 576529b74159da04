"""Cross entropy with smoothed labels, in the conventions that published code follows.

Means are left to the caller, who alone knows over which devices, micro-batches and packed rows
they have to be taken: functions return a sum and the weight to divide it by.
"""

import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flaxformer_mt.model.numerics import at_least_float32

Convention: TypeAlias = Literal["uniform", "others", "others_kl", "non_pad_kl"]


def token_losses(
    logits: Array,
    targets: ArrayLike,
    smoothing: float = 0.0,
    convention: Convention = "uniform",
    pad_id: int = 0,
) -> Array:
    r"""Cross entropy of each position between a smoothed label q and the model's distribution p.

    .. math:: -\sum_k q_k \log p_k = \log\sum_k e^{z_k} - \sum_k q_k z_k

    With e = `smoothing` and V classes:

    ============ ============ ===================== ======== ======================================
    convention   q of target  q of any other class  less     published in
    ============ ============ ===================== ======== ======================================
    uniform      1 - e + e/V  e / V                          torch, opennmt, marian
    others       1 - e        e / (V - 1)                    jadore801120, fairseq
    others_kl    1 - e        e / (V - 1)           H(q)     tunz, tensor2tensor
    non_pad_kl   1 - e        e / (V - 2), pad: 0   H(q)     annotated, questions
    ============ ============ ===================== ======== ======================================

    Less the entropy H(q) the cross entropy is the Kullback-Leibler divergence of p from q: the
    gradients are those of `others`, but a perfect model's loss is 0.

    Args:
      logits: z, [B, T, V].
      targets: int32 [B, T].
      smoothing: e, in [0, 1).
      convention: the row of the table.
      pad_id: the class that `non_pad_kl` leaves out. Where it is the target, the loss is 0.

    Returns:
      [B, T], in nats, in float32 (float64 where the logits are).

    Source: section 7 of Szegedy et al. 2016 (label smoothing), and the code of the families.
    """
    logits = logits.astype(at_least_float32(logits.dtype))
    # One value of z is gathered and one sum of z taken: a [B, T, V] array of q, or of log p kept
    # for the backward pass, would cost more memory than the rest of a small model together.
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    right = _right_logits(logits, targets)
    if not smoothing:
        losses = log_normaliser - right
    else:
        others = {"uniform": 0, "others": 1, "others_kl": 1, "non_pad_kl": 2}[convention]
        num_others = logits.shape[-1] - others
        q_other = smoothing / num_others
        q_right = 1 - smoothing + (q_other if convention == "uniform" else 0)
        total = jnp.sum(logits, axis=-1)
        if convention == "non_pad_kl":
            total = total - logits[..., pad_id]
        losses = log_normaliser - (q_right - q_other) * right - q_other * total
        if convention in ("others_kl", "non_pad_kl"):
            losses = losses + q_right * math.log(q_right) + smoothing * math.log(q_other)
    if convention == "non_pad_kl":
        losses = jnp.where(jnp.asarray(targets) == pad_id, 0, losses)
    return losses


def label_smoothed_cross_entropy(
    logits: Array,
    targets: ArrayLike,
    weights: ArrayLike,
    smoothing: float = 0.0,
    convention: Convention = "uniform",
    pad_id: int = 0,
) -> tuple[Array, Array]:
    """Sum of the weighted `token_losses`, and of the weights.

    Args:
      logits: [B, T, V].
      targets: int32 [B, T].
      weights: [B, T], 0 where there is no target.
      smoothing: see `token_losses`, as for the next two.
      convention: who gets the probability taken from the target, and what is reported.
      pad_id: the padding class.

    Returns:
      Two scalars in float32 (float64 where the logits are); their quotient is the loss per token.
    """
    losses = token_losses(logits, targets, smoothing, convention, pad_id)
    weights = jnp.asarray(weights, losses.dtype)
    return jnp.sum(losses * weights), jnp.sum(weights)


def accuracy(logits: Array, targets: ArrayLike, weights: ArrayLike) -> tuple[Array, Array]:
    """Weight of the positions where no class has a higher logit than the target, and of all.

    Args:
      logits: [B, T, V].
      targets: int32 [B, T].
      weights: [B, T].

    Returns:
      Two scalars in float32 (float64 where the logits are).
    """
    # The maximum is at hand from the loss; an argmax would be one more pass over the logits.
    correct = _right_logits(logits, targets) >= jnp.max(logits, axis=-1)
    weights = jnp.asarray(weights, at_least_float32(logits.dtype))
    return jnp.sum(jnp.where(correct, weights, 0)), jnp.sum(weights)


def _right_logits(logits: Array, targets: ArrayLike) -> Array:
    """The logit of each target: [B, T]."""
    return jnp.take_along_axis(logits, jnp.expand_dims(targets, -1), axis=-1)[..., 0]
