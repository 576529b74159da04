"""Tolerances for comparisons in float32, derived from PyTorch's own rounding error."""

import copy
from collections.abc import Callable

import numpy as np
import torch

FACTOR = 8
"""Bound of a difference between two float32 implementations, as a multiple of the error of one.

Each differs from float64 by an error of the same kind, so their difference is about 1.4 times the
error of one. The maximum over all elements varies with the order of summation, which depends on the
library, its version and the processor.
"""


def rounding_tolerance(
    module: torch.nn.Module, compute: Callable[[torch.nn.Module], np.ndarray]
) -> float:
    """Returns the largest difference to allow between PyTorch's result and another one in float32.

    It is `FACTOR` times the largest difference between the float32 and float64 results of PyTorch
    on this machine.

    Args:
      module: a float32 module. A copy of it computes in float64.
      compute: computes the result of a module.
    """
    # Copied first: some modules keep tensors of their last call, which cannot be copied.
    in_double = copy.deepcopy(module).double()
    single, double = compute(module), compute(in_double)
    assert single.dtype == np.float32
    assert double.dtype == np.float64
    return FACTOR * float(np.abs(single - double).max())
