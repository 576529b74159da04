"""The published layer norms, and their position relative to a sub-layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.numerics import at_least_float32, column_sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    r"""Normalises by mean and biased standard deviation, with epsilon inside the root.

    .. math:: y = \hat x \odot scale + bias,\quad \hat x = (x - \mu) / \sqrt{\sigma^2 + \epsilon}

    Its gradient is written out, because it needs only x and two numbers per row:

    .. math:: \partial x = (g - \overline{g} - \hat x\, \overline{g \hat x})
        / \sqrt{\sigma^2 + \epsilon},\quad g = \partial y \odot scale

    Args:
      x: [N, D].
      scale: [D].
      bias: [D].
      epsilon: in units of x squared.

    Source: Ba et al. 2016. The variance is computed from the centred x: the difference of two means
    that some libraries use loses all digits if the mean is large.
    """
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    inverse_std = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    return centred * inverse_std * scale + bias, (x, mean, inverse_std, scale)


def _layer_norm_backward(epsilon, kept, gradient):
    del epsilon  # It is in the standard deviation.
    x, mean, inverse_std, scale = kept
    normalised = (x - mean) * inverse_std
    g = gradient * scale
    along = jnp.mean(g * normalised, axis=-1, keepdims=True)
    x_gradient = (g - jnp.mean(g, axis=-1, keepdims=True) - normalised * along) * inverse_std
    return x_gradient, column_sums(gradient * normalised), column_sums(gradient)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def unbiased_std_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    r"""Normalises by mean and unbiased standard deviation, with epsilon outside the root.

    .. math:: (x - \mu) / (s + \epsilon) \odot scale + bias,\quad s^2 = \sum (x - \mu)^2 / (D - 1)

    Args:
      x: [N, D], D > 1.
      scale: [D].
      bias: [D].
      epsilon: in units of x.

    Source: The Annotated Transformer, `LayerNorm`.
    """
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.sum(jnp.square(centred), axis=-1, keepdims=True) / (x.shape[-1] - 1)
    # The derivative of the root at zero is infinite; PyTorch, too, gives a constant row gradient 0.
    constant = variance == 0
    std = jnp.where(constant, 0, jnp.sqrt(jnp.where(constant, 1, variance)))
    return centred / (std + epsilon) * scale + bias


class Norm(nn.Module):
    """A layer norm with learned scale and bias [D], of the kind `config.norm_kind`."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises the last axis of `x` [..., D], in float32 at least; keeps its dtype."""
        c = self.config
        self.sow("intermediates", "input", x)
        param_dtype = jnp.dtype(c.param_dtype)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), param_dtype)
        dtype = at_least_float32(x.dtype)
        normalise = layer_norm if c.norm_kind == "layer_norm" else unbiased_std_norm
        rows = x.reshape(-1, x.shape[-1]).astype(dtype)
        y = normalise(rows, scale.astype(dtype), bias.astype(dtype), c.norm_epsilon)
        return y.reshape(x.shape).astype(x.dtype)


def residual(
    x: Array,
    sublayer: Callable[[Array], tuple[Array, Any]],
    norm: Callable[[Array], Array],
    dropout: Callable[[Array], Array],
    norm_position: str,
) -> tuple[Array, Any]:
    """Applies a sub-layer f with its residual: norm(x + f(x)) or x + f(norm(x)).

    Args:
      x: [B, T, D].
      sublayer: f; returns its output and a second result of any kind.
      norm: the sub-layer's norm.
      dropout: applied to f's output.
      norm_position: "post" (Vaswani et al. 2017, section 3.1) or "pre" (its published code).

    Returns:
      [B, T, D], and the second result of the sub-layer.
    """
    if norm_position == "pre":
        y, extra = sublayer(norm(x))
        return x + dropout(y), extra
    y, extra = sublayer(x)
    return norm(x + dropout(y)), extra
