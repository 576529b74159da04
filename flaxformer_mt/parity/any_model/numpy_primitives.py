"""Primitives in NumPy: a diagnosis runs many small programs once, too few times to compile them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special


def _dot_general(a: Any, b: Any, *, dimension_numbers: Any, **_: Any) -> Any:
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    a_axes, b_axes = list(range(a.ndim)), [100 + axis for axis in range(b.ndim)]
    for ours, theirs in zip((*a_sum, *a_batch), (*b_sum, *b_batch), strict=True):
        b_axes[theirs] = a_axes[ours]
    batch = [a_axes[axis] for axis in a_batch]
    free = [axis for i, axis in enumerate(a_axes) if i not in (*a_sum, *a_batch)]
    free += [axis for i, axis in enumerate(b_axes) if i not in (*b_sum, *b_batch)]
    order = {axis: i for i, axis in enumerate(dict.fromkeys([*a_axes, *b_axes]))}
    axes = [[order[axis] for axis in part] for part in (a_axes, b_axes, batch + free)]
    return np.einsum(a, axes[0], b, axes[1], axes[2], optimize=True)


def _broadcast_in_dim(x: Any, *_: Any, shape: Any, broadcast_dimensions: Any, **__: Any) -> Any:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _select_n(which: Any, *cases: Any) -> Any:
    return np.choose(which.astype(int), cases) if len(cases) > 2 else np.where(which, *cases[::-1])


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *, axes, **_: function(x, axis=tuple(axes))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs, **_: function(*xs)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "sign": np.sign,
    "logistic": special.expit,
    "erf": special.erf,
    "erfc": special.erfc,
    "copy": np.asarray,
    "copy_p": np.asarray,
    "stop_gradient": np.asarray,
}
"""Functions of single elements, on floating values."""

_OTHERS: dict[str, Callable[..., Any]] = {
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "select_n": _select_n,
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "integer_pow": lambda x, *, y: x**y,
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: x.squeeze(tuple(dimensions)),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "and": _elementwise(np.logical_and),
    "or": _elementwise(np.logical_or),
    "not": _elementwise(np.logical_not),
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
}


def in_numpy(name: str, params: Any, inputs: list[Any], dtype: Any) -> Any:
    """Computes a primitive with one result; NotImplemented if it is not one of the above.

    Args:
      name: the name of the primitive.
      params: its parameters.
      inputs: arrays.
      dtype: of the result.
    """
    if name in ELEMENTWISE and np.issubdtype(dtype, np.floating):
        return ELEMENTWISE[name](*inputs)
    boolean = all(x.dtype == bool for x in inputs)
    if name not in _OTHERS or (name in ("and", "or", "not") and not boolean):
        return NotImplemented
    return np.asarray(_OTHERS[name](*inputs, **params), dtype)
