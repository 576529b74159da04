"""Checks at run time that arrays have the shapes and dtypes of their annotations."""

import functools

import beartype
import numpy as np


def checked(function):
    """Checks the calls of a function whose annotations have shapes.

    Fields of dataclasses are not checked, because JAX also stores shardings and shapes in them;
    nor are calls with NumPy arrays, which JAX's functions accept without being annotated so.
    """
    annotations = getattr(function, "__annotations__", {}).values()
    has_shapes = any("jaxtyping" in str(annotation) for annotation in annotations)
    if function.__name__ == "__init__" or not has_shapes:
        return function
    check = beartype.beartype(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        has_numpy = any(isinstance(x, np.ndarray) for x in (*args, *kwargs.values()))
        return (function if has_numpy else check)(*args, **kwargs)

    return call
