"""Biases of attention scores that depend on positions: ALiBi, and the learned ones of T5."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jaxtyping import Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.linear import embedding_init
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

    def __call__(
        self, queries: Int[Array, "B T"], keys: Int[Array, "#B S"]
    ) -> Float[Array, "B H T S"]:
        """Returns the bias at the positions of queries and keys, in float32 at least."""
        c = self.config
        dtype = at_least_float32(jnp.dtype(c.dtype))
        slopes = jnp.asarray(alibi_slopes(c.num_heads), dtype)[:, None, None]
        distance = jnp.abs(keys[:, None, :] - queries[:, :, None])  # [B, T, S]
        return -slopes * distance[:, None].astype(dtype)


@functools.lru_cache
def distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    r"""The bucket of each distance in one direction.

    With N buckets, distances d below E = N // 2 have a bucket of their own. The others share N - E
    buckets whose widths grow geometrically up to the distance M, and beyond it all are in the last.

    .. math:: E + \left\lfloor (N - E) \frac{\log(d / E)}{\log(M / E)} \right\rfloor

    Args:
      num_buckets: N, at least 2.
      max_distance: M, more than E.

    Returns:
      int32 [M + 1], bucket of the distances 0 ... M; longer ones are treated as M. The logarithms
      are compared as powers of integers, so that no rounding moves a distance to another bucket.

    Source: Raffel et al. 2020, section 2.1; Mesh TensorFlow, `_relative_position_bucket`.
    """
    exact = num_buckets // 2
    wide = num_buckets - exact
    buckets = np.arange(max_distance + 1, dtype=np.int32)
    k = 0
    for distance in range(exact, max_distance + 1):
        # The highest k < N - E with (d / E)^(N - E) >= (M / E)^k; it never falls.
        while k + 1 < wide and (
            distance**wide * exact ** (k + 1) >= max_distance ** (k + 1) * exact**wide
        ):
            k += 1
        buckets[distance] = exact + k
    buckets.flags.writeable = False  # The cache hands the same array to every caller.
    return buckets


class RelativeBias(nn.Module):
    """A learned bias for each head and each bucket of distances between query and key.

    In the encoder one half of the buckets is for keys at or before the query, the other for those
    after it. In the decoder all buckets are for keys at or before the query.

    With `config.scale_scores`, scores are divided by sqrt(K) before it is added (OpenNMT-py 3);
    without, they are not (T5).

    Source: Raffel et al. 2020, section 2.1; OpenNMT-py 3, `compute_bias`.
    """

    config: TransformerConfig
    bidirectional: bool
    """Whether queries attend to later keys, too: True in the encoder."""

    @nn.compact
    def __call__(
        self, queries: Int[Array, "B T"], keys: Int[Array, "#B S"]
    ) -> Float[Array, "B H T S"]:
        """Returns the bias at the positions of queries and keys, in float32 at least."""
        c = self.config
        num_buckets = c.relative_position_buckets
        shape = (num_buckets, c.num_heads)
        # T5's token embeddings have standard deviation 1, its biases 1/sqrt(D).
        init = nn.initializers.normal(c.d_model**-0.5)
        if c.embedding_init != "standard_normal":
            init = embedding_init(c)
        table = self.param("embedding", init, shape, jnp.dtype(c.param_dtype))
        distance = keys[:, None, :] - queries[:, :, None]  # [B, T, S]
        first: int | Array = 0
        if self.bidirectional:
            num_buckets //= 2
            first = jnp.where(distance > 0, num_buckets, 0)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        longest = c.relative_position_max_distance
        buckets = jnp.asarray(distance_buckets(num_buckets, longest))
        buckets = first + buckets[jnp.minimum(distance, longest)]
        # A product with ones and zeros, because accelerators add the gradient of a lookup of so
        # many equal indices entry by entry.
        dtype = at_least_float32(jnp.dtype(c.dtype))
        return jnp.einsum(
            "btsn,nh->bhts",
            jax.nn.one_hot(buckets, c.relative_position_buckets, dtype=dtype),
            table.astype(dtype),
            precision=lax.Precision.HIGHEST,
        )
