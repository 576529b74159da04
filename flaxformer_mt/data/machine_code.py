"""Machine code for loops that NumPy cannot express, by numba where it is installed.

It was chosen over an extension in C since wheels need no compiler then, nor one wheel per platform,
and a function is the same with and without it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np


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


def spans(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates `values[start : start + length]` for each int64 start and length."""
    copy = compiled(_copy_spans)
    if copy is None:
        firsts = np.cumsum(lengths) - lengths
        return values[np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)]
    copies = np.empty(lengths.sum(), values.dtype)
    copy(values, starts, lengths, copies)
    return copies


def _copy_spans(values: Any, starts: Any, lengths: Any, copies: Any) -> None:
    index = 0
    for span in range(len(starts)):
        for source in range(starts[span], starts[span] + lengths[span]):
            copies[index] = values[source]
            index += 1
