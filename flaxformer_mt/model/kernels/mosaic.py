"""Pallas' dialect for NVIDIA GPUs, as the kernels use it."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

mosaic_gpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
"""Without types, which differ among JAX's versions."""


def launch(kernel: Callable, options: Any, **settings: Any) -> Callable:
    """Returns a function of arrays that runs kernel(options, *arrays, *results) on a GPU.

    With `options.interpret` it is interpreted on a CPU, and races between copies and other accesses
    are errors.
    """
    detector = mosaic_gpu.InterpretGPUParams(detect_races=True) if options.interpret else None
    kernel = functools.partial(kernel, options)
    # The special function units give 22 bits of powers of two, more than rounded weights have.
    params = mosaic_gpu.CompilerParams(approx_math=True)
    return mosaic_gpu.kernel(kernel, interpret=detector, compiler_params=params, **settings)
