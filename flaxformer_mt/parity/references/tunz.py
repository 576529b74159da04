"""transformer-pytorch by tunz, which follows tensor2tensor.

Pre-norm, a final norm on both stacks, no attention biases, sines then cosines, padding embedded to
zero, and a decoder that starts from a zero vector instead of a token. Without inputs it is a
language model.

Source: https://github.com/tunz/transformer-pytorch (model/transformer.py), with its two misspelt
names (`self.linear`, `get_position_encdoing`) read as meant.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families.tunz import LAYERS
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.trace.module_values import Tap

NORM_EPSILON = 1e-6


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class MultiHeadAttention(nn.Module):
    """H heads of width D // H; where H does not divide D, they are together narrower than D."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden_size, self.head_size = config.d_model, config.num_heads
        att_size = hidden_size // self.head_size
        self.scale = att_size**-0.5
        self.linear_q = _linear(hidden_size, self.head_size * att_size, bias=False)
        self.linear_k = _linear(hidden_size, self.head_size * att_size, bias=False)
        self.linear_v = _linear(hidden_size, self.head_size * att_size, bias=False)
        self.att_dropout = nn.Dropout(config.dropout_rate)
        self.output_layer = _linear(self.head_size * att_size, hidden_size, bias=False)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the weights [B, H, T, S]; memory [B, S, D], visible [B, 1 or T, S]."""
        q = common.split_heads(self.linear_q(x), self.head_size) * self.scale
        k = common.split_heads(self.linear_k(memory), self.head_size)
        v = common.split_heads(self.linear_v(memory), self.head_size)
        scores = q @ k.transpose(2, 3)
        context, weights = common.attend(scores, v, visible, self.att_dropout, common.MASKED_SCORE)
        return self.output_layer(context), weights


class Layer(nn.Module):
    """Self-attention, in the decoder cross-attention, and feed-forward: each x + f(norm(x))."""

    def __init__(self, config: TransformerConfig, attends_to_source: bool) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=NORM_EPSILON)
        self.self_attention = MultiHeadAttention(config)
        self.self_attention_dropout = nn.Dropout(config.dropout_rate)
        if attends_to_source:
            self.enc_dec_attention_norm = nn.LayerNorm(config.d_model, eps=NORM_EPSILON)
            self.enc_dec_attention = MultiHeadAttention(config)
            self.enc_dec_attention_dropout = nn.Dropout(config.dropout_rate)
        self.ffn_norm = nn.LayerNorm(config.d_model, eps=NORM_EPSILON)
        self.ffn = common.feed_forward(config, "layer1", "layer2", _linear)
        self.ffn_dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, visible: Tensor, *source: Tensor) -> Tensor:
        y = self.self_attention_norm(x)
        x = x + self.self_attention_dropout(self.self_attention(y, y, visible)[0])
        if source:
            y = self.enc_dec_attention_norm(x)
            x = x + self.enc_dec_attention_dropout(self.enc_dec_attention(y, *source)[0])
        return x + self.ffn_dropout(self.ffn(self.ffn_norm(x)))


class Stack(nn.Module):
    """The encoder or the decoder: layers and a final norm."""

    def __init__(self, config: TransformerConfig, num_layers: int, attends_to_source: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, attends_to_source) for _ in range(num_layers))
        self.last_norm = nn.LayerNorm(config.d_model, eps=NORM_EPSILON)

    def forward(self, x: Tensor, *masks_and_memory: Tensor) -> Tensor:
        return self.last_norm(common.in_turn(self.layers, x, *masks_and_memory))


class Transformer(common.EncoderDecoder):
    """The whole model; its output projection is always the target embedding."""

    inv_timescales: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        # The published model has no number of heads: it has 8. Without inputs it has no encoder.
        self.hidden_size = config.d_model
        self.emb_scale = config.d_model**0.5
        self.has_inputs = config.has_inputs

        def embedding(vocab_size: int) -> nn.Embedding:
            table = nn.Embedding(vocab_size, config.d_model)
            nn.init.normal_(table.weight, mean=0, std=config.d_model**-0.5)
            return table

        self.t_vocab_embedding = embedding(config.target_vocab_size)
        self.t_emb_dropout = nn.Dropout(config.dropout_rate)
        # A language model has the parameters of cross-attention, too, and does not call it.
        self.decoder = Stack(config, config.num_decoder_layers, attends_to_source=True)
        if config.has_inputs:
            shared = config.shares_source_and_target
            self.i_vocab_embedding = (
                self.t_vocab_embedding if shared else embedding(config.source_vocab_size)
            )
            self.i_emb_dropout = nn.Dropout(config.dropout_rate)
            self.encoder = Stack(config, config.num_encoder_layers, attends_to_source=False)

        num_timescales = config.d_model // 2
        increment = math.log(10000.0) / max(num_timescales - 1, 1)
        # Published in float32; here in the dtype of the model.
        steps = torch.arange(num_timescales, dtype=torch.get_default_dtype())
        self.register_buffer("inv_timescales", torch.exp(steps * -increment))

    def forward(self, source: Tensor | None, target_input: Tensor, *masks: Tensor) -> Tensor:
        """Returns [B, T, V] for source [B, S], which a language model does not read."""
        encoded: tuple[Tensor, ...] = ()
        if self.has_inputs and source is not None:
            visible = common.not_padding(source, self.pad_id)
            x = self._embed(self.i_vocab_embedding, source) * self.emb_scale
            x = self.i_emb_dropout(x + self.get_position_encoding(source))
            encoded = self.encoder(x, visible), visible

        # A zero vector stands in the first column. The published model takes the targets and
        # shifts their embeddings, to the same effect.
        x = self._embed(self.t_vocab_embedding, target_input[:, 1:])
        x = F.pad(x, (0, 0, 1, 0)) * self.emb_scale
        x = self.t_emb_dropout(x + self.get_position_encoding(target_input))
        # Padding stays visible to the target's self-attention: it stands behind every real token.
        x = self.decoder(x, common.not_future(target_input), *encoded)
        return x @ self.t_vocab_embedding.weight.T

    def _embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        return table(tokens).masked_fill((tokens == self.pad_id).unsqueeze(-1), 0)

    def get_position_encoding(self, tokens: Tensor) -> Tensor:
        """[1, T, D]: sines, then cosines, then a zero if D is odd."""
        position = torch.arange(tokens.size(1), device=tokens.device).to(self.inv_timescales)
        angles = position[:, None] * self.inv_timescales
        # The published code puts that zero on the wrong axis and fails for an odd D;
        # tensor2tensor, which it follows, has it here.
        signal = torch.cat([angles.sin(), angles.cos()], dim=1)
        return F.pad(signal, (0, self.hidden_size % 2)).unsqueeze(0)


build = Transformer


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    # The model's multiplications are the source's, its angles', the target's, its angles'.
    first = {"source": 0, "target": 2 if config.has_inputs else 0}

    def in_stack(side, stack, sublayers, found):
        found[f"{side}/embedding"] = Tap("", op="mul", call=first[side])
        found[f"{side}/embedded"] = Tap("i_emb_dropout" if side == "source" else "t_emb_dropout")
        found[f"{stack}/final_norm"] = Tap(f"{stack}.last_norm")

    return common.both_stacks(config, LAYERS, in_stack)
