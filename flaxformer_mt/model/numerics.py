"""Shared numerics of the model: precision, sums, softmax and dropout."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Bool, Float, UInt16


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of softmax, norms and losses: float64 for float64, otherwise float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def column_sums(x: Float[Array, "N D"]) -> Float[Array, "D"]:
    """Sums the rows of `x`, as the gradient of a bias needs it, in float32 at least.

    The sum is a product with ones: XLA's own sum over many rows took 20 times as long on CPUs
    (docs/speed.md), and on other devices the product costs next to nothing.
    """
    ones = jnp.ones(x.shape[0], x.dtype)
    dtype = at_least_float32(x.dtype)
    return lax.dot(ones, x, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)


def soft_cap(x: Array, cap: float) -> Array:
    r"""Returns :math:`c \tanh(x / c)`, which is between -c and c, or `x` itself if c = `cap` is 0.

    Source: Bello et al. 2016, section 5; Gemma 2.
    """
    return cap * jnp.tanh(x / cap) if cap else x


@jax.custom_vjp
def masked_softmax(scores: Float[Array, "*T S"], mask: Bool[Array, "..."]) -> Float[Array, "*T S"]:
    r"""Computes the softmax over the last axis, with weight 0 for masked keys.

    Its gradient is written out, because it needs only the weights:

    .. math:: \partial s = w \odot (\partial w - \sum_k w_k\, \partial w_k)

    The mask is broadcastable, True where a query attends. A row without any key gets zeros.
    """
    return _masked_softmax_forward(scores, mask)[0]


def _masked_softmax_forward(scores, mask):
    scores = jnp.where(mask, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    # A row without keys: -inf - -inf would be NaN.
    exponentials = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0, highest))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    weights = exponentials / jnp.where(total == 0, 1, total)
    return weights, weights


def _masked_softmax_backward(weights, gradient):
    along = jnp.sum(weights * gradient, axis=-1, keepdims=True)
    return weights * (gradient - along), None


masked_softmax.defvjp(_masked_softmax_forward, _masked_softmax_backward)


class Dropout(nn.Module):
    """Sets a random share of all values to 0, and divides the others by the share that is kept.

    A value is dropped if a random number of 16 bits is below a threshold: `rate` is rounded to a
    multiple of 2**-16. `nn.Dropout` draws 32 bits, for which JAX's default generator computes 64:
    four times the work, which was a tenth of a small model's training step on CPUs (docs/speed.md).
    """

    rate: float

    @property
    def threshold(self) -> int:
        """A value is dropped if its random number of 16 bits is below it."""
        return round(self.rate * 2**16)

    def draw_key(self) -> Array:
        """Draws the key that `__call__` would, for a kernel that drops values itself."""
        return self.make_rng("dropout")

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        """Drops values of `x` [..., D], with a key of the collection "dropout"."""
        dropped = self.threshold
        if deterministic or not dropped:
            return x
        kept = random_uint16(self.make_rng("dropout"), x.shape) >= jnp.uint16(dropped)
        return jnp.where(kept, x * (1 / (1 - dropped / 2**16)), 0)


def random_uint16(key: Array, shape: tuple[int, ...]) -> UInt16[Array, "..."]:
    """Draws uniform random numbers with the generator of the key, using all bits that it makes.

    With JAX's default generator, Threefry (Salmon et al. 2011), each number depends only on the
    key and its index: however the array is sharded, its values are the same. Each block of 64 bits
    gives four numbers, whereas `jax.random.bits` would make a block for each. Other generators are
    asked for 32 bits for each two numbers.
    """
    *rows, columns = shape
    if jax.random.key_impl(key) == "threefry2x32":
        blocks = (*rows, -(-columns // 4))
        counter = lax.iota(jnp.uint32, math.prod(blocks)).reshape(blocks)
        first, second = jax.random.key_data(key)
        words = threefry2x32_p.bind(first, second, counter, jnp.zeros_like(counter))
    else:
        words = [jax.random.bits(key, (*rows, -(-columns // 2)), jnp.uint32)]
    halves = [lax.bitcast_convert_type(word, jnp.uint16).reshape(*rows, -1) for word in words]
    return jnp.concatenate(halves, axis=-1)[..., :columns]
