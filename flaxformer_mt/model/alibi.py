"""ALiBi: attention with linear biases."""

import math

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jaxtyping import Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.numerics import at_least_float32


def alibi_slopes(num_heads: int) -> np.ndarray:
    r"""The slope of each head, float64 [H].

    For H a power of two they are :math:`2^{-8 h / H}`, h = 1 ... H. Otherwise the slopes of the
    next lower power of two N come first, followed by every second one of those of 2N, from the
    first on.

    Source: Press et al. 2022, "Train Short, Test Long", section 3, and its code, `get_slopes`.
    """
    lower = 2 ** int(math.log2(num_heads))

    def geometric(heads: int) -> np.ndarray:
        return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)

    return np.concatenate([geometric(lower), geometric(2 * lower)[0::2][: num_heads - lower]])


class AlibiBias(nn.Module):
    r"""A bias that falls linearly with the distance; it has no parameters.

    .. math:: b_{h,i,j} = -m_h |i - j|

    In the decoder, where keys after the query are masked, it is that of Press et al.; the encoder
    has the symmetric form, as in OpenNMT-py 3 (`AlibiPositionalBias`).
    """

    config: TransformerConfig
    bidirectional: bool
    """Whether queries attend to later keys, too; the bias is the same."""

    def __call__(
        self, queries: Int[Array, "B T"], keys: Int[Array, "#B S"]
    ) -> Float[Array, "B H T S"]:
        """Computes the bias from the positions of queries and keys, in float32 at least."""
        c = self.config
        dtype = at_least_float32(jnp.dtype(c.dtype))
        slopes = jnp.asarray(alibi_slopes(c.num_heads), dtype)[:, None, None]
        distance = jnp.abs(keys[:, None, :] - queries[:, :, None])  # [B, T, S]
        return -slopes * distance[:, None].astype(dtype)
