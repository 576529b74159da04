"""attention-is-all-you-need-pytorch by jadore801120.

Post-norm inside the sub-layers, one more norm after the embeddings, no attention biases, free head
sizes.

Source: https://github.com/jadore801120/attention-is-all-you-need-pytorch (transformer/Models.py,
Layers.py, SubLayers.py, Modules.py).
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.common import (
    MASKED_SCORE,
    Attention,
    attention_taps,
    feed_forward_taps,
    join_heads,
    not_future,
    not_padding,
    post_norm_taps,
    split_heads,
)
from flaxformer_mt.parity.trace import Tap, for_layers

NORM_EPSILON = 1e-6
ATTENTION_DROPOUT = 0.1  # The published modules never pass their rate on to the attention weights.


class ScaledDotProductAttention(nn.Module):
    """softmax(q k^T / temperature) v."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(ATTENTION_DROPOUT)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Context [B, H, T, U] and weights [B, H, T, S], after dropout as published."""
        scores = (q / self.temperature) @ k.transpose(2, 3)
        weights = self.dropout(scores.masked_fill(~mask, MASKED_SCORE).softmax(dim=-1))
        return weights @ v, weights


class MultiHeadAttention(nn.Module):
    """norm(x + heads joined), with H*K and H*U independent of D."""

    def __init__(self, n_head: int, d_model: int, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.attention = ScaledDotProductAttention(temperature=d_k**0.5)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model, eps=NORM_EPSILON)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] attending to memory [B, S, D] under mask [B, 1 or T, S]."""
        q = split_heads(self.w_qs(x), self.n_head)
        k = split_heads(self.w_ks(memory), self.n_head)
        v = split_heads(self.w_vs(memory), self.n_head)
        context, weights = self.attention(q, k, v, mask.unsqueeze(1))
        return self.layer_norm(x + self.dropout(self.fc(join_heads(context)))), weights


class PositionwiseFeedForward(nn.Module):
    """norm(x + W2 relu(W1 x))."""

    def __init__(self, d_in: int, d_hid: int, dropout: float) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_in, d_hid)
        self.w_2 = nn.Linear(d_hid, d_in)
        self.layer_norm = nn.LayerNorm(d_in, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.layer_norm(x + self.dropout(self.w_2(self.w_1(x).relu())))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, d_model, d_inner, n_head, d_k, d_v, dropout) -> None:
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D], and the attention weights [B, H, S, S]."""
        x, weights = self.slf_attn(x, x, mask)
        return self.pos_ffn(x), weights


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention, feed-forward."""

    def __init__(self, d_model, d_inner, n_head, d_k, d_v, dropout) -> None:
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.enc_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, dropout)

    def forward(
        self, x: Tensor, memory: Tensor, self_mask: Tensor, cross_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D], and the attention weights [B, H, T, T] and [B, H, T, S]."""
        x, self_weights = self.slf_attn(x, x, self_mask)
        x, cross_weights = self.enc_attn(x, memory, cross_mask)
        return self.pos_ffn(x), self_weights, cross_weights


class PositionalEncoding(nn.Module):
    """Interleaved sinusoids of base 10000, for at most `n_position` tokens."""

    pos_table: Tensor

    def __init__(self, d_hid: int, n_position: int = 200) -> None:
        super().__init__()
        columns = np.arange(d_hid)
        angles = np.arange(n_position)[:, None] / np.power(10000, 2 * (columns // 2) / d_hid)
        table = np.where(columns % 2 == 0, np.sin(angles), np.cos(angles))
        # Always computed in float64; published is its rounding to float32.
        self.register_buffer(
            "pos_table", torch.tensor(table[None], dtype=torch.get_default_dtype())
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return x + self.pos_table[:, : x.size(1)]


class Encoder(nn.Module):
    """The encoder: embeddings and layers."""

    def __init__(
        self, n_src_vocab, d_model, n_layers, n_head, d_k, d_v, d_inner, pad_idx, dropout, scale_emb
    ) -> None:
        super().__init__()
        self.src_word_emb = nn.Embedding(n_src_vocab, d_model, padding_idx=pad_idx)
        self.position_enc = PositionalEncoding(d_model)
        self.dropout = nn.Dropout(dropout)
        self.layer_stack = nn.ModuleList(
            EncoderLayer(d_model, d_inner, n_head, d_k, d_v, dropout) for _ in range(n_layers)
        )
        self.layer_norm = nn.LayerNorm(d_model, eps=NORM_EPSILON)
        self.scale = d_model**0.5 if scale_emb else 1.0

    def forward(self, src_seq: Tensor, src_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, S, D], and the attention weights of every layer [B, H, S, S]."""
        x = self.src_word_emb(src_seq) * self.scale
        x = self.layer_norm(self.dropout(self.position_enc(x)))
        all_weights = []
        for layer in self.layer_stack:
            x, weights = layer(x, src_mask)
            all_weights.append(weights)
        return x, all_weights


class Decoder(nn.Module):
    """The decoder: embeddings and layers."""

    def __init__(
        self, n_trg_vocab, d_model, n_layers, n_head, d_k, d_v, d_inner, pad_idx, dropout, scale_emb
    ) -> None:
        super().__init__()
        self.trg_word_emb = nn.Embedding(n_trg_vocab, d_model, padding_idx=pad_idx)
        self.position_enc = PositionalEncoding(d_model)
        self.dropout = nn.Dropout(dropout)
        self.layer_stack = nn.ModuleList(
            DecoderLayer(d_model, d_inner, n_head, d_k, d_v, dropout) for _ in range(n_layers)
        )
        self.layer_norm = nn.LayerNorm(d_model, eps=NORM_EPSILON)
        self.scale = d_model**0.5 if scale_emb else 1.0

    def forward(
        self, trg_seq: Tensor, trg_mask: Tensor, memory: Tensor, src_mask: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """[B, T, D], and the attention weights of every layer [B, H, T, T] and [B, H, T, S]."""
        x = self.trg_word_emb(trg_seq) * self.scale
        x = self.layer_norm(self.dropout(self.position_enc(x)))
        all_self_weights, all_cross_weights = [], []
        for layer in self.layer_stack:
            x, self_weights, cross_weights = layer(x, memory, trg_mask, src_mask)
            all_self_weights.append(self_weights)
            all_cross_weights.append(cross_weights)
        return x, all_self_weights, all_cross_weights


class Transformer(nn.Module):
    """The whole model.

    Args:
      scale_emb_or_prj: with a tied output, either embeddings are multiplied by sqrt(D) ("emb"), or
        logits by 1/sqrt(D) ("prj"), or neither ("none"). Without, always neither.
      trg_emb_prj_weight_sharing: target embedding and output projection are one.
      emb_src_trg_weight_sharing: source and target embedding are one.
    """

    def __init__(
        self,
        n_src_vocab: int,
        n_trg_vocab: int,
        src_pad_idx: int,
        trg_pad_idx: int,
        d_model: int = 512,
        d_inner: int = 2048,
        n_encoder_layers: int = 6,
        n_decoder_layers: int = 6,
        n_head: int = 8,
        d_k: int = 64,
        d_v: int = 64,
        dropout: float = 0.1,
        trg_emb_prj_weight_sharing: bool = True,
        emb_src_trg_weight_sharing: bool = True,
        scale_emb_or_prj: Literal["emb", "prj", "none"] = "prj",
    ) -> None:
        super().__init__()
        self.src_pad_idx, self.trg_pad_idx = src_pad_idx, trg_pad_idx
        scale_emb = trg_emb_prj_weight_sharing and scale_emb_or_prj == "emb"
        scale_prj = trg_emb_prj_weight_sharing and scale_emb_or_prj == "prj"
        self.logit_scale = d_model**-0.5 if scale_prj else 1.0
        heads = (n_head, d_k, d_v, d_inner)
        self.encoder = Encoder(
            n_src_vocab, d_model, n_encoder_layers, *heads, src_pad_idx, dropout, scale_emb
        )
        self.decoder = Decoder(
            n_trg_vocab, d_model, n_decoder_layers, *heads, trg_pad_idx, dropout, scale_emb
        )
        self.trg_word_prj = nn.Linear(d_model, n_trg_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        if trg_emb_prj_weight_sharing:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
        if emb_src_trg_weight_sharing:
            self.encoder.src_word_emb.weight = self.decoder.trg_word_emb.weight

    def forward(
        self, src_seq: Tensor, trg_seq: Tensor, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Attention]:
        """Logits [B, T, V]; the published code flattens them to [B*T, V]."""
        src_mask = not_padding(src_seq, self.src_pad_idx)
        trg_mask = not_padding(trg_seq, self.trg_pad_idx) & not_future(trg_seq)
        memory, encoder_self = self.encoder(src_seq, src_mask)
        x, decoder_self, decoder_cross = self.decoder(trg_seq, trg_mask, memory, src_mask)
        logits = self.trg_word_prj(x) * self.logit_scale
        if return_attention:
            return logits, Attention(encoder_self, decoder_self, decoder_cross)
        return logits


def build(config: TransformerConfig) -> Transformer:
    """Builds the reference with the sizes, tyings and scales of `config`."""
    scale: Literal["emb", "prj", "none"] = "none"
    if config.scale_embeddings:
        scale = "emb"
    elif config.scale_logits:
        scale = "prj"
    return Transformer(
        n_src_vocab=config.source_vocab_size,
        n_trg_vocab=config.target_vocab_size,
        src_pad_idx=config.pad_id,
        trg_pad_idx=config.pad_id,
        d_model=config.d_model,
        d_inner=config.d_ff,
        n_encoder_layers=config.num_encoder_layers,
        n_decoder_layers=config.num_decoder_layers,
        n_head=config.num_heads,
        d_k=config.key_width,
        d_v=config.value_width,
        dropout=config.dropout_rate,
        trg_emb_prj_weight_sharing=config.shares_target_and_output,
        emb_src_trg_weight_sharing=config.shares_source_and_target,
        scale_emb_or_prj=scale,
    )


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`."""
    return {
        **_embedding_taps("source", "encoder", "src_word_emb", config),
        **for_layers(config.num_encoder_layers, _layer_taps("encoder", {"self": "slf_attn"})),
        **_embedding_taps("target", "decoder", "trg_word_emb", config),
        **for_layers(
            config.num_decoder_layers,
            _layer_taps("decoder", {"self": "slf_attn", "cross": "enc_attn"}),
        ),
    }


def _embedding_taps(side: str, stack: str, table: str, config: TransformerConfig) -> dict[str, Tap]:
    scaled = Tap(stack, op="mul") if config.scale_embeddings else Tap(f"{stack}.{table}")
    return {
        f"{side}/embedding": scaled,
        f"{side}/embedded": Tap(f"{stack}.position_enc"),
        f"{stack}/embedding_norm": Tap(f"{stack}.layer_norm"),
    }


def _layer_taps(stack: str, attentions: dict[str, str]) -> dict[str, Tap]:
    site, layer = f"{stack}/layers/{{layer}}", f"{stack}.layer_stack.{{layer}}"
    found = {site: Tap(layer)}
    for kind, name in attentions.items():
        linears = [f"{layer}.{name}.{linear}" for linear in ("w_qs", "w_ks", "w_vs", "fc")]
        softmax = f"{layer}.{name}.attention"
        found |= attention_taps(f"{site}/{kind}_attention", linears, softmax)
        found |= post_norm_taps(f"{site}/{kind}_attention", f"{layer}.{name}.layer_norm")
    network = f"{layer}.pos_ffn"
    found |= feed_forward_taps(f"{site}/feed_forward", f"{network}.w_1", f"{network}.w_2")
    return found | post_norm_taps(f"{site}/feed_forward", f"{network}.layer_norm")
