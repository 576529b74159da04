"""fairseq's `transformer`, as of version 0.12.

Post-norm, or pre-norm with a final norm on both stacks. Positions are counted over real tokens
from `padding_idx` + 1, sources are padded on the left, and their padding is zero. The end token
starts decoding.

Source: https://github.com/facebookresearch/fairseq (fairseq/models/transformer and
fairseq/modules: transformer_layer.py, multihead_attention.py, sinusoidal_positional_embedding.py,
learned_positional_embedding.py)
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
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
    post_norm_taps,
    pre_norm_taps,
    split_heads,
)
from flaxformer_mt.parity.trace import Tap, for_layers


def make_positions(tokens: Tensor, padding_idx: int) -> Tensor:
    """`padding_idx` + 1, + 2, ... for the real tokens of [B, T], `padding_idx` for padding."""
    real = (tokens != padding_idx).long()
    return real.cumsum(dim=1) * real + padding_idx


class SinusoidalPositionalEmbedding(nn.Module):
    """Sines, then cosines, then a zero if D is odd; the row of padding is zero.

    The published table grows with the longest sentence. `_float_tensor` has no meaning: it tells
    older versions their dtype, and is in the checkpoints of all but the newest.
    """

    weights: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        half = embedding_dim // 2
        frequency = torch.exp(torch.arange(half) * -(math.log(10000) / max(half - 1, 1)))
        angles = torch.arange(num_embeddings)[:, None] * frequency
        table = F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, embedding_dim % 2))
        table[padding_idx] = 0
        self.register_buffer("weights", table, persistent=False)
        self.register_buffer("_float_tensor", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        return self.weights[make_positions(tokens, self.padding_idx)]


class LearnedPositionalEmbedding(nn.Embedding):
    """A table whose row `padding_idx` is zero and whose earlier rows are not used."""

    padding_idx: int

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        _init_embedding(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        return super().forward(make_positions(tokens, self.padding_idx))


class MultiheadAttention(nn.Module):
    """H heads with biases in all four projections; masked scores are -inf."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scaling = (embed_dim // num_heads) ** -0.5
        self.dropout_module = nn.Dropout(dropout)
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
        q = split_heads(self.q_proj(query) * self.scaling, self.num_heads)
        k = split_heads(self.k_proj(key), self.num_heads)
        v = split_heads(self.v_proj(key), self.num_heads)
        scores = (q @ k.transpose(2, 3)).masked_fill(~visible.unsqueeze(1), -math.inf)
        weights = scores.softmax(dim=-1)
        return self.out_proj(join_heads(self.dropout_module(weights) @ v)), weights


class _Layer(nn.Module):
    """The base of both layers: the feed-forward network, and residuals with norm."""

    def __init__(self, config: TransformerConfig, has_encoder_attn: bool) -> None:
        super().__init__()
        self.normalize_before = config.norm_position == "pre"
        self.dropout_module = nn.Dropout(config.dropout_rate)
        self.activation_fn = ACTIVATIONS[config.activation]
        self.activation_dropout_module = nn.Dropout(config.activation_dropout_rate)
        heads = (config.d_model, config.num_heads, config.attention_dropout_rate)
        self.self_attn = MultiheadAttention(*heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        if has_encoder_attn:
            self.encoder_attn = MultiheadAttention(*heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def _residual(
        self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Computes norm(x + f(x)) or x + f(norm(x)); also returns the other results of f."""
        y, weights = sublayer(norm(x) if self.normalize_before else x)
        x = x + self.dropout_module(y)
        return (x if self.normalize_before else norm(x)), weights

    def _feed_forward(self, x: Tensor) -> Tensor:
        def transform(y: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.activation_dropout_module(self.activation_fn(self.fc1(y)))
            return self.fc2(hidden), hidden

        return self._residual(x, self.final_layer_norm, transform)[0]


class TransformerEncoderLayer(_Layer):
    """Self-attention, then feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, has_encoder_attn=False)

    def forward(self, x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D], and the attention weights [B, H, S, S]."""
        x, weights = self._residual(
            x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, visible)
        )
        return self._feed_forward(x), weights


class TransformerDecoderLayer(_Layer):
    """Self-attention, cross-attention, feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, has_encoder_attn=True)

    def forward(
        self, x: Tensor, encoder_out: Tensor, self_visible: Tensor, source_visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D], and the attention weights [B, H, T, T] and [B, H, T, S]."""
        x, self_weights = self._residual(
            x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, self_visible)
        )
        x, cross_weights = self._residual(
            x,
            self.encoder_attn_layer_norm,
            lambda y: self.encoder_attn(y, encoder_out, source_visible),
        )
        return self._feed_forward(x), self_weights, cross_weights


class _Stack(nn.Module):
    """The base of both stacks: embeddings, positions, and the norms below and on top."""

    def __init__(
        self, config: TransformerConfig, embed_tokens: nn.Embedding, layers: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.register_buffer("version", torch.full((1,), 3.0))
        self.padding_idx = config.pad_id
        self.embed_tokens = embed_tokens
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.embed_positions = _positions(config)
        self.dropout_module = nn.Dropout(config.dropout_rate)
        self.layernorm_embedding = nn.LayerNorm(config.d_model) if config.embedding_norm else None
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(config.d_model) if config.final_norm else None

    def forward_embedding(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        x = self.embed_scale * self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x)

    def _norm_on_top(self, x: Tensor) -> Tensor:
        return x if self.layer_norm is None else self.layer_norm(x)


class TransformerEncoder(_Stack):
    """The encoder layers."""

    def __init__(self, config: TransformerConfig, embed_tokens: nn.Embedding) -> None:
        layers = (TransformerEncoderLayer(config) for _ in range(config.num_encoder_layers))
        super().__init__(config, embed_tokens, layers)

    def forward(self, src_tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, S, D], and the attention weights of every layer [B, H, S, S]."""
        visible = not_padding(src_tokens, self.padding_idx)
        x = self.forward_embedding(src_tokens) * visible.transpose(1, 2)
        all_weights = []
        for layer in self.layers:
            x, weights = layer(x, visible)
            all_weights.append(weights)
        return self._norm_on_top(x), all_weights


class TransformerDecoder(_Stack):
    """The decoder layers and the output projection."""

    def __init__(self, config: TransformerConfig, embed_tokens: nn.Embedding) -> None:
        layers = (TransformerDecoderLayer(config) for _ in range(config.num_decoder_layers))
        super().__init__(config, embed_tokens, layers)
        self.output_projection = nn.Linear(config.d_model, config.target_vocab_size, bias=False)
        if config.shares_target_and_output:
            self.output_projection.weight = embed_tokens.weight
        else:
            nn.init.normal_(self.output_projection.weight, std=config.d_model**-0.5)

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: Tensor, source_visible: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Logits [B, T, V], and the weights of every layer [B, H, T, T] and [B, H, T, S]."""
        x = self.forward_embedding(prev_output_tokens)
        visible = not_padding(prev_output_tokens, self.padding_idx) & not_future(prev_output_tokens)
        all_self_weights, all_cross_weights = [], []
        for layer in self.layers:
            x, self_weights, cross_weights = layer(x, encoder_out, visible, source_visible)
            all_self_weights.append(self_weights)
            all_cross_weights.append(cross_weights)
        return self.output_projection(self._norm_on_top(x)), all_self_weights, all_cross_weights


class TransformerModel(nn.Module):
    """The whole model. Targets are padded on the right: a row without any key would be NaN."""

    def __init__(self, encoder: TransformerEncoder, decoder: TransformerDecoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(
        self, src_tokens: Tensor, prev_output_tokens: Tensor, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Attention]:
        """Logits [B, T, V] for src_tokens [B, S], padded on either side, and targets [B, T]."""
        encoder_out, encoder_self = self.encoder(src_tokens)
        source_visible = not_padding(src_tokens, self.encoder.padding_idx)
        logits, decoder_self, decoder_cross = self.decoder(
            prev_output_tokens, encoder_out, source_visible
        )
        if return_attention:
            return logits, Attention(encoder_self, decoder_self, decoder_cross)
        return logits


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


def build(config: TransformerConfig) -> TransformerModel:
    """Builds the reference with all the options of `config`."""
    target = _embedding(config, config.target_vocab_size)
    shared = config.shares_source_and_target
    source = target if shared else _embedding(config, config.source_vocab_size)
    return TransformerModel(TransformerEncoder(config, source), TransformerDecoder(config, target))


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`."""
    source, target = ("source", "encoder"), ("target", "decoder")
    attentions = {"self": "self_attn"}
    in_encoder = _layer_taps("encoder", attentions, config)
    in_decoder = _layer_taps("decoder", attentions | {"cross": "encoder_attn"}, config)
    return {
        **_stack_taps(*source, config),
        **for_layers(config.num_encoder_layers, in_encoder),
        **_stack_taps(*target, config),
        **for_layers(config.num_decoder_layers, in_decoder),
    }


def _stack_taps(side: str, stack: str, config: TransformerConfig) -> dict[str, Tap]:
    found = {f"{side}/embedding": Tap(stack, op="mul")}
    if config.position_kind != "none":
        found[f"{side}/embedded"] = Tap(stack, op="add")
    if config.embedding_norm:
        found[f"{stack}/embedding_norm"] = Tap(f"{stack}.layernorm_embedding")
    if config.final_norm:
        found[f"{stack}/final_norm"] = Tap(f"{stack}.layer_norm")
    return found


def _layer_taps(
    stack: str, attentions: dict[str, str], config: TransformerConfig
) -> dict[str, Tap]:
    site, layer = f"{stack}/layers/{{layer}}", f"{stack}.layers.{{layer}}"

    def residual_taps(sublayer: str, norm: str, call: int) -> dict[str, Tap]:
        if config.norm_position == "pre":
            return pre_norm_taps(f"{site}/{sublayer}", norm, layer, call)
        return post_norm_taps(f"{site}/{sublayer}", norm)

    found = {site: Tap(layer)}
    for call, (kind, name) in enumerate(attentions.items()):
        attention = f"{layer}.{name}"
        linears = [f"{attention}.{linear}_proj" for linear in ("q", "k", "v", "out")]
        found |= attention_taps(f"{site}/{kind}_attention", linears, attention)
        found |= residual_taps(f"{kind}_attention", f"{attention}_layer_norm", call)
    found |= feed_forward_taps(f"{site}/feed_forward", f"{layer}.fc1", f"{layer}.fc2")
    return found | residual_taps("feed_forward", f"{layer}.final_layer_norm", len(attentions))
