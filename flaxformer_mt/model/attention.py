"""Scaled dot-product attention and its multi-head form."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.numerics import at_least_float32, dense


class KeyValue(NamedTuple):
    """What can be attended to: key [B, S, H, K] and value [B, S, H, U]."""

    key: Array
    value: Array


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
      query: [B, T, H, K].
      key: [B, S, H, K].
      value: [B, S, H, U]; U need not equal K.
      mask: bool, broadcastable to [B, H, T, S], True = attend. A query that may attend to nothing
        gets zeros (the published code gives it the mean of all values).
      dropout: applied to the weights.
      tap: shown the masked "scores" [B, H, T, S]; it changes nothing.

    Returns:
      The context [B, T, H, U] in the dtype of `value`, and the weights [B, H, T, S] before
      dropout.

    Source: Vaswani et al. 2017, equation 1.
    """
    # The softmax is taken in float32 or wider: bfloat16 sums lose the tail of long rows.
    dtype = at_least_float32(query.dtype)
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=dtype)
    scores = scores * query.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    if tap is not None:
        tap("scores", scores)
    weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    weights = weights.astype(value.dtype)
    kept = weights if dropout is None else dropout(weights)
    return jnp.einsum("bhts,bshu->bthu", kept, value), weights


class KeyProjection(nn.Dense):
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
        self.dropout = nn.Dropout(c.attention_dropout_rate)

    def _split_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.config.num_heads, -1)  # [B, S, H*K] -> [B, S, H, K]

    def project(self, inputs: Array) -> KeyValue:
        """Keys and values of `inputs` [B, S, D]."""
        return KeyValue(self._split_heads(self.key(inputs)), self._split_heads(self.value(inputs)))

    def __call__(
        self, inputs: Array, attended: KeyValue, mask: Array | None, deterministic: bool
    ) -> tuple[Array, Array]:
        """Attends from `inputs`.

        Args:
          inputs: [B, T, D], whose projections are the queries.
          attended: keys [B, S, H, K] and values [B, S, H, U], from `project`.
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
        joined = context.reshape(*context.shape[:-2], -1)  # [B, T, H, U] -> [B, T, H*U]
        self.sow("intermediates", "context", joined)
        return self.output(joined), weights
