"""Scaled dot-product attention and its multi-head form."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.numerics import Dense, Dropout, at_least_float32, dense


class KeyValue(NamedTuple):
    """What can be attended to: key [B, H, S, K] and value [B, H, S, U]."""

    key: Array
    value: Array


@jax.custom_vjp
def masked_softmax(scores: Array, mask: Array) -> Array:
    r"""The softmax of each row, with weight 0 where the mask hides a key.

    Its gradient is written out, because it needs nothing but the weights:

    .. math:: \partial s = w \odot (\partial w - \sum_k w_k\, \partial w_k)

    Args:
      scores: [..., T, S].
      mask: bool, broadcastable to [..., T, S], True = attend. A row that is hidden as a whole gets
        zeros.
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


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Callable[[Array], Array] | None = None,
    tap: Callable[[str, Array], object] | None = None,
) -> tuple[Array, Array]:
    r"""Attends from every query to every key.

    .. math:: \mathrm{softmax}(Q K^\top / \sqrt{K})\, V

    Args:
      query: [B, H, T, K].
      key: [B, H, S, K].
      value: [B, H, S, U]; U need not equal K.
      mask: bool, broadcastable to [B, H, T, S], True = attend. A query that may attend to nothing
        gets zeros (the published code gives it the mean of all values).
      dropout: applied to the weights.
      tap: shown the masked "scores" [B, H, T, S]; it changes nothing.

    Returns:
      The context [B, H, T, U] in the dtype of `value`, and the weights [B, H, T, S] before
      dropout.

    Source: Vaswani et al. 2017, equation 1.
    """
    # The softmax is taken in float32 or wider: bfloat16 sums lose the tail of long rows.
    dtype = at_least_float32(query.dtype)
    scores = jnp.einsum("bhtk,bhsk->bhts", query, key, preferred_element_type=dtype)
    scores = scores * query.shape[-1] ** -0.5
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    if tap is not None:
        tap("scores", jnp.where(mask, scores, jnp.finfo(dtype).min))
    weights = masked_softmax(scores, mask).astype(value.dtype)
    kept = weights if dropout is None else dropout(weights)
    return jnp.einsum("bhts,bhsu->bhtu", kept, value), weights


class KeyProjection(Dense):
    """A linear map whose bias is not trained.

    A key bias adds the same to all scores of a query, and the softmax takes it away again: its
    gradient is 0. Computed, it would be rounding noise, which Adam enlarges to steps of full size.
    """

    def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Cuts the bias off from the gradient."""
        value = super().param(name, *args, **kwargs)
        return lax.stop_gradient(value) if name == "bias" else value


class MultiHeadAttention(nn.Module):
    """H heads side by side, each in its own projection of the inputs.

    H*K and H*U need not be D. Source: Vaswani et al. 2017, section 3.2.2.
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Makes the four projections."""
        c = self.config
        key_features = c.num_heads * c.key_width
        value_features = c.num_heads * c.value_width
        self.query = dense(c, c.d_model, key_features, c.qkv_bias)
        self.key = dense(c, c.d_model, key_features, c.qkv_bias, KeyProjection)
        self.value = dense(c, c.d_model, value_features, c.qkv_bias)
        self.output = dense(c, value_features, c.d_model, c.attention_output_bias)
        self.dropout = Dropout(c.attention_dropout_rate)

    def _split_heads(self, x: Array) -> Array:
        """[B, S, H*K] to [B, H, S, K]: the matrices of one head are contiguous."""
        return x.reshape(*x.shape[:-1], self.config.num_heads, -1).swapaxes(-2, -3)

    def project(self, inputs: Array) -> KeyValue:
        """Keys and values of `inputs` [B, S, D]."""
        return KeyValue(self._split_heads(self.key(inputs)), self._split_heads(self.value(inputs)))

    def __call__(
        self, inputs: Array, attended: KeyValue, mask: Array | None, deterministic: bool
    ) -> tuple[Array, Array]:
        """Attends from `inputs`.

        Args:
          inputs: [B, T, D], whose projections are the queries.
          attended: keys [B, H, S, K] and values [B, H, S, U], from `project`.
          mask: broadcastable to [B, H, T, S], True = attend; None = attend to all.
          deterministic: no dropout.

        Returns:
          [B, T, D], and the weights [B, H, T, S].
        """
        context, weights = scaled_dot_product_attention(
            self._split_heads(self.query(inputs)),
            attended.key,
            attended.value,
            mask,
            lambda weights: self.dropout(weights, deterministic=deterministic),
            lambda name, value: self.sow("intermediates", name, value),
        )
        joined = context.swapaxes(-2, -3).reshape(*inputs.shape[:-1], -1)  # [B, T, H*U]
        self.sow("intermediates", "context", joined)
        return self.output(joined), weights
