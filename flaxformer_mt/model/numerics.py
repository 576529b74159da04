"""Shared numerics of the model: precision, linear maps, dropout and initial values."""

import functools
import math
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jax.extend.random import threefry2x32_p
from jax.nn import initializers

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.logical_axes import constrain, num_parts


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of softmax, norms and losses: float64 for float64, otherwise float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def column_sums(x: Array) -> Array:
    """Sums the rows of `x` [N, D], as the gradient of a bias needs it: [D], in float32 at least.

    The sum is a product with ones: XLA's own sum over many rows took 20 times as long on CPUs
    (docs/speed.md), and on other devices the product costs next to nothing.
    """
    ones = jnp.ones(x.shape[0], x.dtype)
    dtype = at_least_float32(x.dtype)
    return lax.dot(ones, x, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)


@jax.custom_vjp
def masked_softmax(scores: Array, mask: Array) -> Array:
    r"""Computes the softmax over the last axis, with weight 0 for masked keys.

    Its gradient is written out, because it needs only the weights:

    .. math:: \partial s = w \odot (\partial w - \sum_k w_k\, \partial w_k)

    Args:
      scores: [..., T, S].
      mask: bool, broadcastable to [..., T, S], True = attend. A row without any key gets zeros.

    Returns:
      [..., T, S], in the dtype of `scores`.
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


class Shared(NamedTuple):
    """The input of several products with matrices whose columns are divided among devices."""

    x: Array
    """[..., fan_in]."""
    copies: Array | None
    """[parts, ..., fan_in], `x` for each part of the matrices; None if they are not divided.

    Only its gradient is used, instead of that of `x`: each device adds up its parts of all
    products, and then there is one sum over devices instead of one for each product.
    """

    @classmethod
    def of(cls, x: Array, columns: int) -> "Shared":
        """Shares activations [B, S, D].

        Args:
          x: [B, S, D].
          columns: a number that divides those of all matrices, such as the number of heads.
        """
        parts = num_parts("parts", columns)
        if parts == 1:
            return cls(x, None)
        copies = jnp.broadcast_to(x, (parts, *x.shape))
        return cls(lax.stop_gradient(x), constrain(copies, "parts", "batch", "length", "embed"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear(
    x: Array, kernel: Array, bias: Array | None, copies: Array | None = None, parts: int = 1
) -> Array:
    """Computes x @ kernel + bias in the dtype of `x`.

    Its gradient is written out, so that those of the parameters are never rounded to the dtype of
    `x`: they are added up over layers' calls, micro-batches and devices in that of the parameters.

    Args:
      x: [N, fan_in].
      kernel: [fan_in, features], of any dtype.
      bias: [features], or None.
      copies: [parts, N, fan_in] of `x`, which get its gradient; see `Shared`.
      parts: into which the features are divided.

    Returns:
      [N, features], in the dtype of `x`.
    """
    return _linear_forward(x, kernel, bias, copies, parts)[0]


def _linear_forward(x, kernel, bias, copies, parts):
    del copies, parts
    outputs = x @ kernel.astype(x.dtype)
    if bias is not None:
        outputs = outputs + bias.astype(x.dtype)
    return outputs, (x, kernel, bias)


def _linear_backward(parts, kept, gradient):
    x, kernel, bias = kept
    wide = at_least_float32(x.dtype)
    rounded = kernel.astype(x.dtype)
    of_x = of_copies = None
    if parts == 1:
        of_x = lax.dot_general(gradient, rounded, (((1,), (1,)), ((), ())))
    else:
        left, right = (each.reshape(len(each), parts, -1) for each in (gradient, rounded))
        of_copies = lax.dot_general(left, right, (((2,), (2,)), ((1,), (1,))))
    of_kernel = lax.dot_general(x, gradient, (((0,), (0,)), ((), ())), preferred_element_type=wide)
    of_bias = None if bias is None else column_sums(gradient).astype(bias.dtype)
    return of_x, of_kernel.astype(kernel.dtype), of_bias, of_copies


linear.defvjp(_linear_forward, _linear_backward)


class Biased(NamedTuple):
    """A product of matrices and the bias [features] that is still to be added, or None."""

    product: Array
    bias: Array | None


class Dense(nn.Module):
    """A linear map [..., fan_in] -> [..., features], computed as a product of two matrices.

    All axes but the last are flattened first: on CPUs, XLA makes transposed copies for the
    gradients of products with more axes.
    """

    fan_in: int
    features: int
    use_bias: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: initializers.Initializer = initializers.xavier_uniform()
    bias_init: initializers.Initializer = initializers.zeros

    def setup(self) -> None:
        """Declares the parameters: kernel [fan_in, features] and bias [features]."""
        shape = (self.fan_in, self.features)
        self.kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        if self.use_bias:
            self.bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)

    def __call__(self, inputs: Array | Shared, train_bias: bool = True) -> Array:
        """Maps the last axis of `inputs`; without `train_bias` the bias has no gradient."""
        bias = None
        if self.use_bias:
            bias = self.bias if train_bias else lax.stop_gradient(self.bias)
        return self._map(inputs, bias)

    def biased(self, inputs: Array) -> Biased:
        """Maps the last axis of `inputs`, but for the bias, which a later kernel adds."""
        return Biased(self._map(inputs, None), self.bias if self.use_bias else None)

    def _map(self, inputs: Array | Shared, bias: Array | None) -> Array:
        x, copies = inputs if isinstance(inputs, Shared) else (inputs, None)
        rows = x.reshape(-1, self.fan_in).astype(self.dtype)
        parts = 1
        if copies is not None:
            parts = len(copies)
            copies = copies.reshape(parts, *rows.shape).astype(self.dtype)
        outputs = linear(rows, self.kernel, bias, copies, parts)
        return outputs.reshape(*x.shape[:-1], self.features)


class Dropout(nn.Module):
    """Sets a random share of all values to 0, and divides the others by the share that is kept.

    A value is dropped if a random number of 16 bits is below a threshold: `rate` is rounded to a
    multiple of 2**-16. `nn.Dropout` draws 32 bits, for which JAX's default generator computes 64:
    four times the work, which was a tenth of a small model's training step on CPUs (docs/speed.md).
    """

    rate: float

    @property
    def threshold(self) -> int:
        """The number below which a random number of 16 bits drops a value."""
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


def random_uint16(key: Array, shape: tuple[int, ...]) -> Array:
    """Draws uniform random numbers with the generator of the key, using all bits that it makes.

    With JAX's default generator, Threefry (Salmon et al. 2011), each number depends only on the
    key and its index: however the array is sharded, its values are the same. Each block of 64 bits
    gives four numbers, whereas `jax.random.bits` would make a block for each. Other generators are
    asked for 32 bits for each two numbers.

    Args:
      key: of `jax.random`, of any implementation.
      shape: [..., D].

    Returns:
      uint16 of that shape.
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


LinearRole: TypeAlias = Literal["qkv", "attention_output", "feed_forward", "output"]
"""What a linear map computes in the model; some published initial values depend on it."""

# half_variance: Xavier's values have this variance in one matrix [D, 3D] for queries, keys and
# values, which is about half of that in three of [D, D].
_KERNELS_BY_ROLE: dict[str, dict[LinearRole, str]] = {
    "torch_transformer": {
        "qkv": "half_variance",
        "attention_output": "xavier_uniform",
        "feed_forward": "xavier_uniform",
        "output": "xavier_uniform",
    },
    "fairseq": {
        "qkv": "half_variance",
        "attention_output": "xavier_uniform",
        "feed_forward": "torch_default",
        "output": "normal",
    },
}
_BIASES_BY_ROLE: dict[str, dict[LinearRole, str]] = {
    "torch_transformer": {
        "qkv": "zeros",
        "attention_output": "zeros",
        "feed_forward": "torch_default",
        "output": "torch_default",
    },
    "fairseq": {
        "qkv": "torch_default",
        "attention_output": "zeros",
        "feed_forward": "torch_default",
        "output": "zeros",
    },
}


def _uniform_by_fan_in(fan_in: int) -> jax.nn.initializers.Initializer:
    """Returns the initializer of `torch.nn.Linear`, uniform in +-1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound, out_sharding=out_sharding)

    return init


def _divided(
    init: jax.nn.initializers.Initializer, divisor: float
) -> jax.nn.initializers.Initializer:
    def divided(key, shape, dtype=jnp.float32, out_sharding=None):
        return init(key, shape, dtype, out_sharding) / divisor

    return divided


def dense(
    config: TransformerConfig,
    role: LinearRole,
    fan_in: int,
    features: int,
    use_bias: bool,
    divisor: float = 1.0,
) -> Dense:
    """Creates a linear map [..., fan_in] -> [..., features], initialised according to `config`.

    Args:
      config: of the model.
      role: what the map computes.
      fan_in: its number of inputs.
      features: its number of outputs.
      use_bias: adds a bias.
      divisor: of the initial matrix.
    """
    kernel_kind = _KERNELS_BY_ROLE.get(config.kernel_init, {}).get(role, config.kernel_init)
    kernel_init = {
        "xavier_uniform": initializers.xavier_uniform(),
        "xavier_normal": initializers.xavier_normal(),
        "half_variance": initializers.variance_scaling(0.5, "fan_avg", "uniform"),
        "torch_default": _uniform_by_fan_in(fan_in),
        "normal": initializers.normal(fan_in**-0.5),
    }[kernel_kind]
    if divisor != 1:
        kernel_init = _divided(kernel_init, divisor)
    bias_kind = _BIASES_BY_ROLE.get(config.bias_init, {}).get(role, config.bias_init)
    bias_init = {
        "zeros": initializers.zeros,
        "torch_default": _uniform_by_fan_in(fan_in),
    }[bias_kind]
    return Dense(
        fan_in,
        features,
        use_bias=use_bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=kernel_init,
        bias_init=bias_init,
    )


def embedding_init(config: TransformerConfig) -> jax.nn.initializers.Initializer:
    """Returns the initializer of a [V, D] embedding table."""
    return {
        "normal": initializers.normal(config.d_model**-0.5),
        "standard_normal": initializers.normal(1.0),
        "xavier_uniform": initializers.xavier_uniform(),
        "xavier_normal": initializers.xavier_normal(),
    }[config.embedding_init]
