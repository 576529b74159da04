"""attention-is-all-you-need-pytorch by jadore801120.

Post-norm inside the sub-layers, one more norm after the embeddings, no attention biases, free head
sizes.

Source: https://github.com/jadore801120/attention-is-all-you-need-pytorch (transformer/Models.py,
Layers.py, SubLayers.py, Modules.py).
"""

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families.jadore801120 import LAYERS
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap

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
        weights = self.dropout(scores.masked_fill(~mask, common.MASKED_SCORE).softmax(dim=-1))
        return weights @ v, weights


class MultiHeadAttention(nn.Module):
    """norm(x + heads joined), with H*K and H*U independent of D."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_head = config.num_heads
        d_model, keys = config.d_model, config.num_heads * config.key_width
        values = config.num_heads * config.value_width
        self.w_qs = nn.Linear(d_model, keys, bias=False)
        self.w_ks = nn.Linear(d_model, keys, bias=False)
        self.w_vs = nn.Linear(d_model, values, bias=False)
        self.fc = nn.Linear(values, d_model, bias=False)
        self.attention = ScaledDotProductAttention(temperature=config.key_width**0.5)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.layer_norm = nn.LayerNorm(d_model, eps=NORM_EPSILON)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] attending to memory [B, S, D] under mask [B, 1 or T, S]."""
        q = common.split_heads(self.w_qs(x), self.n_head)
        k = common.split_heads(self.w_ks(memory), self.n_head)
        v = common.split_heads(self.w_vs(memory), self.n_head)
        context, weights = self.attention(q, k, v, mask.unsqueeze(1))
        return self.layer_norm(x + self.dropout(self.fc(common.join_heads(context)))), weights


class PositionwiseFeedForward(nn.Module):
    """norm(x + W2 relu(W1 x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w_1 = nn.Linear(config.d_model, config.d_ff)
        self.w_2 = nn.Linear(config.d_ff, config.d_model)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x + self.dropout(self.w_2(self.w_1(x).relu())))


class Layer(nn.Module):
    """Self-attention, in the decoder cross-attention, and feed-forward."""

    def __init__(self, config: TransformerConfig, attends_to_source: bool) -> None:
        super().__init__()
        self.slf_attn = MultiHeadAttention(config)
        if attends_to_source:
            self.enc_attn = MultiHeadAttention(config)
        self.pos_ffn = PositionwiseFeedForward(config)

    def forward(self, x: Tensor, visible: Tensor, *source: Tensor) -> Tensor:
        x, _ = self.slf_attn(x, x, visible)
        if source:
            x, _ = self.enc_attn(x, *source)
        return self.pos_ffn(x)


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
        return x + self.pos_table[:, : x.size(1)]


class Stack(nn.Module):
    """The encoder or the decoder: embeddings named `table`, and layers."""

    def __init__(
        self, config: TransformerConfig, table: str, vocab_size: int, num_layers: int
    ) -> None:
        super().__init__()
        self.table = table
        self.add_module(table, nn.Embedding(vocab_size, config.d_model, config.pad_id))
        self.position_enc = PositionalEncoding(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)
        attends_to_source = table == "trg_word_emb"
        self.layer_stack = nn.ModuleList(
            Layer(config, attends_to_source) for _ in range(num_layers)
        )
        self.layer_norm = nn.LayerNorm(config.d_model, eps=NORM_EPSILON)
        scales = config.shares_target_and_output and config.scale_embeddings
        self.scale = config.d_model**0.5 if scales else 1.0

    def forward(self, tokens: Tensor, *masks_and_memory: Tensor) -> Tensor:
        """[B, T, D]."""
        x = self.get_submodule(self.table)(tokens) * self.scale
        x = self.layer_norm(self.dropout(self.position_enc(x)))
        return common.in_turn(self.layer_stack, x, *masks_and_memory)


class Transformer(common.EncoderDecoder):
    """The whole model."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        source, target = config.source_vocab_size, config.target_vocab_size
        self.encoder = Stack(config, "src_word_emb", source, config.num_encoder_layers)
        self.decoder = Stack(config, "trg_word_emb", target, config.num_decoder_layers)
        self.trg_word_prj = nn.Linear(config.d_model, target, bias=False)
        # With a tied output, the published `scale_emb_or_prj` multiplies embeddings by sqrt(D)
        # ("emb"), or logits by 1/sqrt(D) ("prj"), or neither; otherwise it has no effect.
        emb, prj = config.scale_embeddings, config.scale_logits
        scales = config.shares_target_and_output and prj and not emb
        self.logit_scale = config.d_model**-0.5 if scales else 1.0
        common.xavier_uniform(self)
        common.tie(config, self.encoder.src_word_emb, self.decoder.trg_word_emb, self.trg_word_prj)

    def project(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, V]; the published code flattens the logits to [B*T, V]."""
        return self.trg_word_prj(x) * self.logit_scale


build = Transformer


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:

    def in_stack(side, stack, sublayers, found):
        table = f"{stack}.{'src' if side == 'source' else 'trg'}_word_emb"
        found[f"{side}/embedding"] = Tap(stack, op="mul") if config.scale_embeddings else Tap(table)
        found[f"{side}/embedded"] = Tap(f"{stack}.position_enc")
        found[f"{stack}/embedding_norm"] = Tap(f"{stack}.layer_norm")

    return common.both_stacks(config, LAYERS, in_stack, softmax="attention")
