"""The norm of a sub-layer's sum, as a differentiable function of arrays that a mesh may shard."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from flaxformer_mt.model.logical_axes import dividing_axes, on_each_device


class Options(NamedTuple):
    """The static options of the norm of a sum."""

    epsilon: float
    """Of the norm."""
    threshold: int
    """A value is dropped if its random number of 16 bits is below it."""
    interpret: bool
    """Whether the kernels are interpreted, as on CPUs."""
    uses: int
    """How many operations use the result: the kernel adds up their gradients."""


class Inputs(NamedTuple):
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
    """Of dropout; None without. Threefry takes its first two words, whatever its generator."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def residual_norm(options: Options, inputs: Inputs) -> tuple[Array, ...]:
    """Computes norm(x + dropout(y + bias)), with one pass over memory in each direction.

    The backward pass draws the random numbers again, which are those of `random_uint16`. Everything
    is computed in float32; the sum is rounded once.

    Returns:
      [B, T, D], in the dtype of `x`, once for each of its uses.
    """
    return _forward(options, inputs)[0]


def supports(width: int, dtype: jnp.dtype) -> bool:
    """Whether the kernels can compute vectors of a width: their blocks are powers of two."""
    return dtype in (jnp.float32, jnp.bfloat16) and width >= 64 and width & (width - 1) == 0


def _forward(options: Options, inputs: Inputs) -> tuple[tuple[Array, ...], Any]:
    def run(x: Array, y: Array, parameters: Array, draw: Array) -> tuple[Array, ...]:
        results = _kernels().forward(_rows(x), _rows(y), parameters, draw, *options[:3])
        return tuple(result.reshape(x.shape) for result in results)

    x, y, bias, scale, shift, key = inputs
    parameters = [jnp.zeros_like(scale) if bias is None else bias, scale, shift]
    stacked = jnp.stack([parameter.astype(jnp.float32) for parameter in parameters])
    normalised, total = _on_rows(run, (x, y), (stacked,), key, 2)
    return (normalised,) * options.uses, (inputs, stacked, total)


def _backward(options: Options, residuals: Any, gradients: tuple[Array, ...]) -> tuple[Inputs]:
    def run(total: Array, *arrays: Array) -> tuple[Array, ...]:
        *gradients, parameters, draw = arrays
        of_x, of_y, sums = _kernels().backward(
            _rows(total), [_rows(g) for g in gradients], parameters, draw, *options[:3]
        )
        return of_x.reshape(total.shape), of_y.reshape(total.shape), jnp.sum(sums, 0)[None]

    (_, _, bias, scale, shift, key), stacked, total = residuals
    of_x, of_y, sums = _on_rows(run, (total, *gradients), (stacked,), key, 3)
    of_bias, of_scale, of_shift = jnp.sum(sums, 0)
    return (
        Inputs(
            of_x,
            of_y,
            None if bias is None else of_bias.astype(bias.dtype),
            of_scale.astype(scale.dtype),
            of_shift.astype(shift.dtype),
            None,
        ),
    )


residual_norm.defvjp(_forward, _backward)


def _kernels() -> Any:
    # Imported here, because Pallas takes a quarter of a second, for which CPUs need not wait.
    from flaxformer_mt.model.kernels import norm_gpu

    return norm_gpu


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _on_rows(
    function: Callable, vectors: tuple[Array, ...], same: tuple[Array, ...], key: Any, results: int
) -> Any:
    """Lets each device run a function on its rows.

    Args:
      function: (*vectors, *same, draw) -> results; `draw` is uint32 [3], the words of the key and
        the number of the device's first row of D values.
      vectors: [B, T, D], sharded by rows.
      same: arrays that all devices have.
      key: of dropout, or None.
      results: how many there are, whose first axes are those of the rows or of the devices.
    """
    rows, length, _ = vectors[0].shape
    words = jnp.zeros(2, jnp.uint32) if key is None else jax.random.key_data(key)[:2]

    def with_first_row(numbers: Array, words: Array, *arrays: Array) -> Any:
        first = numbers[:1].astype(jnp.uint32) * jnp.uint32(length)
        return function(*arrays, jnp.concatenate([words, first]))

    by_row = PartitionSpec(dividing_axes("batch", rows) or None)
    everywhere = PartitionSpec()
    in_specs = by_row, everywhere, *(by_row for _ in vectors), *(everywhere for _ in same)
    run = on_each_device(with_first_row, in_specs, (by_row,) * results)
    return run(lax.iota(jnp.int32, rows), words, *vectors, *same)
