"""The encoder: its layer, and the stack of them."""

from flax import linen as nn
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.attention import MultiHeadAttention
from flaxformer_mt.model.feed_forward import FeedForward
from flaxformer_mt.model.normalization import Norm, residual
from flaxformer_mt.model.numerics import Dropout
from flaxformer_mt.model.stack import stack


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each with residual and norm."""

    config: TransformerConfig

    def setup(self) -> None:
        """Makes the sub-layers."""
        c = self.config
        self.self_attention = MultiHeadAttention(c)
        self.self_attention_norm = Norm(c)
        self.feed_forward = FeedForward(c)
        self.feed_forward_norm = Norm(c)
        self.dropout = Dropout(c.dropout_rate)

    def __call__(
        self, x: Array, mask: Array | None, deterministic: bool, return_attention: bool
    ) -> tuple[Array, Array | None]:
        """Maps [B, S, D] to [B, S, D]; the second result is the attention [B, H, S, S]."""

        def attend(y: Array) -> tuple[Array, Array]:
            return self.self_attention(y, self.self_attention.project(y), mask, deterministic)

        def transform(y: Array) -> tuple[Array, None]:
            return self.feed_forward(y, deterministic), None

        def dropout(y: Array) -> Array:
            return self.dropout(y, deterministic=deterministic)

        position = self.config.norm_position
        x, weights = residual(x, attend, self.self_attention_norm, dropout, position)
        x, _ = residual(x, transform, self.feed_forward_norm, dropout, position)
        return x, weights if return_attention else None


class Encoder(nn.Module):
    """`num_encoder_layers` layers between an optional norm below and an optional norm on top."""

    config: TransformerConfig

    def setup(self) -> None:
        """Makes the layers and norms."""
        c = self.config
        if c.embedding_norm:
            self.embedding_norm = Norm(c)
        self.layers = stack(
            EncoderLayer,
            c,
            c.num_encoder_layers,
            {"__call__": (nn.broadcast, nn.broadcast, nn.broadcast)},
        )
        if c.final_norm:
            self.final_norm = Norm(c)

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        *,
        deterministic: bool = True,
        return_attention: bool = False,
    ) -> tuple[Array, Array | None]:
        """Encodes vectors.

        Args:
          x: [B, S, D] embedded tokens.
          mask: bool, broadcastable to [B, H, S, S], True = attend.
          deterministic: no dropout.
          return_attention: return the weights of every layer.

        Returns:
          [B, S, D], and the self-attention weights [L, B, H, S, S] or None.
        """
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
        x, weights = self.layers(x, mask, deterministic, return_attention)
        if self.config.final_norm:
            x = self.final_norm(x)
        return x, weights
