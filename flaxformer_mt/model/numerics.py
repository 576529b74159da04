"""What the whole model room agrees on: precision and initial values."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn import initializers

from flaxformer_mt.config import TransformerConfig


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of softmax, norms and losses: never below float32, float64 where the input is."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _uniform_by_fan_in(fan_in: int) -> jax.nn.initializers.Initializer:
    """Uniform in +-1/sqrt(fan_in): what `torch.nn.Linear` starts from."""
    bound = 1 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound, out_sharding=out_sharding)

    return init


def dense(
    config: TransformerConfig,
    fan_in: int,
    features: int,
    use_bias: bool,
    module: type[nn.Dense] = nn.Dense,
) -> nn.Dense:
    """The linear map [..., fan_in] -> [..., features], initialised as `config` says."""
    kernel_init = {
        "xavier_uniform": initializers.xavier_uniform(),
        "xavier_normal": initializers.xavier_normal(),
        "torch_default": _uniform_by_fan_in(fan_in),
    }[config.kernel_init]
    bias_init = {
        "zeros": initializers.zeros,
        "torch_default": _uniform_by_fan_in(fan_in),
    }[config.bias_init]
    return module(
        features,
        use_bias=use_bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=kernel_init,
        bias_init=bias_init,
    )


def embedding_init(config: TransformerConfig) -> jax.nn.initializers.Initializer:
    """Initial values of a [V, D] embedding table."""
    return {
        "normal": initializers.normal(config.d_model**-0.5),
        "xavier_uniform": initializers.xavier_uniform(),
        "xavier_normal": initializers.xavier_normal(),
    }[config.embedding_init]
