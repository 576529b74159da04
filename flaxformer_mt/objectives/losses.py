"""Label-smoothed cross-entropy in the conventions of published code.

`label_smoothed_cross_entropy` and `accuracy` return a sum and the weight to divide it by. The
caller takes the mean, over all devices, micro-batches and packed rows.

Training computes the same loss in chunks, with a handwritten gradient: `chunked.py` must be
changed together with this file.
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
    axis: int = -1,
) -> Array:
    r"""Computes the cross-entropy between smoothed labels q and the model's distributions p.

    .. math:: -\sum_k q_k \log p_k = \log\sum_k e^{z_k} - \sum_k q_k z_k

    With e = `smoothing` and V classes:

    ============ ============ ===================== ======== ======================================
    convention   q of target  q of any other class  minus    published in
    ============ ============ ===================== ======== ======================================
    uniform      1 - e + e/V  e / V                          torch, opennmt, marian
    others       1 - e        e / (V - 1)                    jadore801120, fairseq
    others_kl    1 - e        e / (V - 1)           H(q)     tunz, tensor2tensor
    non_pad_kl   1 - e        e / (V - 2), pad: 0   H(q)     annotated, annotated_wide_heads
    ============ ============ ===================== ======== ======================================

    Minus the entropy H(q) the cross-entropy is the Kullback-Leibler divergence of p from q: its
    gradients are those of `others`, but the loss of a perfect model is 0.

    Args:
      logits: z, [B, T, V].
      targets: int32 [B, T].
      smoothing: e, in [0, 1).
      convention: the row of the table.
      pad_id: the class that `non_pad_kl` excludes, -1 for none. As a target it has the loss 0.
      axis: of the classes, if not the last; targets and result lack this axis.

    Returns:
      [B, T], in nats, in float32 (float64 if the logits are).

    Source: section 7 of Szegedy et al. 2016 (label smoothing), and the code of the families.
    """
    logits = logits.astype(at_least_float32(logits.dtype))
    label = smoothed_label(smoothing, convention, logits.shape[axis], pad_id)
    # One z is gathered and all are summed: q as a [B, T, V] array, or log p stored for the backward
    # pass, would take more memory than all the rest of a small model.
    total: Array | float = 0.0
    if label.other:
        total = jnp.sum(logits, axis)
        if convention == "non_pad_kl" and pad_id >= 0:
            total = total - jnp.take(logits, pad_id, axis)
    expected = label.expected_logit(_target_logits(logits, targets, axis), total)
    losses = jax.nn.logsumexp(logits, axis) - expected - label.entropy
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
    axis: int = -1,
) -> tuple[Array, Array]:
    """Sums the weighted `token_losses`, and the weights [B, T], which are 0 without a target.

    Returns:
      Two scalars in float32 (float64 if the logits are); their quotient is the loss per token.
    """
    losses = token_losses(logits, targets, smoothing, convention, pad_id, axis)
    weights = jnp.asarray(weights, losses.dtype)
    return jnp.sum(losses * weights), jnp.sum(weights)


def accuracy(
    logits: Array, targets: ArrayLike, weights: ArrayLike, axis: int = -1
) -> tuple[Array, Array]:
    """Sums the weights of the positions whose target has the highest logit, and of all.

    Arguments and results as of `label_smoothed_cross_entropy`.
    """
    weights = jnp.asarray(weights, at_least_float32(logits.dtype))
    correct = is_correct(logits, targets, axis)
    return jnp.sum(jnp.where(correct, weights, 0)), jnp.sum(weights)


def is_correct(logits: Array, targets: ArrayLike, axis: int = -1) -> Array:
    """Returns where no class has a higher logit than the target, bool [B, T]."""
    # The loss has computed the maximum; an argmax would be one more pass over the logits.
    return _target_logits(logits, targets, axis) >= jnp.max(logits, axis)


class Label(NamedTuple):
    """The distribution q of `token_losses`."""

    target: float  # probability of the target
    other: float
    """Probability of each other class (except padding, if the convention excludes it)."""
    entropy: float
    """What the convention subtracts from the cross-entropy: H(q) or 0."""

    def expected_logit(self, target: Array, total: ArrayLike) -> Array:
        """Computes the mean of the logits under q.

        `target` is the logit of the target, `total` the sum of the logits of all classes that q
        does not exclude (not read without smoothing), of the same shape.
        """
        expected = (self.target - self.other) * target
        return expected + self.other * total if self.other else expected


def smoothed_label(
    smoothing: float, convention: Convention, num_classes: int, pad_id: int
) -> Label:
    """Returns the distribution of a convention, as in the table of `token_losses`."""
    match convention:
        case "uniform":
            other = smoothing / num_classes
            return Label(1 - smoothing + other, other, 0.0)
        case "others":
            return Label(1 - smoothing, smoothing / (num_classes - 1), 0.0)
        case "others_kl":
            other = smoothing / (num_classes - 1)
        case "non_pad_kl":
            other = smoothing / (num_classes - (2 if pad_id >= 0 else 1))
    # The limit of x log x at 0 is 0.
    entropy = -smoothing * math.log(other) if smoothing else 0.0
    return Label(1 - smoothing, other, entropy - (1 - smoothing) * math.log(1 - smoothing))


def _target_logits(logits: Array, targets: ArrayLike, axis: int) -> Array:
    return jnp.take_along_axis(logits, jnp.expand_dims(targets, axis), axis).squeeze(axis)
