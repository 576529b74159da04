"""Linear maps and their initial values."""

import functools
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jax.nn import initializers
from jaxtyping import Float

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.kernels.products import Biased, Shared
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.numerics import at_least_float32, column_sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear(
    x: Float[Array, "N I"],
    kernel: Any,
    bias: Any,
    copies: Float[Array, "P N I"] | None = None,
    parts: int = 1,
) -> Float[Array, "N O"]:
    """Computes x @ kernel + bias in the dtype of `x`.

    Its gradient is written out, so that those of the parameters are never rounded to the dtype of
    `x`: they are added up over layers' calls, micro-batches and devices in that of the parameters.

    The kernel [I, O] and the bias [O], or None, are of any dtype. `copies` of `x`, for each of the
    `parts` into which the features are divided, get its gradient (`Shared`).
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
        shape = (self.fan_in, self.features)
        self.kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        if self.use_bias:
            self.bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)

    def effective_kernel(self) -> Array:
        """Returns the matrix [fan_in, features] of the map.

        The model reads it here only: a subclass that overrides this method, for example to add a
        product of low rank, changes the map in every kernel.
        """
        return self.kernel

    def effective_bias(self) -> Array | None:
        """Returns the bias [features] of the map, None without one; see `effective_kernel`."""
        return self.bias if self.use_bias else None

    def __call__(self, inputs: Array | Shared, train_bias: bool = True) -> Array:
        """Maps the last axis of `inputs`; without `train_bias` the bias has no gradient."""
        bias = self.effective_bias()
        if bias is not None and not train_bias:
            bias = lax.stop_gradient(bias)
        return self._map(inputs, bias)

    def without_bias(self, inputs: Array) -> Array:
        return self._map(inputs, None)

    def _map(self, inputs: Array | Shared, bias: Array | None) -> Array:
        x, copies = inputs if isinstance(inputs, Shared) else (inputs, None)
        rows = x.reshape(-1, self.fan_in).astype(self.dtype)
        parts = 1
        if copies is not None:
            parts = len(copies)
            copies = copies.reshape(parts, *rows.shape).astype(self.dtype)
        outputs = linear(rows, self.effective_kernel(), bias, copies, parts)
        return outputs.reshape(*x.shape[:-1], self.features)


def to_residual(output: Dense, x: Array, add_bias: bool) -> Array | Biased:
    """Maps x to the residual stream [B, T, D]; without `add_bias` a later kernel adds the bias."""
    y = output(x) if add_bias else output.without_bias(x)
    y = constrain(y, "batch", "length", "embed")
    return y if add_bias else Biased(y, output.effective_bias())


LinearRole: TypeAlias = Literal["qkv", "attention_output", "feed_forward", "output"]
"""What a linear map computes in the model; some published initial values depend on it."""

# The initial values of kernels and of biases.
# half_variance: Xavier's values have this variance in one matrix [D, 3D] for queries, keys and
# values, which is about half of that in three of [D, D].
_BY_ROLE: dict[str, dict[LinearRole, tuple[str, str]]] = {
    "torch_transformer": {
        "qkv": ("half_variance", "zeros"),
        "attention_output": ("xavier_uniform", "zeros"),
        "feed_forward": ("xavier_uniform", "torch_default"),
        "output": ("xavier_uniform", "torch_default"),
    },
    "fairseq": {
        "qkv": ("half_variance", "torch_default"),
        "attention_output": ("xavier_uniform", "zeros"),
        "feed_forward": ("torch_default", "torch_default"),
        "output": ("normal", "zeros"),
    },
}


def _uniform_by_fan_in(fan_in: int) -> initializers.Initializer:
    """Returns the initializer of `torch.nn.Linear`, uniform in +-1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound, out_sharding=out_sharding)

    return init


def dense(
    config: TransformerConfig,
    role: LinearRole,
    fan_in: int,
    features: int,
    use_bias: bool,
    divisor: float = 1.0,
) -> Dense:
    """Creates a map with initial values for its role; the matrix is divided by `divisor`."""
    kernel_kind, _ = _BY_ROLE.get(config.kernel_init, {}).get(role, (config.kernel_init, ""))
    _, bias_kind = _BY_ROLE.get(config.bias_init, {}).get(role, ("", config.bias_init))
    values = {
        "zeros": initializers.zeros,
        "xavier_uniform": initializers.xavier_uniform(),
        "xavier_normal": initializers.xavier_normal(),
        "half_variance": initializers.variance_scaling(0.5, "fan_avg", "uniform"),
        "torch_default": _uniform_by_fan_in(fan_in),
        "normal": initializers.normal(fan_in**-0.5),
    }
    init = values[kernel_kind]

    def divided(key, *args, **options):
        return init(key, *args, **options) / divisor

    return Dense(
        fan_in,
        features,
        use_bias=use_bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=init if divisor == 1 else divided,
        bias_init=values[bias_kind],
    )


def embedding_init(config: TransformerConfig) -> initializers.Initializer:
    """Returns the initializer of a [V, D] embedding table."""
    return {
        "normal": initializers.normal(config.d_model**-0.5),
        "standard_normal": initializers.normal(1.0),
        "xavier_uniform": initializers.xavier_uniform(),
        "xavier_normal": initializers.xavier_normal(),
    }[config.embedding_init]
