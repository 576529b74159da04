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
from flaxformer_mt.interop.families.double_projection import layers
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap


class ScaledDotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d_k)) v of linear maps of its inputs."""

    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.d_k = d_k
        self.W_q = nn.Linear(d_k, d_k)
        self.W_k = nn.Linear(d_k, d_k)
        self.W_v = nn.Linear(d_k, d_k)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Context [..., T, d_k] and weights [..., T, S]; inputs are [..., T or S, d_k]."""
        q, k, v = self.W_q(q), self.W_k(k), self.W_v(v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        weights = scores.masked_fill(mask == 0, common.MASKED_SCORE).softmax(dim=-1)
        return weights @ v, weights


class MultiHeadAttention(nn.Module):
    """H heads, each of which gets a part of three projections.

    `published_head_join` puts the heads together as the notebook does, along the batch axis, which
    mixes sentences, heads and positions unless B = H = 1. False joins them along the features.
    """

    def __init__(self, config: TransformerConfig, published_head_join: bool) -> None:
        super().__init__()
        d_model, self.num_heads = config.d_model, config.num_heads
        self.published_head_join = published_head_join
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.attention = ScaledDotProductAttention(d_model // self.num_heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D], and the weights averaged over heads [B, T, S]; mask [B, 1 or T, S]."""
        heads, weights = self.attention(
            common.split_heads(self.W_q(q), self.num_heads),
            common.split_heads(self.W_k(k), self.num_heads),
            common.split_heads(self.W_v(v), self.num_heads),
            mask.unsqueeze(1),
        )  # [B, H, T, K] and [B, H, T, S]
        if self.published_head_join:
            joined = torch.cat(heads.unbind(dim=1), dim=0).view(*q.shape)
        else:
            joined = common.join_heads(heads)
        return self.W_o(joined), weights.mean(dim=1)


class Layer(nn.Module):
    """Self-attention, in the decoder cross-attention, and feed-forward: each norm(x + f(x))."""

    def __init__(
        self, config: TransformerConfig, attends_to_source: bool, published_head_join: bool
    ) -> None:
        super().__init__()
        d_model, d_ff = config.d_model, config.d_ff
        self.self_attention = MultiHeadAttention(config, published_head_join)
        if attends_to_source:
            self.cross_attention = MultiHeadAttention(config, published_head_join)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)
        )
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        if attends_to_source:
            self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, mask: Tensor, *source: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.self_attention(x, x, x, mask)[0]))
        if not source:
            return self.norm2(x + self.dropout(self.feed_forward(x)))
        memory, source_mask = source
        y, _ = self.cross_attention(x, memory, memory, source_mask)
        x = self.norm2(x + self.dropout(y))
        return self.norm3(x + self.dropout(self.feed_forward(x)))


class Layers(common.EncoderDecoder):
    """Encoder layers, then decoder layers that attend to their output."""

    def __init__(self, config: TransformerConfig, published_head_join: bool = False) -> None:
        super().__init__(config)

        def layers(number: int, attends_to_source: bool) -> nn.ModuleList:
            return nn.ModuleList(
                Layer(config, attends_to_source, published_head_join) for _ in range(number)
            )

        self.encoder = layers(config.num_encoder_layers, attends_to_source=False)
        self.decoder = layers(config.num_decoder_layers, attends_to_source=True)

    def forward(self, source: Tensor, target_input: Tensor, *masks: Tensor) -> Tensor:
        """Returns [B, T, D]; `masks`: source [B, 1, S], target [B, T, T]: True = attend."""
        source_mask, target_mask = masks
        encoded = common.in_turn(self.encoder, source, source_mask)
        return common.in_turn(self.decoder, target_input, target_mask, encoded, source_mask)


build = Layers


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    # A head's query, key and value are what its second linear map gives.
    projected = ("query", "key", "value")

    def in_stack(side, stack, sublayers, found):
        # The notebook calls the inner attention once for each head.
        for site, tap in found.items():
            name = site.rpartition("/")[2]
            if name in (*projected, "scores", "weights"):
                reshape = common.heads_joined if name in projected else None
                found[site] = tap._replace(reshape=reshape, is_by_head=True)

    return common.both_stacks(config, layers(1, 1), in_stack, softmax="attention")
