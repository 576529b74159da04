"""The Annotated Transformer: harvardnlp's own, and the study notes that follow it.

Pre-norm around every sub-layer, a final norm on both stacks, and a layer norm that divides by the
unbiased standard deviation plus epsilon.

Source: https://nlp.seas.harvard.edu/annotated-transformer/, and "Understanding the Transformer",
study notes which have it with sinusoids of base 1000 and a decoder that attends to the source with
the weights of its self-attention.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.families.annotated import LAYERS
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap

SourceAttention = Literal["src_attn", "self_attn"]
"""The module that computes cross-attention: one of its own (harvardnlp), or the self-attention of
the layer (the study notes, whose layer has no `src_attn`)."""


class LayerNorm(nn.Module):
    """a_2 (x - mean) / (std + eps) + b_2, with the unbiased standard deviation."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    """x + f(norm(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class MultiHeadedAttention(nn.Module):
    """H heads; `linears` project queries, keys, values and the joined heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # H*d_k and H*d_v need not be D.
        self.h, self.d_k = config.num_heads, config.key_width
        keys, values = self.h * self.d_k, self.h * config.value_width
        sizes = [(config.d_model, size) for size in (keys, keys, values)]
        self.linears = nn.ModuleList(
            nn.Linear(*size) for size in [*sizes, (values, config.d_model)]
        )
        self.dropout = nn.Dropout(config.attention_dropout_rate)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the weights [B, H, T, S], under mask [B, 1 or T, S]."""
        q, k, v = (
            common.split_heads(linear(x), self.h)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        context, weights = common.attend(scores, v, mask, self.dropout, common.MASKED_SCORE)
        # The published module keeps the weights, after dropout, as an attribute.
        return self.linears[-1](context), weights


class Layer(nn.Module):
    """Self-attention, in the decoder cross-attention, and feed-forward."""

    def __init__(self, config: TransformerConfig, attentions: tuple[str, ...]) -> None:
        super().__init__()
        for name in dict.fromkeys(attentions):
            self.add_module(name, MultiHeadedAttention(config))
        # Without `src_attn`, self-attention's weights attend to the encoder, too.
        self.attentions = attentions
        self.feed_forward = common.feed_forward(config, "w_1", "w_2")
        self.sublayer = nn.ModuleList(
            SublayerConnection(config) for _ in (*attentions, self.feed_forward)
        )

    def forward(self, x: Tensor, mask: Tensor, *source: Tensor) -> Tensor:
        self_attn = self.get_submodule(self.attentions[0])
        x = self.sublayer[0](x, lambda x: self_attn(x, x, x, mask)[0])
        if source:
            memory, src_mask = source
            src_attn = self.get_submodule(self.attentions[1])
            x = self.sublayer[1](x, lambda x: src_attn(x, memory, memory, src_mask)[0])
        return self.sublayer[-1](x, self.feed_forward)


class Stack(nn.Module):
    """The encoder or the decoder: layers and a final norm."""

    def __init__(
        self, config: TransformerConfig, num_layers: int, attentions: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, attentions) for _ in range(num_layers))
        self.norm = LayerNorm(config.d_model)

    def forward(self, x: Tensor, *masks_and_memory: Tensor) -> Tensor:
        return self.norm(common.in_turn(self.layers, x, *masks_and_memory))


class Embeddings(nn.Module):
    """Token embeddings times sqrt(D)."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        return self.lut(x) * math.sqrt(self.d_model)


class Transformer(common.EncoderDecoder):
    """The published `EncoderDecoder`: embeddings, stacks and generator."""

    def __init__(self, config: TransformerConfig, source_attention: SourceAttention) -> None:
        super().__init__(config)
        attentions = ("self_attn", source_attention)
        self.encoder = Stack(config, config.num_encoder_layers, attentions[:1])
        self.decoder = Stack(config, config.num_decoder_layers, attentions)

        def embed(vocab: int) -> nn.Sequential:
            positions = common.InterleavedPositions(config, "pe", axis=1)
            return nn.Sequential(Embeddings(config.d_model, vocab), positions)

        self.src_embed: Any = embed(config.source_vocab_size)
        self.tgt_embed: Any = embed(config.target_vocab_size)
        # The published module also computes the log-softmax of the logits.
        self.generator: Any = nn.Sequential()
        self.generator.add_module("proj", nn.Linear(config.d_model, config.target_vocab_size))
        common.xavier_uniform(self)
        common.tie(config, self.src_embed[0].lut, self.tgt_embed[0].lut, self.generator.proj)

    def forward(self, source: Tensor, target_input: Tensor, *masks: Tensor) -> Tensor:
        visible, target_visible = self.masks(source, target_input)
        memory = self.encoder(self.src_embed(source), visible)
        x = self.decoder(self.tgt_embed(target_input), target_visible, memory, visible)
        return self.generator(x)


def build(config: TransformerConfig, source_attention: SourceAttention = "src_attn") -> Transformer:
    if config.d_model % 2:
        raise UserError(f"d_model={config.d_model}: the published positions need an even number")
    return Transformer(config, source_attention)


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    shared = not any(".src_attn." in name for name, _ in module.named_parameters())

    def in_stack(side, stack, sublayers, found):
        embedding = "src_embed" if side == "source" else "tgt_embed"
        found[f"{side}/embedding"] = Tap(f"{embedding}.0")
        found[f"{side}/embedded"] = Tap(f"{embedding}.1")
        found[f"{stack}/final_norm"] = Tap(f"{stack}.norm")
        site, layer = f"{stack}/layers/{{layer}}", f"{stack}.layers.{{layer}}"
        for index, name in enumerate(sublayers):
            found[f"{site}/{name}_sum"] = Tap(f"{layer}.sublayer.{index}")
        if shared and "cross_attention" in sublayers:  # The second call of the self-attention.
            attention = f"{layer}.self_attn"
            linears = [f"{attention}.linears.{index}" for index in range(4)]
            found |= common.attention_taps(f"{site}/cross_attention", linears, attention, call=1)

    return common.both_stacks(config, LAYERS, in_stack)
