"""Cross entropy with smoothed labels, in the conventions that published code follows.

Means are left to the caller, who alone knows over which devices, micro-batches and packed rows
they have to be taken: functions return a sum and the weight to divide it by.
"""

import functools
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
    r"""Cross entropy of each position between a smoothed label q and the model's distribution p.

    .. math:: -\sum_k q_k \log p_k = \log\sum_k e^{z_k} - \sum_k q_k z_k

    With e = `smoothing` and V classes:

    ============ ============ ===================== ======== ======================================
    convention   q of target  q of any other class  less     published in
    ============ ============ ===================== ======== ======================================
    uniform      1 - e + e/V  e / V                          torch, opennmt, marian
    others       1 - e        e / (V - 1)                    jadore801120, fairseq
    others_kl    1 - e        e / (V - 1)           H(q)     tunz, tensor2tensor
    non_pad_kl   1 - e        e / (V - 2), pad: 0   H(q)     annotated, annotated_wide_heads
    ============ ============ ===================== ======== ======================================

    Less the entropy H(q) the cross entropy is the Kullback-Leibler divergence of p from q: the
    gradients are those of `others`, but a perfect model's loss is 0.

    Args:
      logits: z, [B, T, V].
      targets: int32 [B, T].
      smoothing: e, in [0, 1).
      convention: the row of the table.
      pad_id: the class that `non_pad_kl` leaves out. Where it is the target, the loss is 0.
      axis: where the classes are, if not last; targets and result lack this axis.

    Returns:
      [B, T], in nats, in float32 (float64 where the logits are).

    Source: section 7 of Szegedy et al. 2016 (label smoothing), and the code of the families.
    """
    logits = logits.astype(at_least_float32(logits.dtype))
    label = _smoothed_label(smoothing, convention, logits.shape[axis])
    # One z is gathered and all are summed: q as a [B, T, V] array, or log p kept for the backward
    # pass, would take more memory than all the rest of a small model.
    expected = (label.right - label.other) * _right_logits(logits, targets, axis)
    if label.other:
        total = jnp.sum(logits, axis)
        if convention == "non_pad_kl":
            total = total - jnp.take(logits, pad_id, axis)
        expected = expected + label.other * total
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
    """Sum of the weighted `token_losses`, and of the weights.

    Args:
      logits: [B, T, V].
      targets: int32 [B, T].
      weights: [B, T], 0 where there is no target.
      smoothing: see `token_losses`, as for the next two.
      convention: who gets the probability taken from the target, and what is reported.
      pad_id: the padding class.
      axis: where the classes are.

    Returns:
      Two scalars in float32 (float64 where the logits are); their quotient is the loss per token.
    """
    losses = token_losses(logits, targets, smoothing, convention, pad_id, axis)
    weights = jnp.asarray(weights, losses.dtype)
    return jnp.sum(losses * weights), jnp.sum(weights)


def accuracy(
    logits: Array, targets: ArrayLike, weights: ArrayLike, axis: int = -1
) -> tuple[Array, Array]:
    """Weight of the positions where no class has a higher logit than the target, and of all.

    Args:
      logits: [B, T, V].
      targets: int32 [B, T].
      weights: [B, T].
      axis: where the classes are, if not last.

    Returns:
      Two scalars in float32 (float64 where the logits are).
    """
    # The maximum is at hand from the loss; an argmax would be one more pass over the logits.
    correct = _right_logits(logits, targets, axis) >= jnp.max(logits, axis)
    weights = jnp.asarray(weights, at_least_float32(logits.dtype))
    return jnp.sum(jnp.where(correct, weights, 0)), jnp.sum(weights)


class Projection(NamedTuple):
    """What is not traced of `projected_cross_entropy`."""

    scale: float
    smoothing: float
    convention: Convention
    pad_id: int


def projected_cross_entropy(
    vectors: Array,
    table: Array,
    bias: Array | None,
    targets: ArrayLike,
    weights: ArrayLike,
    projection: Projection,
    logits_at_a_time: int = 0,
) -> tuple[Array, Array, Array]:
    """Sums of losses and of right answers, without ever holding all logits.

    The logits are scale * (vectors @ table.T + bias). Of some columns at a time they are made, the
    gradient is taken at once, and they are forgotten: they would be by far the largest array of
    training, and to write and read them took a sixth of its time on CPUs (docs/speed.md).

    Args:
      vectors: [B, T, D].
      table: [V, D].
      bias: [V], or None.
      targets: int32 [B, T].
      weights: [B, T], 0 where there is no target.
      projection: the logits' scale, and the arguments of `label_smoothed_cross_entropy`.
      logits_at_a_time: the most that are held, as long as that is a column; 0 = as many as suit
        the kind of device: a CPU's caches, or else some hundred MiB.

    Returns:
      The weighted sum of the losses, which alone is differentiable; that of the positions where no
      class has a higher logit than the target; the sum of the weights. In float32, or float64
      where the vectors are.
    """
    targets = jnp.asarray(targets)
    weights = jnp.asarray(weights, at_least_float32(vectors.dtype))
    most = logits_at_a_time or (2**22 if jax.default_backend() == "cpu" else 2**27)
    length = targets.shape[1]
    shards = row_shards()
    batch = len(targets) // shards
    columns = next(
        number
        for number in range(length, 0, -1)
        if number == 1 or (length % number == 0 and batch * number * table.shape[0] <= most)
    )

    def cut(x: Array) -> Array:
        """[B, T, ...] to [shards, chunks, rows * columns, ...]: chunks have columns of all rows."""
        chunks = x.reshape(shards, batch, -1, columns, *x.shape[2:]).swapaxes(1, 2)
        return chunks.reshape(shards, -1, batch * columns, *x.shape[2:])

    def sums(vectors: Array, labels: tuple[Array, Array]) -> tuple[Array, Array]:
        return _sum_over_chunks(vectors, table, bias, labels, projection)

    cuts = cut(vectors), (cut(targets), cut(weights))
    if shards == 1:
        # An axis of one shard would cost CPUs a transposed copy of all slopes.
        loss, correct = sums(*jax.tree.map(lambda x: x[0], cuts))
    else:
        # Each shard of the rows has sums of its own: added up over devices once, not chunk by
        # chunk.
        loss, correct = jax.tree.map(jnp.sum, jax.vmap(sums)(*cuts))
    return loss, correct, jnp.sum(weights)


def row_shards() -> int:
    """Among how many devices of the mesh that is in use the rows of a batch are shared out."""
    mesh = jax.sharding.get_abstract_mesh()
    # Under pmap the axis is there, too, but a device sees no rows besides its own.
    return math.prod(mesh.shape[axis] for axis in ("data", "fsdp") if axis in mesh.auto_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_over_chunks(vectors, table, bias, labels, projection):
    """Loss and right answers of vectors [chunks, N, D], targets and weights [chunks, N]."""

    def add(sums, chunk):
        logits = _project(chunk[0], table, bias, projection)
        return jax.tree.map(jnp.add, sums, _figures(logits, chunk[1], projection)), None

    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    return jax.lax.scan(add, (zero, zero), (vectors, labels))[0]


def _forward(vectors, table, bias, labels, projection):
    def add(sums, chunk):
        rows, (targets, weights) = chunk
        logits = _project(rows, table, bias, projection)
        slopes = _slopes(logits, targets, projection) * (projection.scale * weights)
        of_bias = None if bias is None else jnp.sum(slopes, axis=1).astype(bias.dtype)
        slopes = slopes.astype(rows.dtype)
        of_table = jnp.matmul(slopes, rows, preferred_element_type=table.dtype)
        of_rows = slopes.T @ table.astype(rows.dtype)
        new = _figures(logits, chunk[1], projection), of_table, of_bias
        return jax.tree.map(jnp.add, sums, new), of_rows

    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    zeros = (zero, zero), *jax.tree.map(jnp.zeros_like, (table, bias))
    (figures, *gradients), of_vectors = jax.lax.scan(add, zeros, (vectors, labels))
    return figures, (of_vectors, *gradients)


def _backward(_, gradients, cotangents):
    loss_cotangent, _ = cotangents
    scaled = jax.tree.map(lambda g: g * loss_cotangent.astype(g.dtype), gradients)
    return *scaled, None


_sum_over_chunks.defvjp(_forward, _backward)


def _project(vectors, table, bias, projection):
    """Logits [V, N] of vectors [N, D]: CPUs sum much faster down columns than along rows."""
    logits = jnp.einsum(
        "vd,nd->vn",
        table.astype(vectors.dtype),
        vectors,
        preferred_element_type=at_least_float32(vectors.dtype),
    )
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)[:, None]
    return logits * projection.scale


def _figures(logits, labels, projection):
    """Sums of loss and of right answers."""
    targets, weights = labels
    _, smoothing, convention, pad_id = projection
    loss, _ = label_smoothed_cross_entropy(
        logits, targets, weights, smoothing, convention, pad_id, axis=0
    )
    return loss, accuracy(logits, targets, weights, axis=0)[0]


def _slopes(logits, targets, projection):
    """The gradient of `token_losses`, p - q: [V, N]."""
    _, smoothing, convention, pad_id = projection
    label = _smoothed_label(smoothing, convention, len(logits))
    classes = jnp.arange(len(logits), dtype=targets.dtype)[:, None]
    expected = jnp.where(classes == targets, label.right, label.other)
    slopes = jax.nn.softmax(logits, axis=0) - expected.astype(logits.dtype)
    if convention == "non_pad_kl":
        slopes = jnp.where(classes == pad_id, slopes + label.other, slopes)
        slopes = jnp.where(targets == pad_id, 0, slopes)
    return slopes


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


def _right_logits(logits: Array, targets: ArrayLike, axis: int) -> Array:
    """The logit of each target: [B, T]."""
    return jnp.take_along_axis(logits, jnp.expand_dims(targets, axis), axis).squeeze(axis)
