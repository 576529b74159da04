"""Checks at run time that arrays have the shapes and dtypes of their annotations."""

import beartype


def checked(function):
    """Checks the calls of a function whose annotations have shapes.

    Fields of dataclasses are not checked: JAX also stores shardings and shapes in them.
    """
    annotations = getattr(function, "__annotations__", {}).values()
    has_shapes = any("jaxtyping" in str(annotation) for annotation in annotations)
    if function.__name__ == "__init__" or not has_shapes:
        return function
    return beartype.beartype(function)
