"""Parameters drawn by NumPy: a program that initializes them takes a second to compile."""

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from flaxformer_mt.model.functional import parameter_shapes


def drawn_params(config, seed=0):
    """Returns a tree of normal values with deviation 0.3; those of scales are around 1.

    Nothing can hide behind biases of 0 and scales of 1.
    """
    draw = np.random.default_rng(seed)
    values = {
        path: jnp.asarray(draw.normal(path.endswith("scale"), 0.3, shape), config.param_dtype)
        for path, shape in parameter_shapes(config).items()
    }
    return unflatten_dict(values, sep="/")
