"""The cross-entropy over a vocabulary, computed in chunks that are discarded after use."""

import functools
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from flaxformer_mt.data.stream.placement import ROW_AXES
from flaxformer_mt.model.logical_axes import constrain, mesh_platform
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.model.transformer import OutputFactors
from flaxformer_mt.objectives.losses import (
    Convention,
    accuracy,
    label_smoothed_cross_entropy,
    smoothed_label,
)

MAX_CHUNK_LOGITS = {"cpu": 2**22, "gpu": 2**29, "tpu": 2**27}
"""The size of a chunk by platform: what fits into a CPU's caches, a GiB of bfloat16 on GPUs, where
each chunk reads and writes the sum of the table's gradients again, or some hundred MiB on TPUs."""


class Chunk(NamedTuple):
    """The predictions at N positions, as a `Term` reads them."""

    logits: Array
    """[V, N] on CPUs; [N, V] on other devices, where padding follows the classes."""
    is_class: Array | None
    """Which logits are of classes, broadcastable to `logits`; None if all are."""
    probabilities: Array  # 0 in padding
    log_probabilities: Array  # any finite number in padding
    weights: Array  # [N], those of the target tokens
    teacher_logits: Array | None
    """Those of the teacher, if there is one, as `logits`."""
    axis: int  # of the classes


class Term(Protocol):
    """A term that an objective adds to the cross-entropy; hashable, since it is static."""

    @property
    def name(self) -> str:
        """The name of its metric."""

    @property
    def weight(self) -> float:
        """The factor of the term in the objective."""

    @property
    def passes(self) -> int:
        """How many consecutive rows are predictions of the same row with different dropout."""

    def __call__(self, chunk: Chunk) -> tuple[Array, Array]:
        """Computes the sum of the term over a chunk, and its gradient.

        Returns:
          The sum, weighted by `chunk.weights`; the gradient of the term of each position with
          respect to `chunk.logits`, without these weights.
        """


class CrossEntropyOptions(NamedTuple):
    """The static arguments of `chunked_cross_entropy`."""

    smoothing: float = 0.0  # of the labels, as for `token_losses`; so are the next two
    convention: Convention = "uniform"
    pad_id: int = 0
    weight: float = 1.0  # the factor of the cross-entropy in the objective
    term: Term | None = None  # added to the cross-entropy


class ChunkedSums(NamedTuple):
    """Weighted sums over the target tokens, in float32, or float64 if the vectors are."""

    objective: Array
    """`weight` * `loss` + `term.weight` * `term`; the only differentiable sum."""
    loss: Array  # the cross-entropy with smoothed labels
    correct: Array
    """The positions where no class has a higher logit than the target."""
    term: Array | None  # the term, if there is one
    weights: Array  # the sum of the weights


def chunked_cross_entropy(
    factors: OutputFactors,
    targets: ArrayLike,
    weights: ArrayLike,
    options: CrossEntropyOptions,
    teacher: OutputFactors | None = None,
    max_chunk_logits: int = 0,
) -> ChunkedSums:
    """Sums losses and correct predictions without materializing all logits.

    The logits are computed in chunks of columns, with their gradient in the same pass, and then
    discarded: they would be by far the largest array of training, and writing and reading them took
    a sixth of its time on CPUs (docs/speed.md).

    GPUs and TPUs, whose time goes into moving the logits, round them to the dtype of the vectors
    (losses and gradients are computed from them in float32) and read them twice: once for all sums,
    once for the gradients; with a term once more. CPUs keep them in float32 at least.

    Args:
      factors: the factors of the logits.
      targets: int32 [B, T].
      weights: [B, T], 0 where there is no target.
      options: the arguments of `label_smoothed_cross_entropy`, and a term.
      teacher: the factors of another model's logits, for the term; they have no gradient.
      max_chunk_logits: the size of a chunk, which has at least one column; 0 = a default for the
        platform.
    """
    vectors, table, bias, scale = factors
    targets = jnp.asarray(targets)
    weights = jnp.asarray(weights, at_least_float32(vectors.dtype))
    platform = mesh_platform()
    max_logits = max_chunk_logits or MAX_CHUNK_LOGITS[platform]
    length = targets.shape[1]
    shards = math.prod(_row_axis_sizes())
    batch = len(targets) // shards
    columns = next(
        number
        for number in range(length, 0, -1)
        if number == 1 or (length % number == 0 and batch * number * table.shape[0] <= max_logits)
    )
    passes = options.term.passes if options.term else 1

    def split(x: Array) -> Array:
        """[B, T, ...] to [shards, chunks, rows * columns, ...]: chunks have columns of all rows.

        In a chunk, all second predictions follow all first ones.
        """
        chunks = x.reshape(shards, batch // passes, passes, -1, columns, *x.shape[2:])
        chunks = jnp.moveaxis(chunks, (3, 2), (1, 2))
        return chunks.reshape(shards, -1, batch * columns, *x.shape[2:])

    of_teacher, teacher_scale = None, 1.0
    if teacher is not None:
        of_teacher, teacher_scale = teacher[:3], teacher.scale
    static = _Static(options, scale, teacher_scale, by_rows=platform != "cpu")
    rows = jax.tree.map(split, (vectors, targets, weights, of_teacher and of_teacher[0]))
    tables = table, bias, of_teacher and of_teacher[1:]
    if shards == 1:
        # With an axis of one shard, CPUs would make a transposed copy of all gradients.
        vectors, *labels = jax.tree.map(lambda x: x[0], rows)
        objective, *others = _sum_over_chunks(vectors, *tables, tuple(labels), static)
    else:
        vectors, *labels = rows
        objective, *others = _sum_over_shards(vectors, *tables, tuple(labels), static)
    correct, loss, term = others if options.term else (*others, objective, None)
    return ChunkedSums(objective, loss, correct, term, jnp.sum(weights))


class _Static(NamedTuple):
    options: CrossEntropyOptions
    scale: float
    teacher_scale: float
    by_rows: bool
    """Whether the logits of a chunk are [N, V] instead of [V, N]: CPUs sum much faster over columns
    than along rows, on other devices the classes have to be contiguous."""


def _row_axis_sizes() -> list[int]:
    mesh = jax.sharding.get_abstract_mesh()
    # Under pmap the axis exists, too, but a device sees only its own rows.
    return [mesh.shape[axis] for axis in ROW_AXES if axis in mesh.auto_axes]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sum_over_chunks(vectors, table, bias, teacher, labels, static):
    """The sums of vectors [chunks, N, D]; targets, weights and teacher's vectors [chunks, N, ...].

    `teacher` has the table and the bias of the teacher, or is None.
    """
    tables = _computed_tables(table, bias, teacher, vectors.dtype, static)

    def add(sums, chunk):
        rows, labels = chunk
        metrics, _ = _metrics_and_gradients(rows, tables, labels, static, len(table))
        return jax.tree.map(jnp.add, sums, metrics), None

    return lax.scan(add, _zeros(vectors, static), (vectors, labels))[0]


def _forward(vectors, table, bias, teacher, labels, static):
    tables = _computed_tables(table, bias, teacher, vectors.dtype, static)
    factors = tables[0]
    axes = "nv" if static.by_rows else "vn"

    def add(sums, chunk):
        rows, labels = chunk
        metrics, gradients = _metrics_and_gradients(rows, tables, labels, static, len(table))
        of_bias = None
        if bias is not None:
            of_bias = jnp.sum(gradients, axis=0 if static.by_rows else 1).astype(bias.dtype)
        gradients = gradients.astype(rows.dtype)
        operands = gradients, rows
        if not static.by_rows:
            operands = _widened(table.dtype, *operands)
        of_table = jnp.einsum(f"{axes},nd->vd", *operands, preferred_element_type=table.dtype)
        of_rows = jnp.einsum(f"{axes},vd->nd", gradients, factors[0])
        return jax.tree.map(jnp.add, sums, (metrics, of_table, of_bias)), of_rows

    of_factors = [
        None if factor is None else jnp.zeros(factor.shape, table.dtype) for factor in factors
    ]
    (metrics, *sums), of_vectors = lax.scan(
        add, (_zeros(vectors, static), *of_factors), (vectors, labels)
    )
    return metrics, (of_vectors, *jax.tree.map(lambda gradient: gradient[: len(table)], sums))


def _zeros(vectors, static):
    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    return (zero,) * (4 if static.options.term else 2)


def _backward(static, gradients, cotangents):
    del static  # It is in the gradients.
    scaled = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients)
    return *scaled, None, None


_sum_over_chunks.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sum_over_shards(vectors, table, bias, teacher, labels, static):
    """The same for vectors [shards, chunks, N, D], with a shard of the rows on each device.

    Each has its own sums, which are added over devices once, not for each chunk.
    """

    def sums(vectors, labels):
        return _sum_over_chunks(vectors, table, bias, teacher, labels, static)

    return jax.tree.map(jnp.sum, jax.vmap(sums)(vectors, labels))


def _forward_of_shards(vectors, table, bias, teacher, labels, static):
    def forward(vectors, labels):
        return _forward(vectors, table, bias, teacher, labels, static)

    metrics, (of_vectors, *of_factors) = jax.vmap(forward)(vectors, labels)
    sums = jax.tree.map(_sum_over_devices, of_factors)
    return jax.tree.map(jnp.sum, metrics), (of_vectors, *sums)


def _sum_over_devices(gradient):
    """Adds up the gradients [shards, V, ...] of a parameter, first over fsdp: it shards the sum.

    In one sum over all devices, compilers for TPUs would leave the whole parameter on each.
    """
    sums = jnp.sum(gradient.reshape(*_row_axis_sizes(), *gradient.shape[1:]), axis=-gradient.ndim)
    if gradient.ndim == 3:
        sums = constrain(sums, "lookup_batch", "vocabulary", "lookup_embed")
    return jnp.sum(sums, axis=0)


_sum_over_shards.defvjp(_forward_of_shards, _backward)


def _computed_tables(table, bias, teacher, dtype, static):
    """The tables and biases of the model and the teacher as products take them.

    With `by_rows`, zeros pad the vocabulary to a multiple of 128: otherwise GPUs would make a
    padded copy of the logits for each product.
    """
    padding = -len(table) % 128 if static.by_rows else 0

    def padded(table, bias):
        table = jnp.pad(table.astype(dtype), ((0, padding), (0, 0)))
        if bias is not None:
            bias = jnp.pad(bias.astype(at_least_float32(dtype)), (0, padding))
        return table, bias

    return padded(table, bias), None if teacher is None else padded(*teacher)


def _widened(dtype, *arrays):
    """Returns bfloat16 operands in the dtype of their product, to which CPUs cannot multiply them.

    XLA has such a product for some layouts only, unless it is compiled with other flags.
    """
    return tuple(array.astype(dtype) for array in arrays)


def _logits(vectors, factors, scale, by_rows):
    """The logits [V, N], or [N, V] in the dtype of the vectors."""
    table, bias = factors
    dtype = at_least_float32(vectors.dtype)
    logits = jnp.einsum(
        "nd,vd->nv" if by_rows else "vd,nd->vn",
        *((vectors, table) if by_rows else _widened(dtype, table, vectors)),
        preferred_element_type=dtype,
    )
    if bias is not None:
        logits = logits + (bias if by_rows else bias[:, None])
    logits = logits * scale
    return logits.astype(vectors.dtype) if by_rows else logits


def _metrics_and_gradients(vectors, tables, labels, static, num_classes):
    """The sums of a chunk in the order of `ChunkedSums`, and a gradient.

    The gradient is that with respect to the products of vectors and table, before they are scaled.
    """
    factors, of_teacher = tables
    targets, weights, teacher_vectors = labels
    options, by_rows = static.options, static.by_rows
    logits = _logits(vectors, factors, static.scale, by_rows)
    predict = _of_rows if by_rows else _of_columns
    loss, correct, gradients, chunk = predict(logits, targets, weights, options, num_classes)
    if options.weight != 1:
        gradients = options.weight * gradients
    sums: tuple[Array, ...] = loss, correct
    if options.term is not None:
        if of_teacher is not None:
            teacher_vectors = teacher_vectors.astype(vectors.dtype)
            teacher_logits = _logits(teacher_vectors, of_teacher, static.teacher_scale, by_rows)
            chunk = chunk._replace(teacher_logits=teacher_logits.astype(weights.dtype))
        term, of_logits = options.term(chunk)
        gradients = gradients + options.term.weight * of_logits
        objective = options.weight * loss + options.term.weight * term
        sums = objective, correct, loss, term
    factor = static.scale * weights
    return sums, gradients * (factor[:, None] if by_rows else factor)


def _of_columns(logits, targets, weights, options, num_classes):
    """Loss, correct predictions, gradient and chunk of logits [V, N]."""
    loss, _ = label_smoothed_cross_entropy(
        logits, targets, weights, options.smoothing, options.convention, options.pad_id, axis=0
    )
    correct, _ = accuracy(logits, targets, weights, axis=0)
    classes = jnp.arange(num_classes, dtype=targets.dtype)[:, None]
    probabilities = jax.nn.softmax(logits, axis=0)
    gradients = _less_label(probabilities, classes, targets, options, num_classes)
    log_probabilities = jax.nn.log_softmax(logits, axis=0)
    chunk = Chunk(logits, None, probabilities, log_probabilities, weights, None, axis=0)
    return loss, correct, gradients, chunk


def _of_rows(logits, targets, weights, options, num_classes):
    """The same of logits [N, V], of which the first `num_classes` are of classes."""
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
    label = smoothed_label(smoothing, convention, num_classes, pad_id)
    losses = highest + jnp.log(exponentials) - label.expected_logit(target, total) - label.entropy
    if convention == "non_pad_kl":
        losses = jnp.where(targets[:, 0] == pad_id, 0, losses)
    loss = jnp.sum(losses * weights)
    correct = jnp.sum(jnp.where(target >= highest, weights, 0))
    probabilities = jnp.exp(logits - highest[:, None]) / exponentials[:, None]
    probabilities = jnp.where(is_class, probabilities, 0)
    gradients = _less_label(probabilities, classes, targets, options, num_classes)
    log_probabilities = logits - (highest + jnp.log(exponentials))[:, None]
    chunk = Chunk(logits, is_class, probabilities, log_probabilities, weights, None, axis=1)
    return loss, correct, gradients, chunk


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
    label = smoothed_label(options.smoothing, options.convention, num_classes, options.pad_id)
    expected = jnp.where(classes == targets, label.target, label.other)
    gradients = probabilities - expected.astype(probabilities.dtype)
    if options.convention == "non_pad_kl":
        gradients = jnp.where(classes == options.pad_id, gradients + label.other, gradients)
        gradients = jnp.where(targets == options.pad_id, 0, gradients)
    return gradients
