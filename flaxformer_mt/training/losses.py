"""Label-smoothed cross-entropy in the conventions of published code.

All functions return a sum and the weight to divide it by. The caller takes the mean, over all
devices, micro-batches and packed rows.
"""

import functools
import math
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flaxformer_mt.model.logical_axes import mesh_platform
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.training.sharding import ROW_AXES

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
      pad_id: the class that `non_pad_kl` excludes. As a target it has the loss 0.
      axis: of the classes, if not the last; targets and result lack this axis.

    Returns:
      [B, T], in nats, in float32 (float64 if the logits are).

    Source: section 7 of Szegedy et al. 2016 (label smoothing), and the code of the families.
    """
    logits = logits.astype(at_least_float32(logits.dtype))
    label = _smoothed_label(smoothing, convention, logits.shape[axis])
    # One z is gathered and all are summed: q as a [B, T, V] array, or log p stored for the backward
    # pass, would take more memory than all the rest of a small model.
    expected = (label.target - label.other) * _target_logits(logits, targets, axis)
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
    """Sums the weighted `token_losses`, and the weights.

    Args:
      logits: [B, T, V].
      targets: int32 [B, T].
      weights: [B, T], 0 where there is no target.
      smoothing: as for `token_losses`; so are the next three.
      convention: how labels are smoothed, and what is reported.
      pad_id: the padding class.
      axis: of the classes.

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

    Args:
      logits: [B, T, V].
      targets: int32 [B, T].
      weights: [B, T].
      axis: of the classes, if not the last.

    Returns:
      Two scalars in float32 (float64 if the logits are).
    """
    # The loss has computed the maximum; an argmax would be one more pass over the logits.
    correct = _target_logits(logits, targets, axis) >= jnp.max(logits, axis)
    weights = jnp.asarray(weights, at_least_float32(logits.dtype))
    return jnp.sum(jnp.where(correct, weights, 0)), jnp.sum(weights)


class CrossEntropyOptions(NamedTuple):
    """The static arguments of `chunked_cross_entropy`."""

    scale: float
    """Factor of the logits."""
    smoothing: float
    """Of the labels, as for `token_losses`; so are the next two."""
    convention: Convention
    pad_id: int


def chunked_cross_entropy(
    vectors: Array,
    table: Array,
    bias: Array | None,
    targets: ArrayLike,
    weights: ArrayLike,
    options: CrossEntropyOptions,
    max_chunk_logits: int = 0,
) -> tuple[Array, Array, Array]:
    """Sums losses and correct predictions without materialising all logits.

    The logits are scale * (vectors @ table.T + bias). They are computed in chunks of columns, with
    their gradient in the same pass, and then discarded: they would be by far the largest array of
    training, and writing and reading them took a sixth of its time on CPUs (docs/speed.md).

    Args:
      vectors: [B, T, D].
      table: [V, D].
      bias: [V], or None.
      targets: int32 [B, T].
      weights: [B, T], 0 where there is no target.
      options: the scale of the logits, and the arguments of `label_smoothed_cross_entropy`.
      max_chunk_logits: the size of a chunk, which has at least one column; 0 = a default for the
        kind of device: what fits into a CPU's caches, or some hundred MiB.

    Returns:
      The weighted sum of the losses, the only differentiable result; the weighted count of the
      positions where no class has a higher logit than the target; the sum of the weights. In
      float32, or float64 if the vectors are.
    """
    targets = jnp.asarray(targets)
    weights = jnp.asarray(weights, at_least_float32(vectors.dtype))
    max_logits = max_chunk_logits or (2**22 if mesh_platform() == "cpu" else 2**27)
    length = targets.shape[1]
    shards = row_shards()
    batch = len(targets) // shards
    columns = next(
        number
        for number in range(length, 0, -1)
        if number == 1 or (length % number == 0 and batch * number * table.shape[0] <= max_logits)
    )

    def split(x: Array) -> Array:
        """[B, T, ...] to [shards, chunks, rows * columns, ...]: chunks have columns of all rows."""
        chunks = x.reshape(shards, batch, -1, columns, *x.shape[2:]).swapaxes(1, 2)
        return chunks.reshape(shards, -1, batch * columns, *x.shape[2:])

    def sums(vectors: Array, labels: tuple[Array, Array]) -> tuple[Array, Array]:
        return _sum_over_chunks(vectors, table, bias, labels, options)

    chunks = split(vectors), (split(targets), split(weights))
    if shards == 1:
        # With an axis of one shard, CPUs would make a transposed copy of all gradients.
        loss, correct = sums(*jax.tree.map(lambda x: x[0], chunks))
    else:
        # Each shard of the rows has its own sums, which are added over devices once, not for each
        # chunk.
        loss, correct = jax.tree.map(jnp.sum, jax.vmap(sums)(*chunks))
    return loss, correct, jnp.sum(weights)


def row_shards() -> int:
    """Returns the number of devices of the current mesh over which the rows are sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    # Under pmap the axis exists, too, but a device sees only its own rows.
    return math.prod(mesh.shape[axis] for axis in ROW_AXES if axis in mesh.auto_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_over_chunks(vectors, table, bias, labels, options):
    """Loss and correct predictions of vectors [chunks, N, D], targets and weights [chunks, N]."""

    def add(sums, chunk):
        logits = _chunk_logits(chunk[0], table, bias, options)
        return jax.tree.map(jnp.add, sums, _chunk_metrics(logits, chunk[1], options)), None

    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    return jax.lax.scan(add, (zero, zero), (vectors, labels))[0]


def _forward(vectors, table, bias, labels, options):
    def add(sums, chunk):
        rows, (targets, weights) = chunk
        logits = _chunk_logits(rows, table, bias, options)
        gradients = _logit_gradients(logits, targets, options) * (options.scale * weights)
        of_bias = None if bias is None else jnp.sum(gradients, axis=1).astype(bias.dtype)
        gradients = gradients.astype(rows.dtype)
        of_table = jnp.matmul(gradients, rows, preferred_element_type=table.dtype)
        of_rows = gradients.T @ table.astype(rows.dtype)
        new = _chunk_metrics(logits, chunk[1], options), of_table, of_bias
        return jax.tree.map(jnp.add, sums, new), of_rows

    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    zeros = (zero, zero), *jax.tree.map(jnp.zeros_like, (table, bias))
    (metrics, *gradients), of_vectors = jax.lax.scan(add, zeros, (vectors, labels))
    return metrics, (of_vectors, *gradients)


def _backward(_, gradients, cotangents):
    loss_cotangent, _ = cotangents
    scaled = jax.tree.map(lambda g: g * loss_cotangent.astype(g.dtype), gradients)
    return *scaled, None


_sum_over_chunks.defvjp(_forward, _backward)


def _chunk_logits(vectors, table, bias, options):
    """Logits [V, N] of vectors [N, D]: CPUs sum much faster over columns than along rows."""
    logits = jnp.einsum(
        "vd,nd->vn",
        table.astype(vectors.dtype),
        vectors,
        preferred_element_type=at_least_float32(vectors.dtype),
    )
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)[:, None]
    return logits * options.scale


def _chunk_metrics(logits, labels, options):
    """Sums of loss and of correct predictions."""
    targets, weights = labels
    _, smoothing, convention, pad_id = options
    loss, _ = label_smoothed_cross_entropy(
        logits, targets, weights, smoothing, convention, pad_id, axis=0
    )
    return loss, accuracy(logits, targets, weights, axis=0)[0]


def _logit_gradients(logits, targets, options):
    """The gradient of `token_losses` with respect to the logits, p - q: [V, N]."""
    _, smoothing, convention, pad_id = options
    label = _smoothed_label(smoothing, convention, len(logits))
    classes = jnp.arange(len(logits), dtype=targets.dtype)[:, None]
    expected = jnp.where(classes == targets, label.target, label.other)
    gradients = jax.nn.softmax(logits, axis=0) - expected.astype(logits.dtype)
    if convention == "non_pad_kl":
        gradients = jnp.where(classes == pad_id, gradients + label.other, gradients)
        gradients = jnp.where(targets == pad_id, 0, gradients)
    return gradients


class _Label(NamedTuple):
    """The distribution q of `token_losses`."""

    target: float
    """Probability of the target."""
    other: float
    """Probability of each other class (except padding, if the convention excludes it)."""
    entropy: float
    """What the convention subtracts from the cross-entropy: H(q) or 0."""


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


def _target_logits(logits: Array, targets: ArrayLike, axis: int) -> Array:
    """Returns the logit of each target: [B, T]."""
    return jnp.take_along_axis(logits, jnp.expand_dims(targets, axis), axis).squeeze(axis)
