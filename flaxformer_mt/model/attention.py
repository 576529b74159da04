"""Scaled dot-product attention and multi-head attention."""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.model import DOT_PRODUCT
from flaxformer_mt.model import logical_axes
from flaxformer_mt.model.kernels import fused_attention as kernels
from flaxformer_mt.model.kernels.packed_projections import packed_attention
from flaxformer_mt.model.kernels.products import Biased, Shared
from flaxformer_mt.model.linear import dense, to_residual
from flaxformer_mt.model.masks import Mask, Visibility, dense_mask
from flaxformer_mt.model.normalization import Norm
from flaxformer_mt.model.numerics import Dropout, at_least_float32, masked_softmax, soft_cap
from flaxformer_mt.model.registry import Class, Registry


class KeyValue(NamedTuple):
    """Keys [B, G, S, K] and values [B, G, S, U]."""

    key: Array
    value: Array


def scaled_dot_product_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S U"],
    mask: Bool[Array, "#B #H #T #S"] | None = None,
    dropout: Callable[[Array], Array] | None = None,
    tap: Callable[[str, Array], object] | None = None,
    bias: Float[Array, "..."] | None = None,
    cap: float = 0.0,
) -> tuple[Float[Array, "B H T U"], Float[Array, "B H T S"]]:
    r"""Computes attention from every query to every key.

    .. math:: \mathrm{softmax}(\mathrm{cap}(Q K^\top / \sqrt{K}) + bias)\, V

    Query head h of H attends to head h // (H / G) of G.

    Args:
      query: the queries.
      key: the keys.
      value: the values; U may differ from K.
      mask: True = attend. A query without any key gets zeros (the published code gives it the mean
        of all values).
      dropout: applied to the weights.
      tap: called with "scores" and the masked scores, for inspection.
      bias: broadcastable to [B, H, T, S]; added to the scaled scores.
      cap: see `soft_cap`; 0 = none.

    Returns:
      The context in the dtype of `value`, and the weights before dropout.

    Source: Vaswani et al. 2017, equation 1; Ainslie et al. 2023 for G < H.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    # The queries of a group are rows of one matrix.
    grouped = (heads // groups) * queries
    # The softmax is taken in float32 or wider: bfloat16 sums lose the tail of long rows.
    dtype = at_least_float32(query.dtype)
    query = query.reshape(batch, groups, grouped, width)
    scores = jnp.einsum("bhtk,bhsk->bhts", query, key, preferred_element_type=dtype)
    scores = soft_cap(scores.reshape(batch, heads, queries, keys) * width**-0.5, cap)
    if bias is not None:
        scores = scores + bias.astype(dtype)
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    if tap is not None:
        tap("scores", jnp.where(mask, scores, jnp.finfo(dtype).min))
    weights = masked_softmax(scores, mask).astype(value.dtype)
    kept = weights if dropout is None else dropout(weights)
    kept = kept.reshape(batch, groups, grouped, keys)
    context = jnp.einsum("bhts,bhsu->bhtu", kept, value)
    return context.reshape(batch, heads, queries, -1), weights


class MultiHeadAttention(nn.Module):
    """Multi-head attention: H heads, each with its own projections of queries, keys and values.

    H*K and H*U need not be D. With `num_kv_heads`, there are fewer heads of keys and values, each
    for a group of query heads. Source: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023,
    "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints".
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        logical_axes.require_even_parts("attention_heads", c.num_heads, "model.num_heads")
        logical_axes.require_even_parts("attention_heads", c.kv_heads, "model.num_kv_heads")
        divisor = 1 if c.scale_scores else c.key_width**0.5
        self.query = dense(c, "qkv", c.d_model, c.num_heads * c.key_width, c.qkv_bias, divisor)
        self.key = dense(c, "qkv", c.d_model, c.kv_heads * c.key_width, c.qkv_bias)
        self.value = dense(c, "qkv", c.d_model, c.kv_heads * c.value_width, c.qkv_bias)
        self.output = dense(
            c,
            "attention_output",
            c.num_heads * c.value_width,
            c.d_model,
            c.attention_output_bias,
        )
        self.dropout = Dropout(c.attention_dropout_rate)
        if c.query_key_norm:
            self.query_norm = Norm(c, c.key_width)
            self.key_norm = Norm(c, c.key_width)

    def _split_heads(self, x: Array, heads: int) -> Array:
        # The features of one head are contiguous.
        x = logical_axes.constrain(x, "batch", "length", "heads")
        return x.reshape(*x.shape[:-1], heads, -1).swapaxes(-2, -3)

    def project(
        self, inputs: Array | Shared, transform: Callable[[Array], Array] | None = None
    ) -> KeyValue:
        """Computes the keys and values of `inputs` [B, S, D].

        `transform` is applied to the keys [B, G, S, K], such as a rotation by their positions.
        """
        # With dot products of plain keys, a key bias adds the same number to all scores
        # of a query, which cancels in the softmax: its gradient is 0. Computed, it would be
        # rounding noise, which Adam scales up to steps of full size.
        c, heads = self.config, self.config.kv_heads
        is_linear = not (c.query_key_norm or c.score_cap) and transform is None
        cancels = c.attention_kind == DOT_PRODUCT and is_linear
        key = self._split_heads(self.key(inputs, train_bias=not cancels), heads)
        key = self.key_norm(key) if c.query_key_norm else key
        value = self._split_heads(self.value(inputs), heads)
        return KeyValue(key if transform is None else transform(key), value)

    def attend(
        self,
        query: Float[Array, "B H T K"],
        key: Float[Array, "B G S K"],
        value: Float[Array, "B G S U"],
        mask: Bool[Array, "#B #H #T #S"] | None,
        bias: Float[Array, "#B #H #T #S"] | None,
        deterministic: bool,
    ) -> tuple[Float[Array, "B H T U"], Float[Array, "B H T S"]]:
        """Attends with all heads; custom attention (`register_attention`) overrides this method.

        In decoding, T = W hypotheses of one token each. Returns the context, and the weights before
        dropout.
        """
        return scaled_dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            dropout=lambda weights: self.dropout(weights, deterministic=deterministic),
            tap=lambda name, value: self.sow("intermediates", name, value),
            bias=bias,
            cap=self.config.score_cap,
        )

    def _project_all(
        self,
        inputs: Array,
        attended: Array | KeyValue,
        transform: Callable[[Array], Array] | None,
    ) -> tuple[Array, KeyValue]:
        shared = Shared.of(inputs, self.config.kv_heads)
        query = self._split_heads(self.query(shared), self.config.num_heads)
        query = self.query_norm(query) if self.config.query_key_norm else query
        query = query if transform is None else transform(query)
        if not self.config.scale_scores:
            query = query * self.config.key_width**0.5  # All backends divide scores by it.
        if isinstance(attended, KeyValue):
            return query, attended
        if attended is not inputs:
            shared = Shared.of(attended, self.config.kv_heads)
        return query, self.project(shared, transform)

    def _fused_backend(
        self, inputs: Array, attended: Array | KeyValue, mask: object, return_weights: bool
    ) -> str:
        """Returns the backend that never writes the weights, or "" if they are needed."""
        c = self.config
        is_read = return_weights or self.is_mutable_collection("intermediates")
        is_whole_pass = isinstance(mask, Visibility) and not self.is_initializing()
        if is_read or not is_whole_pass or c.attention_kind != DOT_PRODUCT or c.score_cap:
            return ""
        keys = attended.key.shape[2] if isinstance(attended, KeyValue) else attended.shape[1]
        queries = inputs.shape[0], c.num_heads, inputs.shape[1], c.key_width
        case = kernels.AttentionCase(
            logical_axes.mesh_platform(),
            logical_axes.mesh_device_kind(),
            jnp.dtype(c.dtype),
            queries,
            keys,
            c.value_width,
        )
        backend = kernels.choose_backend(c.attention_backend, case)
        return "" if backend == "einsum" else backend

    def _fused(
        self,
        backend: str,
        inputs: Array,
        attended: Array | KeyValue,
        visible: Visibility,
        deterministic: bool,
        bias: Array | None,
        transform: Callable[[Array], Array] | None,
    ) -> Array:
        c = self.config
        dropped = 0 if deterministic else self.dropout.threshold
        options = kernels.AttentionOptions(
            backend, visible.causal, dropped, interpret=logical_axes.mesh_platform() == "cpu"
        )
        arrays = functools.partial(
            kernels.AttentionInputs,
            query_segments=visible.query_segments,
            key_segments=visible.key_segments,
            bias=bias,
            dropout_key=self.dropout.draw_key() if dropped else None,
        )
        is_plain = transform is None and c.scale_scores and not c.query_key_norm
        is_plain = is_plain and not isinstance(attended, KeyValue)
        if backend != "pallas_gpu" or not is_plain:
            query, (key, value) = self._project_all(inputs, attended, transform)
            return kernels.fused_attention(options, arrays(query, key, value))
        return packed_attention(
            options,
            (self.query, self.key, self.value),
            c.key_width,
            inputs,
            cast(Array, attended),
            arrays,
            recompute=c.remat == "projections",
        )

    def __call__(
        self,
        inputs: Float[Array, "B T D"],
        attended: Float[Array, "B S D"] | KeyValue,
        mask: Mask,
        deterministic: bool,
        bias: Float[Array, "#B #H #T #S"] | None = None,
        transform: Callable[[Array], Array] | None = None,
        return_weights: bool = True,
        add_bias: bool = True,
    ) -> tuple[Float[Array, "B T D"] | Biased, Float[Array, "B H T S"] | None]:
        """Attends from `inputs` to `attended`.

        Args:
          inputs: their projections are the queries.
          attended: `inputs` itself in self-attention; or its keys and values, from `project`.
          mask: which keys are visible.
          deterministic: no dropout.
          bias: added to the scores.
          transform: applied to queries [B, H, T, K] and keys; those of `project` have had it.
          return_weights: whether the weights are read; fused attention does not have them.
          add_bias: False leaves the output projection's bias to be added.

        Returns:
          The outputs, and the weights if they were computed.

        Raises:
          UserError: `config.attention_backend` cannot do this.
        """
        weights: Array | None = None
        if backend := self._fused_backend(inputs, attended, mask, return_weights):
            visible = cast(Visibility, mask)
            context = self._fused(
                backend, inputs, attended, visible, deterministic, bias, transform
            )
        else:
            query, (key, value) = self._project_all(inputs, attended, transform)
            context, weights = self.attend(query, key, value, dense_mask(mask), bias, deterministic)
        joined = context.swapaxes(-2, -3).reshape(*inputs.shape[:-1], -1)  # [B, T, H*U]
        self.sow("intermediates", "context", joined)
        return to_residual(self.output, joined, add_bias), weights


ATTENTION = Registry("attention_kind", "register_attention", DOT_PRODUCT, MultiHeadAttention)


def register_attention(name: str) -> Callable[[Class], Class]:
    """Decorator that registers a custom attention class as a value of `attention_kind`.

        @register_attention("sharp")
        class SharpAttention(MultiHeadAttention):
            factor: float = 2.0

            def attend(self, query, key, value, mask, bias, deterministic):
                return super().attend(self.factor * query, key, value, mask, bias, deterministic)

    All attention of a model with `attention_kind="sharp"` is of this class, which may also add
    parameters in its `setup`. Its fields are options, as in `attention_kind="sharp(factor=3.0)"`.
    A run folder records the name and the options, and no code, so a program that uses the run
    imports the file with the class first. Registering a name again replaces the class.

    Raises:
      TypeError: the name is not a string, or the class is not a subclass of `MultiHeadAttention`.
      UserError: the name is that of the built-in attention.
    """
    return ATTENTION.register(name)
