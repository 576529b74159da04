"""The layer norm of a sub-layer's sum in one kernel for NVIDIA GPUs, in Pallas' Triton dialect.

`residual_norm` is a differentiable function of arrays that a mesh may shard. Importers do so where
they call it, because importing Pallas takes a quarter of a second.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from flaxformer_mt.model.logical_axes import dividing_axes, on_each_device

BLOCK_VALUES = 2**12
"""Values of the rows of one program."""
BACKWARD_BLOCKS = 4
"""Blocks of rows whose column sums one program adds up."""


class NormOptions(NamedTuple):
    """The static options of the norm of a sum."""

    epsilon: float
    """Of the norm."""
    threshold: int
    """A value is dropped if its random number of 16 bits is below it."""
    interpret: bool
    """Whether the kernels are interpreted, as on CPUs."""
    uses: int
    """How many operations use the result: the kernel adds up their gradients."""


class NormInputs(NamedTuple):
    """The arrays."""

    x: Array
    """[B, T, D], the residual."""
    y: Array
    """[B, T, D], the output of the sub-layer."""
    bias: Array | None
    """[D], added to `y` before dropout."""
    scale: Array
    """[D], of the norm."""
    shift: Array
    """[D], of the norm."""
    key: Array | None
    """Of dropout; None without. Threefry takes its first two words, for any generator."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def residual_norm(options: NormOptions, inputs: NormInputs) -> tuple[Array, ...]:
    """Computes norm(x + dropout(y + bias)), with one pass over memory in each direction.

    The backward pass draws the random numbers again, which are those of `random_uint16`. Everything
    is computed in float32; the sum is rounded once.

    Returns:
      [B, T, D], in the dtype of `x`, once for each of its uses.
    """
    return _forward(options, inputs)[0]


def _forward(options: NormOptions, inputs: NormInputs) -> tuple[tuple[Array, ...], Any]:
    x, y, bias, scale, shift, key = inputs
    parameters = [jnp.zeros_like(scale) if bias is None else bias, scale, shift]
    stacked = jnp.stack([parameter.astype(jnp.float32) for parameter in parameters])
    run = functools.partial(_forward_on_device, options)
    normalized, total = _on_rows(run, (x, y), stacked, key, 2)
    return (normalized,) * options.uses, (inputs, stacked, total)


def _backward(
    options: NormOptions, residuals: Any, gradients: tuple[Array, ...]
) -> tuple[NormInputs]:
    (_, _, bias, scale, shift, key), stacked, total = residuals
    run = functools.partial(_backward_on_device, options)
    of_x, of_y, sums = _on_rows(run, (total, *gradients), stacked, key, 3)
    of_bias, of_scale, of_shift = jnp.sum(sums, 0)
    return (
        NormInputs(
            of_x,
            of_y,
            None if bias is None else of_bias.astype(bias.dtype),
            of_scale.astype(scale.dtype),
            of_shift.astype(shift.dtype),
            None,
        ),
    )


residual_norm.defvjp(_forward, _backward)


def _on_rows(
    function: Callable, vectors: tuple[Array, ...], parameters: Array, key: Any, results: int
) -> Any:
    """Lets each device run a function on its rows of `vectors` [B, T, D].

    The function is called as f(*vectors, parameters, draw). `parameters` is float32 [3, D]: the
    bias of y, and the scale and shift of the norm. `draw` is uint32 [3]: two words of the dropout
    key, and the number of the device's first row of D values.
    """
    rows, length, _ = vectors[0].shape
    words = jnp.zeros(2, jnp.uint32) if key is None else jax.random.key_data(key)[:2]

    def with_first_row(numbers: Array, words: Array, *arrays: Array) -> tuple[Array, ...]:
        first = numbers[:1].astype(jnp.uint32) * jnp.uint32(length)
        return function(*arrays, jnp.concatenate([words, first]))

    by_row = PartitionSpec(dividing_axes("batch", rows) or None)
    everywhere = PartitionSpec()
    in_specs = by_row, everywhere, *(by_row for _ in vectors), everywhere
    run = on_each_device(with_first_row, in_specs, (by_row,) * results)
    return run(lax.iota(jnp.int32, rows), words, *vectors, parameters)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _forward_on_device(
    options: NormOptions, x: Array, y: Array, parameters: Array, draw: Array
) -> tuple[Array, ...]:
    """Computes the norm and the sum, [B, T, D]."""
    vectors = _rows(x), _rows(y)
    rows, columns = vectors[0].shape
    block = _block_rows(rows, columns)
    of_rows = pl.BlockSpec((block, columns), lambda i: (i, 0))
    like_x = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    results = pl.pallas_call(
        functools.partial(_forward_kernel, options),
        grid=(rows // block,),
        in_specs=[of_rows, of_rows, *_specs_for_all(columns)],
        out_specs=[of_rows, of_rows],
        out_shape=[like_x, like_x],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=options.interpret,
        name="residual_norm_forward",
    )(*vectors, parameters, draw)
    return tuple(result.reshape(x.shape) for result in results)


def _backward_on_device(options: NormOptions, total: Array, *arrays: Array) -> tuple[Array, ...]:
    """Computes the gradients of x, of y, and of the parameters, float32 [1, 3, D].

    There is a gradient of the norm for each of its uses; they are added up.
    """
    *gradients, parameters, draw = arrays
    rows, columns = _rows(total).shape
    block = _block_rows(rows, columns)
    steps = next(n for n in (BACKWARD_BLOCKS, 2, 1) if rows // block % n == 0)
    programs = rows // block // steps
    of_rows = pl.BlockSpec((block * steps, columns), lambda i: (i, 0))
    like_x = jax.ShapeDtypeStruct((rows, columns), total.dtype)
    of_x, of_y, sums = pl.pallas_call(
        functools.partial(_backward_kernel, options, block),
        grid=(programs,),
        in_specs=[of_rows, [of_rows for _ in gradients], *_specs_for_all(columns)],
        out_specs=[of_rows, of_rows, pl.BlockSpec((None, 3, columns), lambda i: (i, 0, 0))],
        out_shape=[like_x, like_x, jax.ShapeDtypeStruct((programs, 3, columns), jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=options.interpret,
        name="residual_norm_backward",
    )(_rows(total), [_rows(g) for g in gradients], parameters, draw)
    return of_x.reshape(total.shape), of_y.reshape(total.shape), jnp.sum(sums, 0)[None]


def _block_rows(rows: int, columns: int) -> int:
    """Returns the rows of a block: a power of two that divides their number."""
    most = max(BLOCK_VALUES // columns, 1)
    return next(2**i for i in range(most.bit_length() - 1, -1, -1) if rows % 2**i == 0)


def _specs_for_all(columns: int) -> list[pl.BlockSpec]:
    """The blocks of the parameters and of `draw`, which all programs read."""
    return [pl.BlockSpec((3, columns), lambda i: (0, 0)), pl.BlockSpec((3,), lambda i: (0,))]


def _halves(columns: int) -> list[Any]:
    """The left and the right half of the columns, whose random numbers are different words."""
    return [pl.ds(0, columns // 2), pl.ds(columns // 2, columns // 2)]


def _forward_kernel(options, x, y, parameters, draw, out, total):
    rows, columns = x.shape
    factors = _dropout_factors(draw, pl.program_id(0) * rows, rows, columns, options)
    halves = _halves(columns)
    sums = []
    for half, factor in zip(halves, factors, strict=True):
        added = (_wide(y, half) + parameters[0, half][None]) * factor
        # The norm is that of the values which the backward pass will read.
        rounded = (_wide(x, half) + added).astype(total.dtype)
        total[:, half] = rounded
        sums.append(rounded.astype(jnp.float32))
    for half, (normalized, _) in zip(halves, _normalized(sums, columns, options), strict=True):
        values = normalized * parameters[1, half][None] + parameters[2, half][None]
        out[:, half] = values.astype(out.dtype)


def _backward_kernel(options, rows, total, gradients, parameters, draw, of_x, of_y, sums):
    all_rows, columns = total.shape
    halves = _halves(columns)
    partial = [[jnp.zeros((columns // 2,), jnp.float32)] * 3 for _ in halves]
    for step in range(all_rows // rows):
        here = pl.ds(step * rows, rows)
        first = pl.program_id(0) * all_rows + step * rows
        factors = _dropout_factors(draw, first, rows, columns, options)
        normalized = _normalized([_wide(total, half, here) for half in halves], columns, options)
        outer = [sum(_wide(g, half, here) for g in gradients) for half in halves]
        inner = [g * parameters[1, half][None] for g, half in zip(outer, halves, strict=True)]
        mean = _row_sums(inner) / columns
        along = _row_sums([g * n for g, (n, _) in zip(inner, normalized, strict=True)]) / columns
        for i, half in enumerate(halves):
            values, inverse_std = normalized[i]
            of_total = (inner[i] - mean[:, None] - values * along[:, None]) * inverse_std
            of_added = of_total * factors[i]
            of_x[here, half] = of_total.astype(of_x.dtype)
            of_y[here, half] = of_added.astype(of_y.dtype)
            new = of_added, outer[i] * values, outer[i]
            partial[i] = [old + jnp.sum(g, axis=0) for old, g in zip(partial[i], new, strict=True)]
    for half, of_parameters in zip(halves, partial, strict=True):
        for number, column_sums in enumerate(of_parameters):
            sums[number, half] = column_sums


def _wide(reference: Any, columns: Any, rows: Any = slice(None)) -> Array:
    return reference[rows, columns].astype(jnp.float32)


def _row_sums(halves: list[Array]) -> Array:
    left, right = halves
    return jnp.sum(left, axis=1) + jnp.sum(right, axis=1)


def _normalized(
    halves: list[Array], columns: int, options: NormOptions
) -> list[tuple[Array, Array]]:
    """Returns the normalized values of each half of the columns, and 1 / standard deviation."""
    mean = _row_sums(halves) / columns
    centered = [x - mean[:, None] for x in halves]
    variance = _row_sums([x * x for x in centered]) / columns
    inverse_std = lax.rsqrt(variance + options.epsilon)[:, None]
    return [(x * inverse_std, inverse_std) for x in centered]


def _dropout_factors(
    draw: Any, first_row: Any, rows: int, columns: int, options: NormOptions
) -> list[Any]:
    """Returns the factors of the left and of the right half of the columns of some rows.

    The random numbers are those of `random_uint16`.
    """
    if not options.threshold:
        return [1.0, 1.0]
    blocks = columns // 4
    row = draw[2] + jnp.asarray(first_row, jnp.uint32)
    counter = (row + lax.broadcasted_iota(jnp.uint32, (rows, blocks), 0)) * jnp.uint32(blocks)
    counter += lax.broadcasted_iota(jnp.uint32, (rows, blocks), 1)
    kept = 1 / (1 - options.threshold / 2**16)

    def factors(word: Array) -> Array:
        numbers = jnp.stack([word & jnp.uint32(0xFFFF), word >> jnp.uint32(16)], axis=-1)
        numbers = numbers.reshape(rows, columns // 2)
        return jnp.where(numbers >= jnp.uint32(options.threshold), kept, 0.0)

    return [factors(word) for word in _threefry(draw[0], draw[1], counter)]


def _threefry(first: Array, second: Array, counter: Array) -> tuple[Array, Array]:
    """Encrypts the counters (counter, 0) with Threefry-2x32 of 20 rounds (Salmon et al. 2011)."""
    keys = first, second, first ^ second ^ jnp.uint32(0x1BD11BDA)
    x, y = counter + first, jnp.zeros_like(counter) + second
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x += y
            y = (y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))
            y ^= x
        x += keys[(group + 1) % 3]
        y += keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
