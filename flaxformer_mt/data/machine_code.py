"""Machine code for loops that NumPy cannot express, by numba where it is installed.

It was chosen over an extension in C since wheels need no compiler then, nor one wheel per platform,
and a function is the same with and without it.
"""

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns a function as machine code, without Python's lock; None if numba is not installed."""
    try:
        import numba
    except ImportError:
        return None
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # There is no writable folder for the machine code.
        return numba.njit(nogil=True)(function)
