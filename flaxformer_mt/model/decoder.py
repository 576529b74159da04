"""The decoder: its layer, and the stack of them, for whole targets or one token at a time."""

import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.attention import KeyValue, MultiHeadAttention
from flaxformer_mt.model.feed_forward import FeedForward
from flaxformer_mt.model.normalization import Norm, residual
from flaxformer_mt.model.numerics import Dropout
from flaxformer_mt.model.stack import stack


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, feed-forward, each with residual and norm.

    Without inputs (`config.has_inputs`) there is no attention to the encoder.
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Makes the sub-layers."""
        c = self.config
        self.self_attention = MultiHeadAttention(c)
        self.self_attention_norm = Norm(c)
        if c.has_inputs:
            self.cross_attention = MultiHeadAttention(c)
            self.cross_attention_norm = Norm(c)
        self.feed_forward = FeedForward(c)
        self.feed_forward_norm = Norm(c)
        self.dropout = Dropout(c.dropout_rate)

    def project_encoded(self, encoded: Array) -> tuple[Array, KeyValue]:
        """Cross-attention's keys and values of `encoded` [B, S, D], which is handed on."""
        return encoded, self.cross_attention.project(encoded)

    def __call__(
        self,
        x: Array,
        cross: KeyValue | None,
        self_mask: Array | None,
        cross_mask: Array | None,
        deterministic: bool,
        return_attention: bool,
    ) -> tuple[Array, tuple[Array, Array | None] | None]:
        """Maps [B, T, D] to [B, T, D].

        Args:
          x: [B, T, D].
          cross: keys [B, H, S, K] and values [B, H, S, U] of the encoder's output.
          self_mask: broadcastable to [B, H, T, T].
          cross_mask: broadcastable to [B, H, T, S].
          deterministic: no dropout.
          return_attention: also return weights of self- [B, H, T, T] and cross-attention
            [B, H, T, S].
        """

        def attend_to_self(y: Array) -> tuple[Array, Array]:
            return self.self_attention(y, self.self_attention.project(y), self_mask, deterministic)

        x, self_weights = self._residual(x, attend_to_self, self.self_attention_norm, deterministic)
        x, cross_weights = self._attend_and_transform(x, cross, cross_mask, deterministic)
        return x, (self_weights, cross_weights) if return_attention else None

    def step(
        self,
        x: Array,
        cross: KeyValue | None,
        past: KeyValue,
        cross_mask: Array | None,
        decode_position: Array,
    ) -> tuple[Array, KeyValue]:
        """Maps one position of W hypotheses per sentence, given all earlier ones.

        Args:
          x: [B, W, D].
          cross: keys [B, H, S, K] and values [B, H, S, U], one for all hypotheses of a sentence.
          past: keys [B, W, H, P, K] and values [B, W, H, P, U]; positions from `decode_position`
            on are not read.
          cross_mask: [B, 1, 1, S].
          decode_position: int32 scalar, from 0.

        Returns:
          [B, W, D], and `past` with this position filled in.
        """
        batch, beams, d_model = x.shape
        visible = jnp.arange(past.key.shape[3], dtype=jnp.int32) <= decode_position

        def attend_to_past(y: Array) -> tuple[Array, KeyValue]:
            new = self.self_attention.project(y)
            now = KeyValue(
                *(
                    # Projected, hypotheses stand in the time axis: [B, H, W, K].
                    lax.dynamic_update_slice_in_dim(
                        old, row.swapaxes(1, 2)[..., None, :], decode_position, axis=3
                    )
                    for old, row in zip(past, new, strict=True)
                )
            )
            # Each hypothesis attends to its own past: hypotheses stand in the batch axis.
            rows = KeyValue(*(old.reshape(batch * beams, *old.shape[2:]) for old in now))
            z, _ = self.self_attention(
                y.reshape(batch * beams, 1, d_model), rows, visible[None, None, None], True
            )
            return z.reshape(batch, beams, d_model), now

        x, past = self._residual(x, attend_to_past, self.self_attention_norm, True)
        # All hypotheses attend to the same source: they stand in the query axis.
        x, _ = self._attend_and_transform(x, cross, cross_mask, True)
        return x, past

    def _attend_and_transform(
        self, x: Array, cross: KeyValue | None, cross_mask: Array | None, deterministic: bool
    ) -> tuple[Array, Array | None]:
        """What follows self-attention; also returns the cross-attention weights."""
        weights = None
        if cross is not None:

            def attend_to_encoded(y: Array) -> tuple[Array, Array]:
                return self.cross_attention(y, cross, cross_mask, deterministic)

            x, weights = self._residual(
                x, attend_to_encoded, self.cross_attention_norm, deterministic
            )

        def transform(y: Array) -> tuple[Array, None]:
            return self.feed_forward(y, deterministic), None

        x, _ = self._residual(x, transform, self.feed_forward_norm, deterministic)
        return x, weights

    def _residual(self, x, sublayer, norm, deterministic):
        def dropout(y: Array) -> Array:
            return self.dropout(y, deterministic=deterministic)

        return residual(x, sublayer, norm, dropout, self.config.norm_position)


class Decoder(nn.Module):
    """`num_decoder_layers` layers between an optional norm below and an optional norm on top."""

    config: TransformerConfig

    def setup(self) -> None:
        """Makes the layers and norms."""
        c = self.config
        if c.embedding_norm:
            self.embedding_norm = Norm(c)
        same = nn.broadcast
        self.layers = stack(
            DecoderLayer,
            c,
            c.num_decoder_layers,
            {
                "__call__": (0, same, same, same, same),
                "step": (0, 0, same, same),
                "project_encoded": (),
            },
        )
        if c.final_norm:
            self.final_norm = Norm(c)

    def project_encoded(self, encoded: Array) -> KeyValue:
        """Every layer's cross-attention keys [L, B, H, S, K] and values of `encoded` [B, S, D]."""
        return self.layers.project_encoded(encoded)[1]

    def __call__(
        self,
        x: Array,
        encoded: Array | None,
        self_mask: Array | None = None,
        cross_mask: Array | None = None,
        *,
        deterministic: bool = True,
        return_attention: bool = False,
    ) -> tuple[Array, Array | None, Array | None]:
        """Decodes whole targets.

        Args:
          x: [B, T, D] embedded decoder inputs.
          encoded: [B, S, D], or None without inputs.
          self_mask: bool, broadcastable to [B, H, T, T], True = attend.
          cross_mask: bool, broadcastable to [B, H, T, S].
          deterministic: no dropout.
          return_attention: return the weights of every layer.

        Returns:
          [B, T, D]; self-attention weights [L, B, H, T, T] and cross-attention weights
          [L, B, H, T, S], or None.
        """
        cross = None if encoded is None else self.project_encoded(encoded)
        x, weights = self.layers(
            self._below(x), cross, self_mask, cross_mask, deterministic, return_attention
        )
        self_weights, cross_weights = weights if return_attention else (None, None)
        return self._above(x), self_weights, cross_weights

    def step(
        self,
        x: Array,
        cross: KeyValue | None,
        past: KeyValue,
        cross_mask: Array | None,
        decode_position: Array,
    ) -> tuple[Array, KeyValue]:
        """`DecoderLayer.step` for every layer: `cross` and `past` have a leading axis L."""
        x, past = self.layers.step(self._below(x), cross, past, cross_mask, decode_position)
        return self._above(x), past

    def _below(self, x: Array) -> Array:
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def _above(self, x: Array) -> Array:
        return self.final_norm(x) if self.config.final_norm else x
