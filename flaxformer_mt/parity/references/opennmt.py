"""OpenNMT-py 3's Transformer: pre-norm, a final norm on both stacks.

Biases of attention and of the feed-forward network are optional; the output always has one.
Positions are sinusoids, or belong to self-attention: a rotation of queries and keys, or a bias of
the scores, either ALiBi or one per bucket of distances. The published softmax, rotations and
logarithms of distances are computed in float32; here in the dtype of the model.

The published cached ALiBi bias is not reproduced: a decoding step uses the row of the first query
if an earlier sentence was longer. Here, as in training, each query has its own row.

Source: https://github.com/OpenNMT/OpenNMT-py (onmt/encoders/transformer.py,
onmt/decoders/transformer.py, onmt/modules: embeddings.py, multi_headed_attn.py,
alibi_position_bias.py, position_ffn.py; onmt/model_builder.py); Su et al. 2021, equation 34; Press
et al. 2022, section 3; Raffel et al. 2020, section 2.1
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.common import (
    ACTIVATIONS,
    Attention,
    attention_taps,
    feed_forward_taps,
    join_heads,
    not_future,
    not_padding,
    split_heads,
)
from flaxformer_mt.parity.trace import Tap, for_layers

MASKED_SCORE = -1e18


class PositionalEncoding(nn.Module):
    """Vectors times sqrt(D), plus sinusoids, for an even D.

    "SinusoidalInterleaved" has the paper's frequencies, "SinusoidalConcat" tensor2tensor's.
    """

    pe: Tensor

    def __init__(self, dim: int, enc_type: str, max_len: int = 5000) -> None:
        super().__init__()
        self.dim = dim
        position = torch.arange(max_len)[:, None]
        pairs = torch.arange(dim // 2)
        if enc_type == "SinusoidalInterleaved":
            angles = position * torch.exp(2 * pairs * -(math.log(10000.0) / dim))
            table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        else:
            angles = position * torch.exp(pairs * -(math.log(10000.0) / (dim // 2 - 1)))
            table = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.register_buffer("pe", table.unsqueeze(1))

    def forward(self, emb: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return emb * math.sqrt(self.dim) + self.pe[: emb.size(1)].transpose(0, 1)


class Embeddings(nn.Module):
    """Token embeddings, scaled only if sinusoids are added.

    The published `make_embedding` also supports word features.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        table = nn.Embedding(vocab_size, config.d_model, padding_idx=config.pad_id)
        self.make_embedding = nn.Sequential()
        self.make_embedding.add_module("emb_luts", nn.ModuleList([table]))
        self.position_encoding = config.position_kind == "sinusoidal"
        if self.position_encoding:
            interleaved = config.position_layout == "interleaved"
            enc_type = "SinusoidalInterleaved" if interleaved else "SinusoidalConcat"
            self.make_embedding.add_module("pe", PositionalEncoding(config.d_model, enc_type))
        self.dropout = nn.Dropout(config.dropout_rate)

    @property
    def word_lut(self) -> Any:
        """The table [V, D]."""
        return self.make_embedding.get_submodule("emb_luts.0")

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        x = self.word_lut(tokens)
        if self.position_encoding:
            x = self.make_embedding.get_submodule("pe")(x)
        return self.dropout(x)


def rotated(x: Tensor, interleave: bool, theta: float) -> Tensor:
    """Rotates queries or keys [B, H, T, K] at positions 0 ... T-1, as complex numbers.

    Features 2j and 2j + 1 are the real and the imaginary part of number j or, unless `interleave`,
    features j and j + K/2.
    """
    length, width = x.shape[-2:]
    pairs = x.unflatten(-1, (-1, 2)) if interleave else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angles = torch.outer(torch.arange(length, dtype=x.dtype), frequencies)  # [T, K/2]
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    result = torch.view_as_real(turned)
    return result.flatten(-2) if interleave else result.transpose(-1, -2).flatten(-2)


class AlibiPositionalBias(nn.Module):
    """Scores lowered in proportion to the distance, in both directions."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        slopes = torch.tensor(self.slopes_of(heads))[:, None, None]
        self.register_buffer("slopes", slopes, persistent=False)

    @classmethod
    def slopes_of(cls, heads: int) -> list[float]:
        """H slopes: geometric from 2^(-8/H); else those of powers of two, interpolated."""
        power = 2 ** math.floor(math.log2(heads))
        if power == heads:
            return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
        return cls.slopes_of(power) + cls.slopes_of(2 * power)[::2][: heads - power]

    def forward(self, scores: Tensor) -> Tensor:
        """[B, H, T, S] to [B, H, T, S]."""
        queries, keys = (torch.arange(size) for size in scores.shape[-2:])
        return scores - self.slopes * (keys - queries[:, None]).abs()


def relative_buckets(length: int, bidirectional: bool, buckets: int, longest: int) -> Tensor:
    """The bucket of each pair of query and key, int [T, T].

    Half of the buckets are for one distance each, the others for ranges that grow geometrically up
    to the distance `longest`. In both directions, half of all buckets are for keys after the query.
    """
    index = torch.arange(length)
    distance = index - index[:, None]  # Key minus query.
    if bidirectional:
        buckets //= 2
        offset, distance = buckets * (distance > 0), distance.abs()
    else:
        offset, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
    exact = buckets // 2
    octaves = (distance.clamp(min=1).double() / exact).log() / math.log(longest / exact)
    # The small number keeps rounding from moving a distance that is exactly on a border.
    beyond = exact + (octaves * (buckets - exact) + 1e-9).floor().long()
    return offset + torch.where(distance < exact, distance, beyond.clamp(max=buckets - 1))


class MultiHeadedAttention(nn.Module):
    """H heads of width D / H; self-attention may know positions, cross-attention does not."""

    def __init__(self, config: TransformerConfig, attn_type: str, is_decoder: bool = True) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.position_kind = config.position_kind if attn_type == "self" else "none"
        self.rotary_interleave = config.position_layout == "interleaved"
        self.rotary_theta = config.position_base
        self.max_relative_positions = config.relative_position_max_distance
        width, bias = config.d_model, config.qkv_bias
        self.head_count = config.num_heads
        self.dim_per_head = width // config.num_heads
        self.linear_keys = nn.Linear(width, width, bias=bias)
        self.linear_values = nn.Linear(width, width, bias=bias)
        self.linear_query = nn.Linear(width, width, bias=bias)
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(config.attention_dropout_rate)
        self.final_linear = nn.Linear(width, width, bias=config.attention_output_bias)
        if self.position_kind == "t5_relative":
            self.relative_attention_bias = nn.Embedding(
                config.relative_position_buckets, config.num_heads
            )
        if self.position_kind == "alibi":
            self.alibi = AlibiPositionalBias(config.num_heads)

    def position_bias(self, length: int) -> Tensor:
        """The learned bias of self-attention, [H, T, T]."""
        table = self.relative_attention_bias
        buckets = relative_buckets(
            length, not self.is_decoder, table.num_embeddings, self.max_relative_positions
        )
        return table(buckets).permute(2, 0, 1)

    def forward(self, key: Tensor, query: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the weights [B, H, T, S]; key [B, S, D], visible [B, 1 or T, S]."""
        k = split_heads(self.linear_keys(key), self.head_count)
        v = split_heads(self.linear_values(key), self.head_count)
        q = split_heads(self.linear_query(query), self.head_count)
        if self.position_kind == "rotary":
            q, k = (rotated(x, self.rotary_interleave, self.rotary_theta) for x in (q, k))
        scores = (q / math.sqrt(self.dim_per_head)) @ k.transpose(2, 3)
        if self.position_kind == "t5_relative":
            scores = scores + self.position_bias(query.size(1))
        if self.position_kind == "alibi":
            scores = self.alibi(scores)
        # Published in float32, here in the dtype of the model.
        weights = self.softmax(scores.masked_fill(~visible.unsqueeze(1), MASKED_SCORE))
        return self.final_linear(join_heads(self.dropout(weights) @ v)), weights


class PositionwiseFeedForward(nn.Module):
    """x + W2 a(W1 norm(x)): unlike attention, it contains the norm and the residual."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w_1 = nn.Linear(config.d_model, config.d_ff, bias=config.feed_forward_bias)
        self.w_2 = nn.Linear(config.d_ff, config.d_model, bias=config.feed_forward_bias)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.dropout_1 = nn.Dropout(config.activation_dropout_rate)
        self.dropout_2 = nn.Dropout(config.dropout_rate)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        inter = self.dropout_1(self.activation(self.w_1(self.layer_norm(x))))
        return self.dropout_2(self.w_2(inter)) + x


class TransformerEncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(config, "self", is_decoder=False)
        self.feed_forward = PositionwiseFeedForward(config)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D], and the attention weights [B, H, S, S]."""
        y = self.layer_norm(x)
        context, weights = self.self_attn(y, y, visible)
        return self.feed_forward(self.dropout(context) + x), weights


class TransformerDecoderLayer(nn.Module):
    """Self-attention, cross-attention, feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(config, "self")
        self.feed_forward = PositionwiseFeedForward(config)
        self.layer_norm_1 = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.context_attn = MultiHeadedAttention(config, "context")
        self.layer_norm_2 = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)

    def forward(
        self, x: Tensor, enc_out: Tensor, self_visible: Tensor, source_visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D], and the attention weights [B, H, T, T] and [B, H, T, S]."""
        y = self.layer_norm_1(x)
        self_context, self_weights = self.self_attn(y, y, self_visible)
        query = self.dropout(self_context) + x
        context, weights = self.context_attn(enc_out, self.layer_norm_2(query), source_visible)
        return self.feed_forward(self.dropout(context) + query), self_weights, weights


class TransformerEncoder(nn.Module):
    """The encoder: embeddings, layers and a final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, config.source_vocab_size)
        self.transformer = nn.ModuleList(
            TransformerEncoderLayer(config) for _ in range(config.num_encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)

    def forward(self, src: Tensor, visible: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, S, D], and the attention weights of every layer [B, H, S, S]."""
        x = self.embeddings(src)
        all_weights = []
        for layer in self.transformer:
            x, weights = layer(x, visible)
            all_weights.append(weights)
        return self.layer_norm(x), all_weights


class TransformerDecoder(nn.Module):
    """The decoder: embeddings, layers and a final norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, config.target_vocab_size)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.transformer_layers = nn.ModuleList(
            TransformerDecoderLayer(config) for _ in range(config.num_decoder_layers)
        )

    def forward(
        self, tgt: Tensor, enc_out: Tensor, self_visible: Tensor, source_visible: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """[B, T, D], and the attention weights of every layer [B, H, T, T] and [B, H, T, S]."""
        x = self.embeddings(tgt)
        all_self_weights, all_cross_weights = [], []
        for layer in self.transformer_layers:
            x, self_weights, cross_weights = layer(x, enc_out, self_visible, source_visible)
            all_self_weights.append(self_weights)
            all_cross_weights.append(cross_weights)
        return self.layer_norm(x), all_self_weights, all_cross_weights


class NMTModel(nn.Module):
    """The whole model.

    The published source mask is by length, which for padding on the right equals that by `pad_id`;
    a target row without any real token attends to everything there.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pad_id = config.pad_id
        self.encoder = TransformerEncoder(config)
        self.decoder = TransformerDecoder(config)
        self.generator = nn.Linear(config.d_model, config.target_vocab_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if config.position_kind == "t5_relative" and config.relative_position_sharing == "stack":
            # OpenNMT-py has no such option, but layers that share a table are a valid model of it.
            for layers in (self.encoder.transformer, self.decoder.transformer_layers):
                table = layers[0].get_submodule("self_attn").relative_attention_bias
                for layer in layers:
                    layer.get_submodule("self_attn").relative_attention_bias = table
        if config.shares_source_and_target:
            self.decoder.embeddings.word_lut.weight = self.encoder.embeddings.word_lut.weight
        if config.shares_target_and_output:
            self.generator.weight = self.decoder.embeddings.word_lut.weight

    def forward(
        self, src: Tensor, tgt: Tensor, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Attention]:
        """Logits [B, T, V] for src [B, S] and tgt [B, T]."""
        src_visible = not_padding(src, self.pad_id)
        tgt_visible = not_padding(tgt, self.pad_id) & not_future(tgt)
        enc_out, encoder_self = self.encoder(src, src_visible)
        x, decoder_self, decoder_cross = self.decoder(tgt, enc_out, tgt_visible, src_visible)
        logits = self.generator(x)
        if return_attention:
            return logits, Attention(encoder_self, decoder_self, decoder_cross)
        return logits


def build(config: TransformerConfig) -> NMTModel:
    """Builds the reference with all the options of `config`."""
    return NMTModel(config)


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`."""
    encoder, decoder = "encoder.transformer.{layer}", "decoder.transformer_layers.{layer}"
    in_encoder = {
        **_attention_taps("encoder", "self", f"{encoder}.self_attn", f"{encoder}.layer_norm"),
        "encoder/layers/{layer}/self_attention_sum": Tap(f"{encoder}.feed_forward", "input"),
        **_feed_forward_taps("encoder", encoder),
    }
    in_decoder = {
        **_attention_taps("decoder", "self", f"{decoder}.self_attn", f"{decoder}.layer_norm_1"),
        "decoder/layers/{layer}/self_attention_sum": Tap(f"{decoder}.layer_norm_2", "input"),
        **_attention_taps("decoder", "cross", f"{decoder}.context_attn", f"{decoder}.layer_norm_2"),
        "decoder/layers/{layer}/cross_attention_sum": Tap(f"{decoder}.feed_forward", "input"),
        **_feed_forward_taps("decoder", decoder),
    }
    return {
        **_stack_taps("source", "encoder", config),
        **for_layers(config.num_encoder_layers, in_encoder),
        **_stack_taps("target", "decoder", config),
        **for_layers(config.num_decoder_layers, in_decoder),
    }


def _stack_taps(side: str, stack: str, config: TransformerConfig) -> dict[str, Tap]:
    embeddings = f"{stack}.embeddings.make_embedding"
    final_norm = {f"{stack}/final_norm": Tap(f"{stack}.layer_norm")}
    if config.position_kind != "sinusoidal":
        return {f"{side}/embedding": Tap(f"{embeddings}.emb_luts.0")} | final_norm
    return {
        f"{side}/embedding": Tap(f"{embeddings}.pe", op="mul"),
        f"{side}/embedded": Tap(f"{embeddings}.pe"),
    } | final_norm


def _attention_taps(stack: str, kind: str, module: str, norm: str) -> dict[str, Tap]:
    site = f"{stack}/layers/{{layer}}/{kind}_attention"
    names = ("linear_query", "linear_keys", "linear_values", "final_linear")
    linears = [f"{module}.{name}" for name in names]
    return {f"{site}_norm": Tap(norm), **attention_taps(site, linears, f"{module}.softmax")}


def _feed_forward_taps(stack: str, layer: str) -> dict[str, Tap]:
    site, network = f"{stack}/layers/{{layer}}", f"{layer}.feed_forward"
    return {
        f"{site}/feed_forward_norm": Tap(f"{network}.layer_norm"),
        **feed_forward_taps(f"{site}/feed_forward", f"{network}.w_1", f"{network}.w_2"),
        f"{site}/feed_forward_sum": Tap(network),
        site: Tap(layer),
    }
