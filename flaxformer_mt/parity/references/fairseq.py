"""fairseq's `transformer`, as of version 0.12.

Post-norm, or pre-norm with a final norm on both stacks. Positions are counted over real tokens
from `padding_idx` + 1, sources are padded on the left, and their padding is zero. The end token
starts decoding. Targets are padded on the right: a row without any key would be NaN.

Source: https://github.com/facebookresearch/fairseq (fairseq/models/transformer and
fairseq/modules: transformer_layer.py, multihead_attention.py, sinusoidal_positional_embedding.py,
learned_positional_embedding.py)
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap


def make_positions(tokens: Tensor, padding_idx: int) -> Tensor:
    """`padding_idx` + 1, + 2, ... for the real tokens of [B, T], `padding_idx` for padding."""
    real = (tokens != padding_idx).long()
    return real.cumsum(dim=1) * real + padding_idx


class SinusoidalPositionalEmbedding(nn.Module):
    """Sines, then cosines, then a zero if D is odd; the row of padding is zero."""

    weights: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        # The published table grows with the longest sentence.
        table = common.concatenated_sinusoids(num_embeddings, embedding_dim)
        table[padding_idx] = 0
        self.register_buffer("weights", table, persistent=False)
        # Without meaning: it tells older versions their dtype, and all but the newest save it.
        self.register_buffer("_float_tensor", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weights[make_positions(tokens, self.padding_idx)]


class LearnedPositionalEmbedding(nn.Embedding):
    """A table whose row `padding_idx` is zero and whose earlier rows are not used."""

    padding_idx: int

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        _init_embedding(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(make_positions(tokens, self.padding_idx))


class MultiheadAttention(nn.Module):
    """H heads with biases in all four projections; masked scores are -inf."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        embed_dim, self.num_heads = config.d_model, config.num_heads
        self.scaling = (embed_dim // self.num_heads) ** -0.5
        self.dropout_module = nn.Dropout(config.attention_dropout_rate)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the weights [B, H, T, S]; key [B, S, D], visible [B, 1 or T, S]."""
        q = common.split_heads(self.q_proj(query) * self.scaling, self.num_heads)
        k = common.split_heads(self.k_proj(key), self.num_heads)
        v = common.split_heads(self.v_proj(key), self.num_heads)
        scores = q @ k.transpose(2, 3)
        context, weights = common.attend(scores, v, visible, self.dropout_module, -math.inf)
        return self.out_proj(context), weights


class Layer(nn.Module):
    """Self-attention, in the decoder cross-attention, and feed-forward."""

    def __init__(self, config: TransformerConfig, attends_to_source: bool) -> None:
        super().__init__()
        self.normalize_before = config.norm_position == "pre"
        self.dropout_module = nn.Dropout(config.dropout_rate)
        self.activation_fn = common.ACTIVATIONS[config.activation]
        self.activation_dropout_module = nn.Dropout(config.activation_dropout_rate)
        self.self_attn = MultiheadAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        if attends_to_source:
            self.encoder_attn = MultiheadAttention(config)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, visible: Tensor, *source: Tensor) -> Tensor:
        x = self._residual(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, visible)[0])
        if source:
            norm = self.encoder_attn_layer_norm
            x = self._residual(x, norm, lambda y: self.encoder_attn(y, *source)[0])
        return self._residual(x, self.final_layer_norm, self._feed_forward)

    def _residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.dropout_module(sublayer(norm(x) if self.normalize_before else x))
        return x if self.normalize_before else norm(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_dropout_module(self.activation_fn(self.fc1(x))))


class Stack(nn.Module):
    """The encoder: embeddings, positions, layers, and the norms below and on top."""

    def __init__(
        self, config: TransformerConfig, embed_tokens: nn.Embedding, num_layers: int
    ) -> None:
        super().__init__()
        self.register_buffer("version", torch.full((1,), 3.0))
        self.padding_idx = config.pad_id
        self.embed_tokens = embed_tokens
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.embed_positions = _positions(config)
        self.dropout_module = nn.Dropout(config.dropout_rate)
        self.layernorm_embedding = nn.LayerNorm(config.d_model) if config.embedding_norm else None
        is_decoder = isinstance(self, Decoder)
        self.layers = nn.ModuleList(Layer(config, is_decoder) for _ in range(num_layers))
        self.layer_norm = nn.LayerNorm(config.d_model) if config.final_norm else None

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.embed_scale * self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x)

    def run(self, x: Tensor, *masks_and_memory: Tensor) -> Tensor:
        x = common.in_turn(self.layers, x, *masks_and_memory)
        return x if self.layer_norm is None else self.layer_norm(x)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        return self.run(self.embed(tokens) * visible.transpose(1, 2), visible)


class Decoder(Stack):
    """The decoder, with the output projection."""

    def __init__(self, config: TransformerConfig, embed_tokens: nn.Embedding) -> None:
        super().__init__(config, embed_tokens, config.num_decoder_layers)
        self.output_projection = nn.Linear(config.d_model, config.target_vocab_size, bias=False)
        if config.shares_target_and_output:
            self.output_projection.weight = embed_tokens.weight
        else:
            nn.init.normal_(self.output_projection.weight, std=config.d_model**-0.5)

    def forward(self, tokens: Tensor, *masks_and_memory: Tensor) -> Tensor:
        return self.output_projection(self.run(self.embed(tokens), *masks_and_memory))


class TransformerModel(common.EncoderDecoder):
    """The whole model."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        target = _embedding(config, config.target_vocab_size)
        shared = config.shares_source_and_target
        source = target if shared else _embedding(config, config.source_vocab_size)
        self.encoder = Stack(config, source, config.num_encoder_layers)
        self.decoder = Decoder(config, target)

    def project(self, x: Tensor) -> Tensor:
        """Returns the logits: the output projection is part of the decoder."""
        return x


build = TransformerModel


def _positions(config: TransformerConfig) -> nn.Module | None:
    if config.position_kind == "none":
        return None
    learned = config.position_kind == "learned"
    embedding = LearnedPositionalEmbedding if learned else SinusoidalPositionalEmbedding
    rows = config.max_length + config.pad_id + 1
    return embedding(rows, config.d_model, config.pad_id)


def _init_embedding(table: nn.Embedding) -> None:
    nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
    nn.init.zeros_(table.weight[table.padding_idx])


def _embedding(config: TransformerConfig, vocab_size: int) -> nn.Embedding:
    table = nn.Embedding(vocab_size, config.d_model, config.pad_id)
    _init_embedding(table)
    return table


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    return common.fairseq_taps(config, "", Tap("", op="mul"), Tap("", op="add"))
