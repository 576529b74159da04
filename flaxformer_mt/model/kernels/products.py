"""Inputs and outputs of matrix products that are shared, sharded or fused with what follows."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from flaxformer_mt.model.logical_axes import constrain, num_parts


class Shared(NamedTuple):
    """The input of several products with matrices whose columns are sharded."""

    x: Array
    """[..., fan_in]."""
    copies: Array | None
    """[parts, ..., fan_in], `x` for each part of the matrices; None if they are not sharded.

    The products give their gradient to the copies, and none to `x`: each device adds up its parts
    of all products, and then there is one sum over devices instead of one for each product.
    """

    @classmethod
    def of(cls, x: Array, columns: int) -> "Shared":
        """Shares activations [B, S, D] among matrices.

        `columns` divides the number of columns of each, such as the number of heads.
        """
        parts = num_parts("parts", columns)
        if parts == 1:
            return cls(x, None)
        copies = jnp.broadcast_to(x, (parts, *x.shape))
        return cls(x, constrain(copies, "parts", "batch", "length", "embed"))


class Biased(NamedTuple):
    """A product of matrices whose bias [features], if any, has not been added yet."""

    product: Array
    bias: Array | None
