"""The layer norm of a sub-layer's sum in one kernel for NVIDIA GPUs, in Pallas' Mosaic dialect.

A program is a warpgroup: four warps, each of which holds one row in registers.

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
from jax.sharding import PartitionSpec

from flaxformer_mt.model.kernels.attention_blocks import padded
from flaxformer_mt.model.kernels.mosaic import launch, mosaic_gpu
from flaxformer_mt.model.logical_axes import dividing_axes, on_each_device

ROWS = 4
"""Rows that a program holds at once, one in each warp."""
STEPS = 8
"""How many times as many rows one program of the backward pass adds up the column sums of."""


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


def _forward_on_device(
    options: NormOptions, x: Array, y: Array, parameters: Array, draw: Array
) -> tuple[Array, ...]:
    """Computes the norm and the sum, [B, T, D]."""
    rows = _rows(x)
    results = launch(
        _forward_kernel,
        options,
        out_type=[jax.ShapeDtypeStruct(rows.shape, x.dtype)] * 2,
        grid=(len(rows) // ROWS,),
        kernel_name="residual_norm_forward",
        grid_names=("program",),
    )(rows, _rows(y), parameters, draw)
    return tuple(_unpadded(result, x) for result in results)


def _backward_on_device(options: NormOptions, total: Array, *arrays: Array) -> tuple[Array, ...]:
    """Computes the gradients of x, of y, and of the parameters, float32 [1, 3, D].

    There is a gradient of the norm for each of its uses; they are added up.
    """
    *gradients, parameters, draw = arrays
    rows = _rows(total)
    blocks, columns = len(rows) // ROWS, rows.shape[1]
    steps = next(n for n in range(STEPS, 0, -1) if blocks % n == 0)
    like_x = jax.ShapeDtypeStruct(rows.shape, total.dtype)
    sums = jax.ShapeDtypeStruct((blocks // steps, 3, columns), jnp.float32)
    of_x, of_y, of_parameters = launch(
        _backward_kernel,
        options,
        out_type=[like_x, like_x, sums],
        grid=(blocks // steps,),
        kernel_name="residual_norm_backward",
        grid_names=("program",),
    )(rows, [_rows(g) for g in gradients], parameters, draw)
    return (
        _unpadded(of_x, total),
        _unpadded(of_y, total),
        jnp.sum(of_parameters, 0)[None],
    )


def _rows(x: Array) -> Array:
    """[B, T, D] to [N, D], with rows of zeros appended to those of the last program."""
    return padded(x.reshape(-1, x.shape[-1]), 0, ROWS)


def _unpadded(rows: Array, like: Array) -> Array:
    return rows[: like.size // like.shape[-1]].reshape(like.shape)


class Half(NamedTuple):
    """The left or right half of the columns of a program's rows, [4, D / 2].

    The random numbers of the two halves are different words.
    """

    first_row: Any
    number: int
    """0 or 1."""
    columns: int
    """D / 2."""

    @property
    def layout(self) -> Any:
        """Each lane of a warp has up to four neighboring columns, then the next lane's follow."""
        width = min(self.columns // 32, 4)
        tiling = mosaic_gpu.Tiling(((ROWS, 32 * width), (width,)))
        return mosaic_gpu.Layout.TILED(tiling, (-3,), (-2,), -1)

    @property
    def place(self) -> Any:
        """The index of the columns."""
        return pl.ds(self.number * self.columns, self.columns)

    def load(self, reference: Any) -> Array:
        """Loads this part of [N, D] to float32."""
        block = reference.at[pl.ds(self.first_row, ROWS), self.place]
        return mosaic_gpu.load(block, layout=self.layout, optimized=False).astype(jnp.float32)

    def store(self, reference: Any, x: Array) -> None:
        """Stores this part of [N, D] in the dtype of the reference."""
        block = reference.at[pl.ds(self.first_row, ROWS), self.place]
        block[...] = x.astype(reference.dtype)

    def parameter(self, parameters: Any, number: int) -> Array:
        """Loads a row of the parameters [3, D] for each of the program's rows."""
        row = parameters.at[number, self.place]
        row = mosaic_gpu.load(row, layout=self.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row, (ROWS, self.columns), [1])

    def of_rows(self, vector: Array) -> Array:
        """Repeats a number of each row for its columns."""
        return lax.broadcast_in_dim(vector, (ROWS, self.columns), [0])

    def iota(self, axis: int) -> Array:
        """Returns the number of each row (axis 0), or of each column."""
        shape = ROWS, self.columns
        return mosaic_gpu.broadcasted_iota(jnp.uint32, shape, axis, layout=self.layout)

    def zeros(self) -> Array:
        """Returns zeros in this layout."""
        return mosaic_gpu.layout_cast(jnp.zeros((ROWS, self.columns), jnp.float32), self.layout)


def _halves(first_row: Any, columns: int) -> list[Half]:
    return [Half(first_row, number, columns // 2) for number in range(2)]


def _forward_kernel(options, x, y, parameters, draw, out, total):
    halves = _halves(lax.axis_index("program") * ROWS, x.shape[1])
    sums = []
    for half, factor in zip(halves, _dropout_factors(options, draw, halves), strict=True):
        added = (half.load(y) + half.parameter(parameters, 0)) * factor
        # The norm is that of the values which the backward pass will read.
        rounded = (half.load(x) + added).astype(total.dtype)
        half.store(total, rounded)
        sums.append(rounded.astype(jnp.float32))
    for half, (normalized, _) in zip(halves, _normalized(options, halves, sums), strict=True):
        scale, shift = half.parameter(parameters, 1), half.parameter(parameters, 2)
        half.store(out, normalized * scale + shift)


def _backward_kernel(options, total, gradients, parameters, draw, of_x, of_y, sums):
    (rows, columns), programs = total.shape, sums.shape[0]
    program, steps = lax.axis_index("program"), rows // (programs * ROWS)

    def add_rows(step: Any, sums: list[list[Array]]) -> list[list[Array]]:
        halves = _halves((program * steps + step) * ROWS, columns)
        factors = _dropout_factors(options, draw, halves)
        normalized = _normalized(options, halves, [half.load(total) for half in halves])
        outer = [functools.reduce(lax.add, map(half.load, gradients)) for half in halves]
        inner = [g * half.parameter(parameters, 1) for g, half in zip(outer, halves, strict=True)]
        mean = _row_sums(inner) / columns
        products = [g * n for g, (n, _) in zip(inner, normalized, strict=True)]
        along = _row_sums(products) / columns
        for i, half in enumerate(halves):
            values, inverse_std = normalized[i]
            of_total = (inner[i] - half.of_rows(mean) - values * half.of_rows(along)) * inverse_std
            of_added = of_total * factors[i]
            half.store(of_x, of_total)
            half.store(of_y, of_added)
            new = of_added, outer[i] * values, outer[i]
            sums[i] = [old + g for old, g in zip(sums[i], new, strict=True)]
        return sums

    halves = _halves(0, columns)
    zeros = [[half.zeros()] * 3 for half in halves]
    for half, of_parameters in zip(halves, lax.fori_loop(0, steps, add_rows, zeros), strict=True):
        for number, of_rows in enumerate(of_parameters):
            sums.at[program, number, half.place][...] = jnp.sum(of_rows, axis=0)


def _row_sums(halves: list[Array]) -> Array:
    left, right = halves
    return jnp.sum(left, axis=1) + jnp.sum(right, axis=1)


def _normalized(
    options: NormOptions, halves: list[Half], values: list[Array]
) -> list[tuple[Array, Array]]:
    """Returns the normalized values of each half of the columns, and 1 / standard deviation."""
    columns = 2 * halves[0].columns
    mean = _row_sums(values) / columns
    centered = [x - half.of_rows(mean) for x, half in zip(values, halves, strict=True)]
    variance = _row_sums([x * x for x in centered]) / columns
    inverse_std = halves[0].of_rows(lax.rsqrt(variance + options.epsilon))
    return [(x * inverse_std, inverse_std) for x in centered]


def _dropout_factors(options: NormOptions, draw: Any, halves: list[Half]) -> list[Any]:
    """Returns the factors of the left and of the right half of the columns.

    The random numbers are those of `random_uint16`: each word has those of two neighboring columns.
    (The compiler computes it once for both.)
    """
    if not options.threshold:
        return [1.0, 1.0]
    half = halves[0]
    blocks, column = half.columns // 2, half.iota(1)
    row = draw[2] + half.first_row.astype(jnp.uint32) + half.iota(0)
    counter = row * jnp.uint32(blocks) + (column >> jnp.uint32(1))
    shift = (column & jnp.uint32(1)) * jnp.uint32(16)
    kept = 1 / (1 - options.threshold / 2**16)

    def factors(word: Array) -> Array:
        numbers = (word >> shift) & jnp.uint32(0xFFFF)
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
