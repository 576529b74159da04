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
from flaxformer_mt.parity.references.common import (
    MASKED_SCORE,
    Attention,
    join_heads,
    not_future,
    not_padding,
    split_heads,
)
from flaxformer_mt.parity.trace import Tap, for_layers, softmax_input, softmax_output

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
        """[B, T, D] to [B, T, D]."""
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    """x + f(norm(x))."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return x + self.dropout(sublayer(self.norm(x)))


class MultiHeadedAttention(nn.Module):
    """H heads; `linears` project queries, keys, values and the joined heads.

    H*d_k and H*d_v need not be D. The weights of the last call stay in `attn` [B, H, T, S], after
    dropout.
    """

    attn: Tensor

    def __init__(self, h: int, d_model: int, d_k: int, d_v: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.h = h
        self.d_k = d_k
        self.linears = nn.ModuleList(
            [
                nn.Linear(d_model, h * d_k),
                nn.Linear(d_model, h * d_k),
                nn.Linear(d_model, h * d_v),
                nn.Linear(h * d_v, d_model),
            ]
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D], under mask [B, 1 or T, S]."""
        q, k, v = (
            split_heads(linear(x), self.h)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        scores = scores.masked_fill(~mask.unsqueeze(1), MASKED_SCORE)
        self.attn = self.dropout(scores.softmax(dim=-1))
        return self.linears[-1](join_heads(self.attn @ v))


class PositionwiseFeedForward(nn.Module):
    """W2 dropout(relu(W1 x))."""

    def __init__(self, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.w_2(self.dropout(self.w_1(x).relu()))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    self_attn: MultiHeadedAttention

    def __init__(
        self, size: int, self_attn: MultiHeadedAttention, feed_forward: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = nn.ModuleList(SublayerConnection(size, dropout) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D], and the attention weights [B, H, S, S]."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward), self.self_attn.attn


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention, feed-forward.

    Without `src_attn`, self-attention's weights attend to the encoder, too.
    """

    self_attn: MultiHeadedAttention

    def __init__(
        self,
        size: int,
        self_attn: MultiHeadedAttention,
        src_attn: MultiHeadedAttention | None,
        feed_forward: nn.Module,
        dropout: float,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        if src_attn is not None:
            self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = nn.ModuleList(SublayerConnection(size, dropout) for _ in range(3))

    def forward(
        self, x: Tensor, memory: Tensor, src_mask: Tensor, tgt_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D], and the attention weights [B, H, T, T] and [B, H, T, S]."""
        src_attn: Any = getattr(self, "src_attn", self.self_attn)
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        self_weights = self.self_attn.attn  # Before a shared module is called again.
        x = self.sublayer[1](x, lambda x: src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward), self_weights, src_attn.attn


class Encoder(nn.Module):
    """The encoder: layers and a final norm."""

    def __init__(self, layers: list[EncoderLayer], size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = LayerNorm(size)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, S, D], and the attention weights of every layer [B, H, S, S]."""
        all_weights = []
        for layer in self.layers:
            x, weights = layer(x, mask)
            all_weights.append(weights)
        return self.norm(x), all_weights


class Decoder(nn.Module):
    """The decoder: layers and a final norm."""

    def __init__(self, layers: list[DecoderLayer], size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = LayerNorm(size)

    def forward(
        self, x: Tensor, memory: Tensor, src_mask: Tensor, tgt_mask: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """[B, T, D], and the attention weights of every layer [B, H, T, T] and [B, H, T, S]."""
        all_self_weights, all_cross_weights = [], []
        for layer in self.layers:
            x, self_weights, cross_weights = layer(x, memory, src_mask, tgt_mask)
            all_self_weights.append(self_weights)
            all_cross_weights.append(cross_weights)
        return self.norm(x), all_self_weights, all_cross_weights


class Embeddings(nn.Module):
    """Token embeddings times sqrt(D)."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Interleaved sinusoids, for an even D."""

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, base: float, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(max_len).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, d_model, 2) * -(math.log(base) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * frequency)
        pe[:, 1::2] = torch.cos(position * frequency)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.dropout(x + self.pe[:, : x.size(1)])


class Generator(nn.Module):
    """The projection to the logits; the published module also computes their log-softmax."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, V]."""
        return self.proj(x)


class EncoderDecoder(nn.Module):
    """The whole model. Padding is where the token is `pad`, on both sides."""

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        src_embed: nn.Sequential,
        tgt_embed: nn.Sequential,
        generator: Generator,
        pad: int,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator
        self.pad = pad

    def forward(
        self, src: Tensor, tgt: Tensor, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Attention]:
        """Logits [B, T, V] for src [B, S] and tgt [B, T]."""
        src_mask = not_padding(src, self.pad)
        tgt_mask = not_padding(tgt, self.pad) & not_future(tgt)
        memory, encoder_self = self.encoder(self.src_embed(src), src_mask)
        x, decoder_self, decoder_cross = self.decoder(
            self.tgt_embed(tgt), memory, src_mask, tgt_mask
        )
        logits = self.generator(x)
        if return_attention:
            return logits, Attention(encoder_self, decoder_self, decoder_cross)
        return logits


def make_model(
    src_vocab: int,
    tgt_vocab: int,
    *,
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    d_k: int = 64,
    d_v: int = 64,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    base: float = 10000.0,
    source_attention: SourceAttention = "src_attn",
    pad: int = 0,
) -> EncoderDecoder:
    """A model with Xavier-uniform matrices."""

    def attention() -> MultiHeadedAttention:
        return MultiHeadedAttention(h, d_model, d_k, d_v, attention_dropout)

    def feed_forward() -> PositionwiseFeedForward:
        return PositionwiseFeedForward(d_model, d_ff, dropout)

    def embed(vocab: int) -> nn.Sequential:
        return nn.Sequential(Embeddings(d_model, vocab), PositionalEncoding(d_model, dropout, base))

    def encoder_layer() -> EncoderLayer:
        return EncoderLayer(d_model, attention(), feed_forward(), dropout)

    def decoder_layer() -> DecoderLayer:
        src_attn = attention() if source_attention == "src_attn" else None
        return DecoderLayer(d_model, attention(), src_attn, feed_forward(), dropout)

    model = EncoderDecoder(
        Encoder([encoder_layer() for _ in range(encoder_layers)], d_model),
        Decoder([decoder_layer() for _ in range(decoder_layers)], d_model),
        embed(src_vocab),
        embed(tgt_vocab),
        Generator(d_model, tgt_vocab),
        pad,
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


def build(
    config: TransformerConfig, source_attention: SourceAttention = "src_attn"
) -> EncoderDecoder:
    """Builds the reference with the sizes, the tied tables and the position base of `config`.

    `annotated_wide_heads` uses it, too: the same code, with d_k and d_v of its own and the
    attention's dropout following the rate.
    """
    if config.d_model % 2:
        raise UserError(f"d_model={config.d_model}: the published positions need an even number")
    model = make_model(
        config.source_vocab_size,
        config.target_vocab_size,
        encoder_layers=config.num_encoder_layers,
        decoder_layers=config.num_decoder_layers,
        d_model=config.d_model,
        d_ff=config.d_ff,
        h=config.num_heads,
        d_k=config.key_width,
        d_v=config.value_width,
        dropout=config.dropout_rate,
        attention_dropout=config.attention_dropout_rate,
        base=config.position_base,
        source_attention=source_attention,
        pad=config.pad_id,
    )
    source, target = model.src_embed[0], model.tgt_embed[0]
    assert isinstance(source, Embeddings)
    assert isinstance(target, Embeddings)
    if config.shares_source_and_target:
        source.lut.weight = target.lut.weight
    if config.shares_target_and_output:
        model.generator.proj.weight = target.lut.weight
    return model


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`."""
    shared = not any(".src_attn." in name for name, _ in module.named_parameters())
    encoder, decoder = "encoder.layers.{layer}", "decoder.layers.{layer}"
    in_encoder = {
        **_attention_taps("encoder", "self_attention", f"{encoder}.self_attn", 0),
        **_feed_forward_taps("encoder", 1),
        "encoder/layers/{layer}": Tap(encoder),
    }
    src_attn, call = ("self_attn", 1) if shared else ("src_attn", 0)
    in_decoder = {
        **_attention_taps("decoder", "self_attention", f"{decoder}.self_attn", 0),
        **_attention_taps("decoder", "cross_attention", f"{decoder}.{src_attn}", 1, call),
        **_feed_forward_taps("decoder", 2),
        "decoder/layers/{layer}": Tap(decoder),
    }
    return {
        "source/embedding": Tap("src_embed.0"),
        "source/embedded": Tap("src_embed.1"),
        **for_layers(config.num_encoder_layers, in_encoder),
        "encoder/final_norm": Tap("encoder.norm"),
        "target/embedding": Tap("tgt_embed.0"),
        "target/embedded": Tap("tgt_embed.1"),
        **for_layers(config.num_decoder_layers, in_decoder),
        "decoder/final_norm": Tap("decoder.norm"),
    }


def _attention_taps(
    stack: str, name: str, module: str, sublayer: int, call: int = 0
) -> dict[str, Tap]:
    site, wrapper = f"{stack}/layers/{{layer}}/{name}", f"{stack}.layers.{{layer}}.sublayer"
    return {
        f"{site}_norm": Tap(f"{wrapper}.{sublayer}.norm"),
        f"{site}/query": Tap(f"{module}.linears.0", call=call),
        f"{site}/key": Tap(f"{module}.linears.1", call=call),
        f"{site}/value": Tap(f"{module}.linears.2", call=call),
        f"{site}/scores": softmax_input(module, call),
        f"{site}/weights": softmax_output(module, call),
        f"{site}/context": Tap(f"{module}.linears.3", "input", call=call),
        f"{site}/output": Tap(f"{module}.linears.3", call=call),
        f"{site}_sum": Tap(f"{wrapper}.{sublayer}"),
    }


def _feed_forward_taps(stack: str, sublayer: int) -> dict[str, Tap]:
    layer, theirs = f"{stack}/layers/{{layer}}", f"{stack}.layers.{{layer}}"
    return {
        f"{layer}/feed_forward_norm": Tap(f"{theirs}.sublayer.{sublayer}.norm"),
        f"{layer}/feed_forward/hidden": Tap(f"{theirs}.feed_forward.w_1"),
        f"{layer}/feed_forward/activated": Tap(f"{theirs}.feed_forward.w_2", "input"),
        f"{layer}/feed_forward/output": Tap(f"{theirs}.feed_forward.w_2"),
        f"{layer}/feed_forward_sum": Tap(f"{theirs}.sublayer.{sublayer}"),
    }
