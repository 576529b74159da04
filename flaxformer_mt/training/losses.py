"""Cross entropy with smoothed labels, in the conventions that published code follows.

Means are left to the caller, who alone knows over which devices, micro-batches and packed rows
they have to be taken: functions return a sum and the weight to divide it by.
"""

import math
from typing import Literal, NamedTuple, TypeAlias

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
    label = _smoothed_label(smoothing, convention, logits.shape[-1])
    # One z is gathered and all are summed: q as a [B, T, V] array, or log p kept for the backward
    # pass, would take more memory than all the rest of a small model.
    expected = (label.right - label.other) * _right_logits(logits, targets)
    if label.other:
        total = jnp.sum(logits, axis=-1)
        if convention == "non_pad_kl":
            total = total - logits[..., pad_id]
        expected = expected + label.other * total
    losses = jax.nn.logsumexp(logits, axis=-1) - expected - label.entropy
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


class _Label(NamedTuple):
    """The distribution q of `token_losses`."""

    right: float
    """Probability of the target."""
    other: float
    """Probability of each other class (but padding, where that gets none)."""
    entropy: float
    """What the convention takes off the cross entropy: H(q) or 0."""


def _smoothed_label(smoothing: float, convention: Convention, num_classes: int) -> _Label:
    match convention:
        case "uniform":
            other = smoothing / num_classes
            return _Label(1 - smoothing + other, other, 0.0)
        case "others":
            return _Label(1 - smoothing, smoothing / (num_classes - 1), 0.0)
        case "others_kl":
            other = smoothing / (num_classes - 1)
        case "non_pad_kl":
            other = smoothing / (num_classes - 2)
    # The limit of x log x at 0 is 0.
    entropy = -smoothing * math.log(other) if smoothing else 0.0
    return _Label(1 - smoothing, other, entropy - (1 - smoothing) * math.log(1 - smoothing))


def _right_logits(logits: Array, targets: ArrayLike) -> Array:
    """The logit of each target: [B, T]."""
    return jnp.take_along_axis(logits, jnp.expand_dims(targets, -1), axis=-1)[..., 0]
