"""The encoder and decoder layers of a study notebook on attention.

Post-norm. A query, key or value goes through two linear maps: one from D to D, which is split into
heads, and one from D/H to D/H, which all heads share. The notebook has no embeddings, stacks or
output; `Layers` runs its layers sequentially.

Source: a Jupyter notebook, "Scaled Dot-Product Attention implementation. It's fundermental for
multi-head attention".
"""

import math

import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.common import (
    MASKED_SCORE,
    Attention,
    attention_taps,
    feed_forward_taps,
    heads_joined,
    join_heads,
    post_norm_taps,
    split_heads,
)
from flaxformer_mt.parity.trace import Tap, for_layers


class ScaledDotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d_k)) v of linear maps of its inputs."""

    def __init__(self, d_model: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.d_k = d_k
        self.W_q = nn.Linear(d_model, d_k)
        self.W_k = nn.Linear(d_model, d_k)
        self.W_v = nn.Linear(d_model, d_v)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Context [..., T, d_v] and weights [..., T, S]; inputs are [..., T or S, d_model]."""
        q, k, v = self.W_q(q), self.W_k(k), self.W_v(v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, MASKED_SCORE)
        weights = scores.softmax(dim=-1)
        return weights @ v, weights


class MultiHeadAttention(nn.Module):
    """H heads, each of which gets a part of three projections.

    Args:
      published_head_join: put the heads together as the notebook does, along the batch axis, which
        mixes sentences, heads and positions unless B = H = 1. False joins them along the features,
        as in the paper.
    """

    def __init__(self, d_model: int, num_heads: int, published_head_join: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.published_head_join = published_head_join
        d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.attention = ScaledDotProductAttention(d_k, d_k, d_k)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, T, D], and the weights averaged over heads [B, T, S]; mask [B, 1 or T, S]."""
        heads, weights = self.attention(
            split_heads(self.W_q(q), self.num_heads),
            split_heads(self.W_k(k), self.num_heads),
            split_heads(self.W_v(v), self.num_heads),
            None if mask is None else mask.unsqueeze(1),
        )  # [B, H, T, K] and [B, H, T, S]
        if self.published_head_join:
            joined = torch.cat(heads.unbind(dim=1), dim=0).view(*q.shape)
        else:
            joined = join_heads(heads)
        return self.W_o(joined), weights.mean(dim=1)


def _feed_forward(d_model: int, d_ff: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class TransformerEncoderLayer(nn.Module):
    """Self-attention and feed-forward, each as norm(x + f(x))."""

    def __init__(
        self, d_model, num_heads, d_ff, dropout: float = 0.1, published_head_join: bool = False
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(d_model, num_heads, published_head_join)
        self.feed_forward = _feed_forward(d_model, d_ff)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, S, D], and the attention weights [B, S, S], which the notebook discards."""
        y, weights = self.self_attention(x, x, x, mask)
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.dropout(self.feed_forward(x))), weights


class TransformerDecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward, each as norm(x + f(x))."""

    def __init__(
        self, d_model, num_heads, d_ff, dropout: float = 0.1, published_head_join: bool = False
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(d_model, num_heads, published_head_join)
        self.cross_attention = MultiHeadAttention(d_model, num_heads, published_head_join)
        self.feed_forward = _feed_forward(d_model, d_ff)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        encoder_output: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D], and the weights [B, T, T] and [B, T, S], which the notebook discards."""
        y, self_weights = self.self_attention(x, x, x, tgt_mask)
        x = self.norm1(x + self.dropout(y))
        y, cross_weights = self.cross_attention(x, encoder_output, encoder_output, src_mask)
        x = self.norm2(x + self.dropout(y))
        return self.norm3(x + self.dropout(self.feed_forward(x))), self_weights, cross_weights


class Layers(nn.Module):
    """Encoder layers, then decoder layers that attend to their output."""

    def __init__(self, encoder: list[nn.Module], decoder: list[nn.Module]) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(encoder)
        self.decoder = nn.ModuleList(decoder)

    def forward(
        self,
        source: Tensor,
        target_input: Tensor,
        source_mask: Tensor,
        target_mask: Tensor,
        return_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Attention]:
        """Runs the layers on vectors.

        Args:
          source: [B, S, D].
          target_input: [B, T, D].
          source_mask: bool [B, 1, S], True = attend.
          target_mask: bool [B, T, T], True = attend.
          return_attention: also return the weights, which are averaged over heads: [B, T, S].

        Returns:
          The last decoder layer's output [B, T, D].
        """
        encoder_self, decoder_self, decoder_cross = [], [], []
        for layer in self.encoder:
            source, weights = layer(source, source_mask)
            encoder_self.append(weights)
        x = target_input
        for layer in self.decoder:
            x, self_weights, cross_weights = layer(x, source, source_mask, target_mask)
            decoder_self.append(self_weights)
            decoder_cross.append(cross_weights)
        if return_attention:
            return x, Attention(encoder_self, decoder_self, decoder_cross)
        return x


def build(config: TransformerConfig, published_head_join: bool = False) -> Layers:
    """Builds the reference with the sizes of `config`; by default, heads are joined correctly."""
    sizes = (config.d_model, config.num_heads, config.d_ff, config.dropout_rate)
    return Layers(
        [
            TransformerEncoderLayer(*sizes, published_head_join)
            for _ in range(config.num_encoder_layers)
        ],
        [
            TransformerDecoderLayer(*sizes, published_head_join)
            for _ in range(config.num_decoder_layers)
        ],
    )


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`.

    A head's query, key and value are what its second linear map gives.
    """
    norms = {"self": "norm1", "cross": "norm2"}
    return {
        **for_layers(config.num_encoder_layers, _layer_taps("encoder", {"self": "norm1"}, "norm2")),
        **for_layers(config.num_decoder_layers, _layer_taps("decoder", norms, "norm3")),
    }


def _layer_taps(stack: str, norms: dict[str, str], last_norm: str) -> dict[str, Tap]:
    site, layer = f"{stack}/layers/{{layer}}", f"{stack}.{{layer}}"
    found = {site: Tap(layer)}
    for kind, norm in norms.items():
        attention = f"{layer}.{kind}_attention"
        inner = f"{attention}.attention"
        linears = [f"{inner}.W_q", f"{inner}.W_k", f"{inner}.W_v", f"{attention}.W_o"]
        inside = attention_taps(f"{site}/{kind}_attention", linears, inner)
        # The notebook calls the inner attention once for each head.
        for name in ("query", "key", "value"):
            projection = f"{site}/{kind}_attention/{name}"
            inside[projection] = inside[projection]._replace(reshape=heads_joined, is_by_head=True)
        for name in ("scores", "weights"):
            of_softmax = f"{site}/{kind}_attention/{name}"
            inside[of_softmax] = inside[of_softmax]._replace(is_by_head=True)
        found |= inside | post_norm_taps(f"{site}/{kind}_attention", f"{layer}.{norm}")
    network = f"{layer}.feed_forward"
    found |= feed_forward_taps(f"{site}/feed_forward", f"{network}.0", f"{network}.2")
    return found | post_norm_taps(f"{site}/feed_forward", f"{layer}.{last_norm}")
