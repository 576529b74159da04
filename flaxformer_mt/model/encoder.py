"""The encoder: its layer and its stack."""

from flax import linen as nn
from jax import Array
from jaxtyping import Float

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.attention import attention_class
from flaxformer_mt.model.feed_forward import FeedForward
from flaxformer_mt.model.kernels.products import Biased
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.masks import Visibility
from flaxformer_mt.model.normalization import Norm, residual
from flaxformer_mt.model.numerics import Dropout
from flaxformer_mt.model.positions import (
    AttentionPositions,
    attention_bias,
    position_bias,
    query_key_transform,
    with_shared_bias,
)
from flaxformer_mt.model.stack import stack


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each with residual and norm."""

    config: TransformerConfig

    def setup(self) -> None:
        """Creates the parameters."""
        c = self.config
        self.self_attention = attention_class(c)(c)
        self.self_attention_norm = Norm(c)
        self.position_bias = position_bias(c, bidirectional=True, shared=False)
        self.feed_forward = FeedForward(c)
        self.feed_forward_norm = Norm(c)
        self.dropout = Dropout(c.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Visibility | Array | None,
        positions: AttentionPositions | None,
        deterministic: bool,
        return_attention: bool,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B H S S"] | None]:
        """Applies the layer; the second result is the attention, if requested."""

        def attend(y: Array, add_bias: bool) -> tuple[Array | Biased, Array | None]:
            transform = query_key_transform(self.config, positions)
            bias = attention_bias(positions, self.position_bias)
            return self.self_attention(
                y, y, mask, deterministic, bias, transform, return_attention, add_bias
            )

        def feed_forward(y: Array, add_bias: bool) -> tuple[Array | Biased, None]:
            return self.feed_forward(y, deterministic, add_bias), None

        norms = self.self_attention_norm, self.feed_forward_norm
        x, weights = residual(x, attend, norms[0], self.dropout, deterministic)
        x, _ = residual(x, feed_forward, norms[1], self.dropout, deterministic, is_last=True)
        return constrain(x, "batch", "length", "embed"), weights if return_attention else None


class Encoder(nn.Module):
    """A stack of `num_encoder_layers` layers, with an optional norm below and one on top."""

    config: TransformerConfig

    def setup(self) -> None:
        """Creates the parameters."""
        c = self.config
        if c.embedding_norm:
            self.embedding_norm = Norm(c)
        self.position_bias = position_bias(c, bidirectional=True, shared=True)
        same = nn.broadcast
        self.layers = stack(
            EncoderLayer, c, c.num_encoder_layers, {"__call__": (same, same, same, same)}
        )
        if c.final_norm:
            self.final_norm = Norm(c)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Visibility | Array | None = None,
        positions: AttentionPositions | None = None,
        *,
        deterministic: bool = True,
        return_attention: bool = False,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "L B H S S"] | None]:
        """Encodes embedded tokens; the second result is the attention of all layers, if requested.

        The mask says which keys are visible, or is bool, broadcastable to [B, H, S, S], True =
        attend. `positions` are from `attention_positions`.
        """
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
        positions = with_shared_bias(positions, self.position_bias)
        x, weights = self.layers(x, mask, positions, deterministic, return_attention)
        if self.config.final_norm:
            x = self.final_norm(x)
        return constrain(x, "batch", "length", "embed"), weights
