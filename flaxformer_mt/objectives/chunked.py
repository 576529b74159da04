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
from flaxformer_mt.model.numerics import at_least_float32, soft_cap
from flaxformer_mt.model.transformer import OutputFactors
from flaxformer_mt.objectives.losses import (
    Convention,
    is_correct,
    smoothed_label,
    token_losses,
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
    def loss_weight(self) -> float:
        """The factor of the cross-entropy beside it."""

    @property
    def passes(self) -> int:
        """How many consecutive rows are predictions of the same row with different dropout."""

    def __call__(self, chunk: Chunk) -> tuple[Array, Array]:
        """Computes the term of each position of a chunk, and its gradient.

        Returns:
          The terms [N / passes] of the first predictions, without `chunk.weights`, by which they
          are multiplied; and the gradient of their sum with respect to `chunk.logits`.
        """


class CrossEntropyOptions(NamedTuple):
    """The static arguments of `chunked_cross_entropy`."""

    smoothing: float = 0.0  # of the labels, as for `token_losses`; so are the next two
    convention: Convention = "uniform"
    pad_id: int = 0
    term: Term | None = None  # added to the cross-entropy
    z_loss: float = 0.0  # the factor of the squared logarithm of the partition function

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the fields of `ChunkedSums` that a pass over the chunks computes."""
        names = ["objective", "correct"]
        names += ["loss", "term"] if self.term else ["loss"] if self.z_loss else []
        return (*names, "z_loss") if self.z_loss else tuple(names)


class ChunkedSums(NamedTuple):
    """Weighted sums over the target tokens, in float32, or float64 if the vectors are.

    All are differentiable with respect to vectors, table, bias and weights. Gradients of other sums
    than `objective` cost a second pass.
    """

    objective: Array
    """`term.loss_weight` * `loss` + `term.weight` * `term` + the factor of `z_loss` times it."""
    loss: Array  # the cross-entropy with smoothed labels
    correct: Array
    """The positions where no class has a higher logit than the target."""
    weights: Array  # the sum of the weights
    term: Array | None = None  # the term, if there is one
    z_loss: Array | None = None
    """The squared logarithms of the partition function, if they have a factor."""


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
    vectors, table, bias, scale, cap = factors
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

    of_teacher = None if teacher is None else teacher[:3]
    teacher_scale = (1.0, 0.0) if teacher is None else teacher[3:]
    static = _Static(options, (scale, cap), teacher_scale, by_rows=platform != "cpu")
    rows = jax.tree.map(split, (vectors, targets, weights, of_teacher and of_teacher[0]))
    tables = table, bias, of_teacher and of_teacher[1:]
    if shards == 1:
        # With an axis of one shard, CPUs would make a transposed copy of all gradients.
        vectors, *labels = jax.tree.map(lambda x: x[0], rows)
        results = _sum_over_chunks(vectors, *tables, tuple(labels), static)
    else:
        vectors, *labels = rows
        results = _sum_over_shards(vectors, *tables, tuple(labels), static)
    sums = dict(zip(options.sums, results, strict=True))
    return ChunkedSums(**{"loss": sums["objective"], **sums, "weights": jnp.sum(weights)})


class _Static(NamedTuple):
    options: CrossEntropyOptions
    scale: tuple[float, float]
    """By which the products of vectors and table are multiplied, and the cap of the results."""
    teacher_scale: tuple[float, float]
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
        of_chunk, *_ = _sums_and_gradients(rows, tables, labels, static, len(table), {})
        return jax.tree.map(jnp.add, sums, of_chunk), None

    return lax.scan(add, _zeros(vectors, static), (vectors, labels))[0]


def _differentiate_chunks(vectors, table, bias, teacher, labels, static, cotangents):
    """The sums, and the gradients of their mixture with factors `cotangents`.

    The gradients are those with respect to vectors, table, bias and weights.
    """
    tables = _computed_tables(table, bias, teacher, vectors.dtype, static)
    factors = tables[0]
    axes = "nv" if static.by_rows else "vn"

    def add(sums, chunk):
        rows, labels = chunk
        of_chunk, gradients, of_weights = _sums_and_gradients(
            rows, tables, labels, static, len(table), cotangents
        )
        of_bias = None
        if bias is not None:
            of_bias = jnp.sum(gradients, axis=0 if static.by_rows else 1).astype(bias.dtype)
        gradients = gradients.astype(rows.dtype)
        operands = gradients, rows
        if not static.by_rows:
            operands = _widened(table.dtype, *operands)
        of_table = jnp.einsum(f"{axes},nd->vd", *operands, preferred_element_type=table.dtype)
        of_rows = jnp.einsum(f"{axes},vd->nd", gradients, factors[0])
        sums = jax.tree.map(jnp.add, sums, (of_chunk, of_table, of_bias))
        return sums, (of_rows, of_weights)

    of_factors = [
        None if factor is None else jnp.zeros(factor.shape, table.dtype) for factor in factors
    ]
    (sums, *of_factors), (of_vectors, of_weights) = lax.scan(
        add, (_zeros(vectors, static), *of_factors), (vectors, labels)
    )
    of_table, of_bias = jax.tree.map(lambda gradient: gradient[: len(table)], of_factors)
    return sums, (of_vectors, of_table, of_bias, of_weights)


def _zeros(vectors, static):
    zero = jnp.zeros((), at_least_float32(vectors.dtype))
    return (zero,) * len(static.options.sums)


def _make_differentiable(sums, differentiate):
    """Defines the gradient of a function by one that computes sums and gradients together."""

    def forward(vectors, table, bias, teacher, labels, static):
        inputs = jax.tree.map(lambda x: x.value, (vectors, table, bias, teacher, labels))
        results, gradients = differentiate(*inputs, static, {"objective": 1.0})
        return results, (gradients, inputs)

    def backward(static, kept, cotangents):
        gradients, inputs = kept
        named = {
            name: cotangent
            for name, cotangent in zip(static.options.sums, cotangents, strict=True)
            if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
        }
        if named.keys() == {"objective"}:  # As in training: its gradients have been computed.
            scaled = jax.tree.map(lambda g: g * named["objective"].astype(g.dtype), gradients)
        else:
            _, scaled = differentiate(*inputs, static, named)
        of_vectors, of_table, of_bias, of_weights = scaled
        return of_vectors, of_table, of_bias, None, (None, of_weights, None)

    sums.defvjp(forward, backward, symbolic_zeros=True)


_make_differentiable(_sum_over_chunks, _differentiate_chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sum_over_shards(vectors, table, bias, teacher, labels, static):
    """The same for vectors [shards, chunks, N, D], with a shard of the rows on each device.

    Each has its own sums, which are added over devices once, not for each chunk.
    """

    def sums(vectors, labels):
        return _sum_over_chunks(vectors, table, bias, teacher, labels, static)

    return jax.tree.map(jnp.sum, jax.vmap(sums)(vectors, labels))


def _differentiate_shards(vectors, table, bias, teacher, labels, static, cotangents):
    def differentiate(vectors, labels):
        return _differentiate_chunks(vectors, table, bias, teacher, labels, static, cotangents)

    sums, gradients = jax.vmap(differentiate)(vectors, labels)
    of_vectors, *of_factors, of_weights = gradients
    of_factors = jax.tree.map(_sum_over_devices, of_factors)
    return jax.tree.map(jnp.sum, sums), (of_vectors, *of_factors, of_weights)


_make_differentiable(_sum_over_shards, _differentiate_shards)


def _sum_over_devices(gradient):
    """Adds up the gradients [shards, V, ...] of a parameter, first over fsdp: it shards the sum.

    In one sum over all devices, compilers for TPUs would leave the whole parameter on each.
    """
    sums = jnp.sum(gradient.reshape(*_row_axis_sizes(), *gradient.shape[1:]), axis=-gradient.ndim)
    if gradient.ndim == 3:
        sums = constrain(sums, "lookup_batch", "vocabulary", "lookup_embed")
    return jnp.sum(sums, axis=0)


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
    factor, cap = scale
    logits = soft_cap(logits * factor, cap)
    return logits.astype(vectors.dtype) if by_rows else logits


def _sums_and_gradients(vectors, tables, labels, static, num_classes, cotangents):
    """The sums of a chunk in the order of `CrossEntropyOptions.sums`, and two gradients.

    The gradients are those of the mixture of the sums with factors `cotangents`, by name: with
    respect to the products of vectors and table, before they are scaled, and to the weights.
    """
    factors, of_teacher = tables
    targets, weights, teacher_vectors = labels
    options, by_rows = static.options, static.by_rows
    logits = _logits(vectors, factors, static.scale, by_rows)
    predict = _of_rows if by_rows else _of_columns
    losses, correct, of_logits, chunk = predict(logits, targets, weights, options, num_classes)
    values = {"loss": losses, "correct": correct.astype(losses.dtype)}
    gradients = {"loss": of_logits}
    in_objective = {"loss": options.term.loss_weight if options.term else 1.0}
    if options.term is not None:
        if of_teacher is not None:
            teacher_vectors = teacher_vectors.astype(vectors.dtype)
            teacher_logits = _logits(teacher_vectors, of_teacher, static.teacher_scale, by_rows)
            chunk = chunk._replace(teacher_logits=teacher_logits.astype(weights.dtype))
        each, gradients["term"] = options.term(chunk)
        # A term of two predictions has one value for both.
        values["term"] = jnp.pad(each, (0, len(weights) - len(each)))
        in_objective["term"] = options.term.weight
    if options.z_loss:
        # The difference is the same for all classes.
        logarithms = jnp.take(chunk.logits - chunk.log_probabilities, 0, chunk.axis)
        values["z_loss"] = jnp.square(logarithms)
        gradients["z_loss"] = 2 * jnp.expand_dims(logarithms, chunk.axis) * chunk.probabilities
        in_objective["z_loss"] = options.z_loss

    sums = {name: jnp.sum(each * weights) for name, each in values.items()}
    sums["objective"] = _mixture(in_objective, sums, losses[0])
    mixed = dict(cotangents)
    if "objective" in mixed:
        of_objective = mixed.pop("objective")
        for name, factor in in_objective.items():
            mixed[name] = mixed.get(name, 0.0) + factor * of_objective
    of_products = _mixture(mixed, gradients, of_logits)
    scale, cap = static.scale
    if cap:
        of_products = of_products * (1 - jnp.square(chunk.logits / cap))
    factor = scale * weights
    of_products = of_products * (factor[:, None] if by_rows else factor)
    of_weights = _mixture(mixed, values, losses)
    return tuple(sums[name] for name in options.sums), of_products, of_weights


def _mixture(factors, arrays, like):
    """The sum of the arrays that have a factor, multiplied by it: an array like `like`."""
    terms = [
        arrays[name] if isinstance(factor, float) and factor == 1 else factor * arrays[name]
        for name, factor in factors.items()
        if name in arrays
    ]
    return functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(like)


def _of_columns(logits, targets, weights, options, num_classes):
    """Losses [N], correct predictions [N], their gradient, and the chunk of logits [V, N]."""
    losses = token_losses(
        logits, targets, options.smoothing, options.convention, options.pad_id, axis=0
    )
    correct = is_correct(logits, targets, axis=0)
    classes = jnp.arange(num_classes, dtype=targets.dtype)[:, None]
    probabilities = jax.nn.softmax(logits, axis=0)
    gradients = _less_label(probabilities, classes, targets, options, num_classes)
    log_probabilities = jax.nn.log_softmax(logits, axis=0)
    chunk = Chunk(logits, None, probabilities, log_probabilities, weights, None, axis=0)
    return losses, correct, gradients, chunk


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
    probabilities = jnp.exp(logits - highest[:, None]) / exponentials[:, None]
    probabilities = jnp.where(is_class, probabilities, 0)
    gradients = _less_label(probabilities, classes, targets, options, num_classes)
    log_probabilities = logits - (highest + jnp.log(exponentials))[:, None]
    chunk = Chunk(logits, is_class, probabilities, log_probabilities, weights, None, axis=1)
    return losses, target >= highest, gradients, chunk


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
