"""The kernels for NVIDIA GPUs, in Pallas' Triton dialect."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

BLOCK_VALUES = 2**12
"""Values of the rows of one program."""
BACKWARD_BLOCKS = 4
"""Blocks of rows whose column sums one program adds up."""


def forward(
    x: Array,
    y: Array,
    parameters: Array,
    draw: Array,
    epsilon: float,
    threshold: int,
    interpret: bool,
) -> tuple[Array, Array]:
    """Computes s = x + dropout(y + bias) and its norm.

    Args:
      x: [N, D].
      y: [N, D].
      parameters: float32 [3, D], the bias of y, and the scale and the shift of the norm.
      draw: uint32 [3], the two words of a Threefry key, and the number of the first row.
      epsilon: of the norm.
      threshold: a value is dropped if its random number of 16 bits is below it.
      interpret: for CPUs.

    Returns:
      The norm and s, [N, D].
    """
    rows = block_rows(*x.shape)
    of_rows = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    normalized, total = pl.pallas_call(
        functools.partial(_forward_kernel, epsilon=epsilon, threshold=threshold),
        grid=(x.shape[0] // rows,),
        in_specs=[of_rows, of_rows, _parameters_spec(parameters), _draw_spec()],
        out_specs=[of_rows, of_rows],
        out_shape=[like_x, like_x],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="residual_norm_forward",
    )(x, y, parameters, draw)
    return normalized, total


def backward(
    total: Array,
    gradients: Sequence[Array],
    parameters: Array,
    draw: Array,
    epsilon: float,
    threshold: int,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Computes the gradients of x and of y, and partial sums of those of the parameters.

    Args:
      total: s [N, D].
      gradients: of the norm [N, D], one for each of its uses; they are added up.
      parameters: as for `forward`, and so are the following.
      draw: random numbers.
      epsilon: of the norm.
      threshold: of dropout.
      interpret: for CPUs.

    Returns:
      The gradients of x and y [N, D], and float32 [programs, 3, D]: the sums over the rows of a
      program of the gradients of the bias of y, of the scale and of the shift.
    """
    rows = block_rows(*total.shape)
    blocks = total.shape[0] // rows
    steps = next(n for n in (BACKWARD_BLOCKS, 2, 1) if blocks % n == 0)
    columns = total.shape[1]
    of_rows = pl.BlockSpec((rows * steps, columns), lambda i: (i, 0))
    like_x = jax.ShapeDtypeStruct(total.shape, total.dtype)
    of_x, of_y, sums = pl.pallas_call(
        functools.partial(_backward_kernel, rows=rows, epsilon=epsilon, threshold=threshold),
        grid=(blocks // steps,),
        in_specs=[
            of_rows,
            [of_rows for _ in gradients],
            _parameters_spec(parameters),
            _draw_spec(),
        ],
        out_specs=[of_rows, of_rows, pl.BlockSpec((None, 3, columns), lambda i: (i, 0, 0))],
        out_shape=[
            like_x,
            like_x,
            jax.ShapeDtypeStruct((blocks // steps, 3, columns), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="residual_norm_backward",
    )(total, list(gradients), parameters, draw)
    return of_x, of_y, sums


def block_rows(rows: int, columns: int) -> int:
    """Returns the rows of a block: a power of two that divides their number."""
    most = max(BLOCK_VALUES // columns, 1)
    return next(2**i for i in range(most.bit_length() - 1, -1, -1) if rows % 2**i == 0)


def _parameters_spec(parameters: Array) -> pl.BlockSpec:
    return pl.BlockSpec(parameters.shape, lambda i: (0, 0))


def _draw_spec() -> pl.BlockSpec:
    return pl.BlockSpec((3,), lambda i: (0,))


def _halves(columns: int) -> list[Any]:
    """The left and the right half of the columns, whose random numbers are different words."""
    return [pl.ds(0, columns // 2), pl.ds(columns // 2, columns // 2)]


def _forward_kernel(
    x: Any,
    y: Any,
    parameters: Any,
    draw: Any,
    out: Any,
    total: Any,
    *,
    epsilon: float,
    threshold: int,
) -> None:
    rows, columns = x.shape
    factors = _dropout_factors(draw, pl.program_id(0) * rows, rows, columns, threshold)
    halves = _halves(columns)
    sums = []
    for half, factor in zip(halves, factors, strict=True):
        added = (_wide(y, half) + parameters[0, half][None]) * factor
        # The norm is that of the values which the backward pass will read.
        rounded = (_wide(x, half) + added).astype(total.dtype)
        total[:, half] = rounded
        sums.append(rounded.astype(jnp.float32))
    for half, (normalized, _) in zip(halves, _normalized(sums, columns, epsilon), strict=True):
        values = normalized * parameters[1, half][None] + parameters[2, half][None]
        out[:, half] = values.astype(out.dtype)


def _backward_kernel(
    total: Any, gradients: list[Any], parameters: Any, draw: Any, of_x: Any, of_y: Any, sums: Any,
    *, rows: int, epsilon: float, threshold: int,
) -> None:  # fmt: skip
    all_rows, columns = total.shape
    halves = _halves(columns)
    partial = [[jnp.zeros((columns // 2,), jnp.float32)] * 3 for _ in halves]
    for step in range(all_rows // rows):
        here = pl.ds(step * rows, rows)
        first = pl.program_id(0) * all_rows + step * rows
        factors = _dropout_factors(draw, first, rows, columns, threshold)
        normalized = _normalized([_wide(total, half, here) for half in halves], columns, epsilon)
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


def _normalized(halves: list[Array], columns: int, epsilon: float) -> list[tuple[Array, Array]]:
    """Returns the normalized values of each half of the columns, and 1 / standard deviation."""
    mean = _row_sums(halves) / columns
    centered = [x - mean[:, None] for x in halves]
    variance = _row_sums([x * x for x in centered]) / columns
    inverse_std = lax.rsqrt(variance + epsilon)[:, None]
    return [(x * inverse_std, inverse_std) for x in centered]


def _dropout_factors(
    draw: Any, first_row: Any, rows: int, columns: int, threshold: int
) -> list[Any]:
    """Returns the factors of the left and of the right half of the columns of some rows.

    The random numbers are those of `random_uint16`.
    """
    if not threshold:
        return [1.0, 1.0]
    blocks = columns // 4
    row = draw[2] + jnp.asarray(first_row, jnp.uint32)
    counter = (row + lax.broadcasted_iota(jnp.uint32, (rows, blocks), 0)) * jnp.uint32(blocks)
    counter += lax.broadcasted_iota(jnp.uint32, (rows, blocks), 1)
    kept = 1 / (1 - threshold / 2**16)

    def factors(word: Array) -> Array:
        numbers = jnp.stack([word & jnp.uint32(0xFFFF), word >> jnp.uint32(16)], axis=-1)
        numbers = numbers.reshape(rows, columns // 2)
        return jnp.where(numbers >= jnp.uint32(threshold), kept, 0.0)

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
