"""OpenNMT-py 3's Transformer: pre-norm, a final norm on both stacks.

Biases of attention and of the feed-forward network are optional; the output always has one. Several
query heads may share one head of keys and values, which is repeated (the option `num_kv`).
Positions are sinusoids, or belong to self-attention: a rotation of queries and keys, or a bias of
the scores, either ALiBi or one per bucket of distances. The published softmax, rotations and
logarithms of distances are computed in float32; here in the dtype of the model.

The published cached ALiBi bias is not reproduced: a decoding step uses the row of the first query
if an earlier sentence was longer. Here, as in training, each query has its own row.

Source: https://github.com/OpenNMT/OpenNMT-py (onmt/encoders/transformer.py,
onmt/decoders/transformer.py, onmt/modules: embeddings.py, multi_headed_attn.py,
alibi_position_bias.py, position_ffn.py; onmt/model_builder.py); Su et al. 2021, equation 34; Press
et al. 2022, section 3; Raffel et al. 2020, section 2.1; Ainslie et al. 2023, section 2.2
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families.opennmt import LAYERS
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap

MASKED_SCORE = -1e18


class PositionalEncoding(nn.Module):
    """Vectors times sqrt(D), plus sinusoids, for an even D."""

    pe: Tensor

    def __init__(self, config: TransformerConfig, max_len: int = 5000) -> None:
        super().__init__()
        self.dim = config.d_model
        # Interleaved, they have the paper's frequencies; concatenated, tensor2tensor's.
        if config.position_layout == "interleaved":
            table = common.interleaved_sinusoids(max_len, self.dim, base=10000.0)
        else:
            table = common.concatenated_sinusoids(max_len, self.dim)
        self.register_buffer("pe", table.unsqueeze(1))

    def forward(self, emb: Tensor) -> Tensor:
        return emb * math.sqrt(self.dim) + self.pe[: emb.size(1)].transpose(0, 1)


class Embeddings(nn.Module):
    """Token embeddings, scaled only if sinusoids are added."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        table = nn.Embedding(vocab_size, config.d_model, padding_idx=config.pad_id)
        self.make_embedding = nn.Sequential()  # Published ones also support word features.
        self.make_embedding.add_module("emb_luts", nn.ModuleList([table]))
        self.position_encoding = config.position_kind == "sinusoidal"
        if self.position_encoding:
            self.make_embedding.add_module("pe", PositionalEncoding(config))
        self.dropout = nn.Dropout(config.dropout_rate)

    @property
    def word_lut(self) -> Any:
        """The table [V, D]."""
        return self.make_embedding.get_submodule("emb_luts.0")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_lut(tokens)
        if self.position_encoding:
            x = self.make_embedding.get_submodule("pe")(x)
        return self.dropout(x)


def rotated(x: Tensor, interleave: bool, theta: float) -> Tensor:
    """Rotates queries or keys [B, H, T, K] at positions 0 ... T-1, as complex numbers."""
    length, width = x.shape[-2:]
    # Real and imaginary parts of number j are features 2j and 2j + 1, or else j and j + K/2.
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
        queries, keys = (torch.arange(size) for size in scores.shape[-2:])
        return scores - self.slopes * (keys - queries[:, None]).abs()


def relative_buckets(length: int, bidirectional: bool, buckets: int, longest: int) -> Tensor:
    """The bucket of each pair of query and key, int [T, T]."""
    # Half of the buckets are for one distance each, the others for ranges that grow geometrically
    # up to the distance `longest`. In both directions, half of all are for keys after the query.
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
        self.head_count, self.num_kv = config.num_heads, config.kv_heads
        self.dim_per_head = width // config.num_heads
        self.linear_keys = nn.Linear(width, self.num_kv * self.dim_per_head, bias=bias)
        self.linear_values = nn.Linear(width, self.num_kv * self.dim_per_head, bias=bias)
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

    def shared(self, x: Tensor) -> Tensor:
        """[B, G, S, K] to [B, H, S, K]: query head h uses group h // (H / G)."""
        return x.repeat_interleave(self.head_count // self.num_kv, dim=1)

    def forward(self, key: Tensor, query: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the weights [B, H, T, S]; key [B, S, D], visible [B, 1 or T, S]."""
        k = self.shared(common.split_heads(self.linear_keys(key), self.num_kv))
        v = self.shared(common.split_heads(self.linear_values(key), self.num_kv))
        q = common.split_heads(self.linear_query(query), self.head_count)
        if self.position_kind == "rotary":
            q, k = (rotated(x, self.rotary_interleave, self.rotary_theta) for x in (q, k))
        scores = (q / math.sqrt(self.dim_per_head)) @ k.transpose(2, 3)
        if self.position_kind == "t5_relative":
            scores = scores + self.position_bias(query.size(1))
        if self.position_kind == "alibi":
            scores = self.alibi(scores)
        # Published in float32, here in the dtype of the model.
        weights = self.softmax(scores.masked_fill(~visible.unsqueeze(1), MASKED_SCORE))
        return self.final_linear(common.join_heads(self.dropout(weights) @ v)), weights


class PositionwiseFeedForward(nn.Module):
    """x + W2 a(W1 norm(x)): unlike attention, it contains the norm and the residual."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w_1 = nn.Linear(config.d_model, config.d_ff, bias=config.feed_forward_bias)
        self.w_2 = nn.Linear(config.d_ff, config.d_model, bias=config.feed_forward_bias)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.dropout_1 = nn.Dropout(config.activation_dropout_rate)
        self.dropout_2 = nn.Dropout(config.dropout_rate)
        self.activation = common.ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        inter = self.dropout_1(self.activation(self.w_1(self.layer_norm(x))))
        return self.dropout_2(self.w_2(inter)) + x


class Layer(nn.Module):
    """Self-attention, in the decoder cross-attention, and feed-forward."""

    def __init__(self, config: TransformerConfig, is_decoder: bool) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(config, "self", is_decoder)
        self.feed_forward = PositionwiseFeedForward(config)
        self.norm = "layer_norm_1" if is_decoder else "layer_norm"
        self.add_module(self.norm, nn.LayerNorm(config.d_model, eps=config.norm_epsilon))
        self.dropout = nn.Dropout(config.dropout_rate)
        if is_decoder:
            self.context_attn = MultiHeadedAttention(config, "context")
            self.layer_norm_2 = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)

    def forward(self, x: Tensor, visible: Tensor, *source: Tensor) -> Tensor:
        y = self.get_submodule(self.norm)(x)
        x = self.dropout(self.self_attn(y, y, visible)[0]) + x
        if source:
            memory, source_visible = source
            context, _ = self.context_attn(memory, self.layer_norm_2(x), source_visible)
            x = self.dropout(context) + x
        return self.feed_forward(x)


class Stack(nn.Module):
    """The encoder or the decoder: embeddings, layers named `layers`, and a final norm."""

    def __init__(
        self, config: TransformerConfig, vocab_size: int, layers: str, all_layers: list[nn.Module]
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, vocab_size)
        self.layers = layers
        norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        parts = {layers: nn.ModuleList(all_layers), "layer_norm": norm}
        # The published order of parameters.
        for name in parts if layers == "transformer" else reversed(parts):
            self.add_module(name, parts[name])

    def forward(self, tokens: Tensor, *masks_and_memory: Tensor) -> Tensor:
        layers = self.get_submodule(self.layers)
        x = common.in_turn(layers, self.embeddings(tokens), *masks_and_memory)
        return self.layer_norm(x)


# The published source mask is by length, which for padding on the right equals that by `pad_id`; a
# target row without any real token attends to everything there.
class NMTModel(common.EncoderDecoder):
    """The whole model."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        encoder = [Layer(config, False) for _ in range(config.num_encoder_layers)]
        decoder = [Layer(config, True) for _ in range(config.num_decoder_layers)]
        source, target = config.source_vocab_size, config.target_vocab_size
        self.encoder = Stack(config, source, "transformer", [*encoder])
        self.decoder = Stack(config, target, "transformer_layers", [*decoder])
        self.generator = nn.Linear(config.d_model, target)
        common.xavier_uniform(self)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1 and name.endswith("bias"):
                nn.init.zeros_(parameter)
        if config.position_kind == "t5_relative" and config.relative_position_sharing == "stack":
            # OpenNMT-py has no such option, but layers that share a table are a valid model of it.
            for layers in (encoder, decoder):
                table = layers[0].self_attn.relative_attention_bias
                for layer in layers:
                    layer.self_attn.relative_attention_bias = table
        common.tie(
            config,
            self.encoder.embeddings.word_lut,
            self.decoder.embeddings.word_lut,
            self.generator,
        )


build = NMTModel


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:

    def in_stack(side, stack, sublayers, found):
        embeddings = f"{stack}.embeddings.make_embedding"
        # A residual sum is the input of the next norm, or of the feed-forward with its own norm.
        for name, following in itertools.pairwise(sublayers):
            norm = found[f"{stack}/layers/{{layer}}/{following}_norm"]
            module = norm.module.removesuffix(".layer_norm")
            found[f"{stack}/layers/{{layer}}/{name}_sum"] = Tap(module, "input")
        found[f"{stack}/layers/{{layer}}/feed_forward_sum"] = Tap(module)
        found[f"{stack}/final_norm"] = Tap(f"{stack}.layer_norm")
        found[f"{side}/embedding"] = Tap(f"{embeddings}.emb_luts.0")
        if config.position_kind == "sinusoidal":
            found[f"{side}/embedding"] = Tap(f"{embeddings}.pe", op="mul")
            found[f"{side}/embedded"] = Tap(f"{embeddings}.pe")

    return common.both_stacks(config, LAYERS, in_stack, softmax="softmax")
