"""The label-smoothed cross-entropy of a vocabulary, computed without keeping its logits."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from flaxformer_mt.model.logical_axes import constrain, mesh_platform
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.training.losses import (
    Convention,
    accuracy,
    label_smoothed_cross_entropy,
    smoothed_label,
)
from flaxformer_mt.training.r_drop import divergence, num_passes
from flaxformer_mt.training.sharding import ROW_AXES

MAX_CHUNK_LOGITS = {"cpu": 2**22, "gpu": 2**27, "tpu": 2**27}
"""The size of a chunk by platform: what fits into a CPU's caches, or some hundred MiB."""


class CrossEntropyOptions(NamedTuple):
    """The static arguments of `chunked_cross_entropy`."""

    scale: float
    """Factor of the logits."""
    smoothing: float
    """Of the labels, as for `token_losses`; so are the next two."""
    convention: Convention
    pad_id: int
    r_drop: float = 0.0
    """Factor of the divergence of R-Drop. If it is not 0, rows come in pairs, and row 2b + 1 is a
    second prediction of row 2b, with the same targets and weights."""


def chunked_cross_entropy(
    vectors: Array,
    table: Array,
    bias: Array | None,
    targets: ArrayLike,
    weights: ArrayLike,
    options: CrossEntropyOptions,
    max_chunk_logits: int = 0,
) -> tuple[Array, Array, Array, Array]:
    """Sums losses and correct predictions without materialising all logits.

    The logits are scale * (vectors @ table.T + bias). They are computed in chunks of columns, with
    their gradient in the same pass, and then discarded: they would be by far the largest array of
    training, and writing and reading them took a sixth of its time on CPUs (docs/speed.md).

    GPUs and TPUs, whose time goes into moving the logits, round them to the dtype of the vectors
    (losses and gradients are computed from them in float32) and read them twice: once for all sums,
    once for the gradients; with R-Drop once more, for the divergences. CPUs keep them in float32 at
    least.

    Args:
      vectors: [B, T, D].
      table: [V, D].
      bias: [V], or None.
      targets: int32 [B, T].
      weights: [B, T], 0 where there is no target.
      options: the scale of the logits, and the arguments of `label_smoothed_cross_entropy`.
      max_chunk_logits: the size of a chunk, which has at least one column; 0 = a default for the
        platform.

    Returns:
      The weighted sum of the losses, with R-Drop plus `options.r_drop` times the divergence, the
      only differentiable result; the weighted count of the positions where no class has a higher
      logit than the target; the weighted sum of the divergences (0 without R-Drop); the sum of the
      weights. In float32, or float64 if the vectors are.
    """
    targets = jnp.asarray(targets)
    weights = jnp.asarray(weights, at_least_float32(vectors.dtype))
    platform = mesh_platform()
    by_rows = platform != "cpu"
    max_logits = max_chunk_logits or MAX_CHUNK_LOGITS[platform]
    length = targets.shape[1]
    shards = row_shards()
    batch = len(targets) // shards
    columns = next(
        number
        for number in range(length, 0, -1)
        if number == 1 or (length % number == 0 and batch * number * table.shape[0] <= max_logits)
    )

    def split(x: Array) -> Array:
        """[B, T, ...] to [shards, chunks, rows * columns, ...]: chunks have columns of all rows.

        In a chunk, all second predictions follow all first ones.
        """
        passes = num_passes(options.r_drop)
        chunks = x.reshape(shards, batch // passes, passes, -1, columns, *x.shape[2:])
        chunks = jnp.moveaxis(chunks, (3, 2), (1, 2))
        return chunks.reshape(shards, -1, batch * columns, *x.shape[2:])

    def sums(vectors: Array, labels: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return _sum_over_chunks(vectors, table, bias, labels, options, by_rows)

    chunks = split(vectors), (split(targets), split(weights))
    if shards == 1:
        # With an axis of one shard, CPUs would make a transposed copy of all gradients.
        metrics = sums(*jax.tree.map(lambda x: x[0], chunks))
    else:
        vectors, labels = chunks
        metrics = _sum_over_shards(vectors, table, bias, labels, options, by_rows)
    return *metrics, jnp.sum(weights)


def row_shards() -> int:
    """Returns the number of devices of the current mesh over which the rows are sharded."""
    return math.prod(_row_axes())


def _row_axes() -> list[int]:
    """The sizes of the axes of the current mesh over which the rows are sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    # Under pmap the axis exists, too, but a device sees only its own rows.
    return [mesh.shape[axis] for axis in ROW_AXES if axis in mesh.auto_axes]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sum_over_chunks(vectors, table, bias, labels, options, by_rows):
    """The metrics of vectors [chunks, N, D], targets and weights [chunks, N].

    With `by_rows`, the logits of a chunk are [N, V], else [V, N]: CPUs sum much faster over columns
    than along rows, on other devices the classes have to be contiguous.
    """
    factors = _computed_factors(table, bias, vectors.dtype, by_rows)

    def add(sums, chunk):
        rows, labels = chunk
        metrics, _ = _metrics_and_gradients(rows, factors, labels, options, len(table), by_rows)
        return jax.tree.map(jnp.add, sums, metrics), None

    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    return lax.scan(add, (zero, zero, zero), (vectors, labels))[0]


def _forward(vectors, table, bias, labels, options, by_rows):
    factors = _computed_factors(table, bias, vectors.dtype, by_rows)
    axes = "nv" if by_rows else "vn"

    def add(sums, chunk):
        rows, labels = chunk
        metrics, gradients = _metrics_and_gradients(
            rows, factors, labels, options, len(table), by_rows
        )
        of_bias = None
        if bias is not None:
            of_bias = jnp.sum(gradients, axis=0 if by_rows else 1).astype(bias.dtype)
        gradients = gradients.astype(rows.dtype)
        operands = gradients, rows
        if not by_rows:
            operands = _widened(table.dtype, *operands)
        of_table = jnp.einsum(f"{axes},nd->vd", *operands, preferred_element_type=table.dtype)
        of_rows = jnp.einsum(f"{axes},vd->nd", gradients, factors[0])
        return jax.tree.map(jnp.add, sums, (metrics, of_table, of_bias)), of_rows

    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    of_factors = [
        None if factor is None else jnp.zeros(factor.shape, table.dtype) for factor in factors
    ]
    (metrics, *sums), of_vectors = lax.scan(
        add, ((zero, zero, zero), *of_factors), (vectors, labels)
    )
    return metrics, (of_vectors, *jax.tree.map(lambda gradient: gradient[: len(table)], sums))


def _backward(options, by_rows, gradients, cotangents):
    del options, by_rows  # They are in the gradients.
    loss_cotangent, *_ = cotangents
    scaled = jax.tree.map(lambda g: g * loss_cotangent.astype(g.dtype), gradients)
    return *scaled, None


_sum_over_chunks.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sum_over_shards(vectors, table, bias, labels, options, by_rows):
    """The same for vectors [shards, chunks, N, D], with a shard of the rows on each device.

    Each has its own sums, which are added over devices once, not for each chunk.
    """

    def sums(vectors, labels):
        return _sum_over_chunks(vectors, table, bias, labels, options, by_rows)

    return jax.tree.map(jnp.sum, jax.vmap(sums)(vectors, labels))


def _forward_of_shards(vectors, table, bias, labels, options, by_rows):
    def forward(vectors, labels):
        return _forward(vectors, table, bias, labels, options, by_rows)

    metrics, (of_vectors, *of_factors) = jax.vmap(forward)(vectors, labels)
    sums = jax.tree.map(_sum_over_devices, of_factors)
    return jax.tree.map(jnp.sum, metrics), (of_vectors, *sums)


def _sum_over_devices(gradient):
    """Adds up the gradients [shards, V, ...] of a parameter, first over fsdp: it shards the sum.

    In one sum over all devices, compilers for TPUs would leave the whole parameter on each.
    """
    sums = jnp.sum(gradient.reshape(*_row_axes(), *gradient.shape[1:]), axis=-gradient.ndim)
    if gradient.ndim == 3:
        sums = constrain(sums, "lookup_batch", "vocabulary", "lookup_embed")
    return jnp.sum(sums, axis=0)


_sum_over_shards.defvjp(_forward_of_shards, _backward)


def _computed_factors(table, bias, dtype, by_rows):
    """The factors as products take them.

    With `by_rows`, zeros pad the vocabulary to a multiple of 128: otherwise GPUs would make a
    padded copy of the logits for each product.
    """
    padding = -len(table) % 128 if by_rows else 0
    table = jnp.pad(table.astype(dtype), ((0, padding), (0, 0)))
    if bias is not None:
        bias = jnp.pad(bias.astype(at_least_float32(dtype)), (0, padding))
    return table, bias


def _widened(dtype, *arrays):
    """Returns bfloat16 operands in the dtype of their product, to which CPUs cannot multiply them.

    XLA has such a product for some layouts only, unless it is compiled with other flags.
    """
    return tuple(array.astype(dtype) for array in arrays)


def _metrics_and_gradients(vectors, factors, labels, options, num_classes, by_rows):
    """Sums of losses, correct predictions and divergences, and a gradient.

    The gradient is that with respect to the products of vectors and table, before they are scaled.
    """
    table, bias = factors
    dtype = at_least_float32(vectors.dtype)
    logits = jnp.einsum(
        "nd,vd->nv" if by_rows else "vd,nd->vn",
        *((vectors, table) if by_rows else _widened(dtype, table, vectors)),
        preferred_element_type=dtype,
    )
    if bias is not None:
        logits = logits + (bias if by_rows else bias[:, None])
    logits = logits * options.scale
    if by_rows:
        logits = logits.astype(vectors.dtype)
        return _of_rows(logits, labels, options, num_classes)
    return _of_columns(logits, labels, options)


def _of_columns(logits, labels, options):
    """Metrics and gradients of logits [V, N]."""
    targets, weights = labels
    loss, _ = label_smoothed_cross_entropy(
        logits, targets, weights, options.smoothing, options.convention, options.pad_id, axis=0
    )
    correct, _ = accuracy(logits, targets, weights, axis=0)
    classes = jnp.arange(len(logits), dtype=targets.dtype)[:, None]
    probabilities = jax.nn.softmax(logits, axis=0)
    gradients = _less_label(probabilities, classes, targets, options, len(logits))
    metrics = loss, correct, jnp.zeros_like(loss)
    if options.r_drop:
        log_probabilities = jax.nn.log_softmax(logits, axis=0)
        metrics, gradients = _with_divergence(
            metrics, gradients, probabilities, log_probabilities, weights, options, 0
        )
    return metrics, gradients * (options.scale * weights)


def _of_rows(logits, labels, options, num_classes):
    """Metrics and gradients of logits [N, V], of which the first `num_classes` are of classes."""
    targets, weights = labels
    smoothing, convention, pad_id = options.smoothing, options.convention, options.pad_id
    logits = logits.astype(weights.dtype)
    classes = lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    targets, is_class = targets[:, None], classes < num_classes
    lowest = float(jnp.finfo(logits.dtype).min)  # The difference of two infinities would be NaN.
    counted = (classes != pad_id) if convention == "non_pad_kl" else is_class
    highest, exponentials, target, total = lax.reduce(
        (
            jnp.where(is_class, logits, lowest),
            is_class.astype(logits.dtype),
            jnp.where(classes == targets, logits, 0),
            jnp.where(counted, logits, 0),
        ),
        tuple(jnp.asarray(initial, logits.dtype) for initial in (lowest, 0, 0, 0)),
        _merged_sums,
        (1,),
    )
    label = smoothed_label(smoothing, convention, num_classes)
    losses = highest + jnp.log(exponentials) - label.expected_logit(target, total) - label.entropy
    if convention == "non_pad_kl":
        losses = jnp.where(targets[:, 0] == pad_id, 0, losses)
    loss = jnp.sum(losses * weights)
    correct = jnp.sum(jnp.where(target >= highest, weights, 0))
    probabilities = jnp.exp(logits - highest[:, None]) / exponentials[:, None]
    probabilities = jnp.where(is_class, probabilities, 0)
    gradients = _less_label(probabilities, classes, targets, options, num_classes)
    metrics = loss, correct, jnp.zeros_like(loss)
    if options.r_drop:
        log_probabilities = logits - (highest + jnp.log(exponentials))[:, None]
        metrics, gradients = _with_divergence(
            metrics, gradients, probabilities, log_probabilities, weights, options, 1
        )
    return metrics, gradients * (options.scale * weights)[:, None]


def _with_divergence(metrics, gradients, probabilities, log_probabilities, weights, options, axis):
    """Adds R-Drop's divergence of the two halves of a chunk, whose classes are along an axis."""
    loss, correct, _ = metrics
    (p, q), (log_p, log_q) = (
        jnp.split(array, 2, 1 - axis) for array in (probabilities, log_probabilities)
    )
    each, *of_logits = divergence(p, q, log_p - log_q, axis)
    total = jnp.sum(each * weights[: len(each)])
    gradients = gradients + options.r_drop * jnp.concatenate(of_logits, 1 - axis)
    return (loss + options.r_drop * total, correct, total), gradients


def _merged_sums(left, right):
    """Merges the sums of two parts of a row, the exponentials relative to their highest logit."""
    difference = left[0] - right[0]
    factor = jnp.exp(-jnp.abs(difference))
    exponentials = jnp.where(
        difference > 0, left[1] + right[1] * factor, left[1] * factor + right[1]
    )
    return jnp.maximum(left[0], right[0]), exponentials, left[2] + right[2], left[3] + right[3]


def _less_label(probabilities, classes, targets, options, num_classes):
    """The gradient of `token_losses` with respect to the logits, p - q."""
    label = smoothed_label(options.smoothing, options.convention, num_classes)
    expected = jnp.where(classes == targets, label.target, label.other)
    gradients = probabilities - expected.astype(probabilities.dtype)
    if options.convention == "non_pad_kl":
        gradients = jnp.where(classes == options.pad_id, gradients + label.other, gradients)
        gradients = jnp.where(targets == options.pad_id, 0, gradients)
    return gradients
