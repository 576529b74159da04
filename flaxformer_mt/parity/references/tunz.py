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
from flaxformer_mt.parity.references.common import (
    MASKED_SCORE,
    Attention,
    attention_taps,
    feed_forward_taps,
    join_heads,
    not_future,
    not_padding,
    pre_norm_taps,
    split_heads,
)
from flaxformer_mt.parity.trace import Tap, for_layers

NORM_EPSILON = 1e-6


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class FeedForwardNetwork(nn.Module):
    """W2 dropout(relu(W1 x))."""

    def __init__(self, hidden_size: int, filter_size: int, dropout_rate: float) -> None:
        super().__init__()
        self.layer1 = _linear(hidden_size, filter_size, bias=True)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout_rate)
        self.layer2 = _linear(filter_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.layer2(self.dropout(self.relu(self.layer1(x))))


class MultiHeadAttention(nn.Module):
    """H heads of width D // H; where H does not divide D, they are together narrower than D."""

    def __init__(self, hidden_size: int, dropout_rate: float, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        att_size = hidden_size // head_size
        self.scale = att_size**-0.5
        self.linear_q = _linear(hidden_size, head_size * att_size, bias=False)
        self.linear_k = _linear(hidden_size, head_size * att_size, bias=False)
        self.linear_v = _linear(hidden_size, head_size * att_size, bias=False)
        self.att_dropout = nn.Dropout(dropout_rate)
        self.output_layer = _linear(head_size * att_size, hidden_size, bias=False)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D], and the weights [B, H, T, S]; `hidden` [B, 1 or T, S] is True = mask."""
        q = split_heads(self.linear_q(x), self.head_size) * self.scale
        k = split_heads(self.linear_k(memory), self.head_size)
        v = split_heads(self.linear_v(memory), self.head_size)
        scores = (q @ k.transpose(2, 3)).masked_fill(hidden.unsqueeze(1), MASKED_SCORE)
        weights = scores.softmax(dim=-1)
        return self.output_layer(join_heads(self.att_dropout(weights) @ v)), weights


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each as x + f(norm(x))."""

    def __init__(self, hidden_size, filter_size, dropout_rate, head_size) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.self_attention = MultiHeadAttention(hidden_size, dropout_rate, head_size)
        self.self_attention_dropout = nn.Dropout(dropout_rate)
        self.ffn_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.ffn = FeedForwardNetwork(hidden_size, filter_size, dropout_rate)
        self.ffn_dropout = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D], and the attention weights [B, H, S, S]."""
        y = self.self_attention_norm(x)
        y, weights = self.self_attention(y, y, hidden)
        x = x + self.self_attention_dropout(y)
        return x + self.ffn_dropout(self.ffn(self.ffn_norm(x))), weights


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention if there is an encoder, feed-forward.

    The attention to the encoder has its parameters in either case.
    """

    def __init__(self, hidden_size, filter_size, dropout_rate, head_size) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.self_attention = MultiHeadAttention(hidden_size, dropout_rate, head_size)
        self.self_attention_dropout = nn.Dropout(dropout_rate)
        self.enc_dec_attention_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.enc_dec_attention = MultiHeadAttention(hidden_size, dropout_rate, head_size)
        self.enc_dec_attention_dropout = nn.Dropout(dropout_rate)
        self.ffn_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.ffn = FeedForwardNetwork(hidden_size, filter_size, dropout_rate)
        self.ffn_dropout = nn.Dropout(dropout_rate)

    def forward(
        self,
        x: Tensor,
        enc_output: Tensor | None,
        self_hidden: Tensor,
        cross_hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[B, T, D], and the attention weights [B, H, T, T] and [B, H, T, S]."""
        y = self.self_attention_norm(x)
        y, self_weights = self.self_attention(y, y, self_hidden)
        x = x + self.self_attention_dropout(y)
        cross_weights = None
        if enc_output is not None:
            y = self.enc_dec_attention_norm(x)
            y, cross_weights = self.enc_dec_attention(y, enc_output, cross_hidden)
            x = x + self.enc_dec_attention_dropout(y)
        return x + self.ffn_dropout(self.ffn(self.ffn_norm(x))), self_weights, cross_weights


class Encoder(nn.Module):
    """The encoder: layers and a final norm."""

    def __init__(self, hidden_size, filter_size, dropout_rate, n_layers, head_size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(hidden_size, filter_size, dropout_rate, head_size) for _ in range(n_layers)
        )
        self.last_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, S, D], and the attention weights of every layer [B, H, S, S]."""
        all_weights = []
        for layer in self.layers:
            x, weights = layer(x, hidden)
            all_weights.append(weights)
        return self.last_norm(x), all_weights


class Decoder(nn.Module):
    """The decoder: layers and a final norm."""

    def __init__(self, hidden_size, filter_size, dropout_rate, n_layers, head_size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DecoderLayer(hidden_size, filter_size, dropout_rate, head_size) for _ in range(n_layers)
        )
        self.last_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)

    def forward(
        self,
        x: Tensor,
        enc_output: Tensor | None,
        self_hidden: Tensor,
        cross_hidden: Tensor | None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """[B, T, D], and the weights of every layer [B, H, T, T] and, with inputs, [B, H, T, S]."""
        all_self_weights, all_cross_weights = [], []
        for layer in self.layers:
            x, self_weights, cross_weights = layer(x, enc_output, self_hidden, cross_hidden)
            all_self_weights.append(self_weights)
            if cross_weights is not None:
                all_cross_weights.append(cross_weights)
        return self.last_norm(x), all_self_weights, all_cross_weights


class Transformer(nn.Module):
    """The whole model; its output projection is always the target embedding.

    Args:
      share_target_embedding: source and target embedding are one.
      has_inputs: False makes it a language model, without encoder.
      head_size: the number of heads. The published model has no such argument: it has 8.
    """

    inv_timescales: Tensor

    def __init__(
        self,
        i_vocab_size: int,
        t_vocab_size: int,
        n_encoder_layers: int = 6,
        n_decoder_layers: int = 6,
        hidden_size: int = 512,
        filter_size: int = 2048,
        dropout_rate: float = 0.1,
        share_target_embedding: bool = True,
        has_inputs: bool = True,
        src_pad_idx: int = 0,
        trg_pad_idx: int = 0,
        head_size: int = 8,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.emb_scale = hidden_size**0.5
        self.has_inputs = has_inputs
        self.src_pad_idx, self.trg_pad_idx = src_pad_idx, trg_pad_idx

        def embedding(vocab_size: int) -> nn.Embedding:
            table = nn.Embedding(vocab_size, hidden_size)
            nn.init.normal_(table.weight, mean=0, std=hidden_size**-0.5)
            return table

        sizes = (hidden_size, filter_size, dropout_rate)
        self.t_vocab_embedding = embedding(t_vocab_size)
        self.t_emb_dropout = nn.Dropout(dropout_rate)
        self.decoder = Decoder(*sizes, n_decoder_layers, head_size)
        if has_inputs:
            self.i_vocab_embedding = (
                self.t_vocab_embedding if share_target_embedding else embedding(i_vocab_size)
            )
            self.i_emb_dropout = nn.Dropout(dropout_rate)
            self.encoder = Encoder(*sizes, n_encoder_layers, head_size)

        num_timescales = hidden_size // 2
        increment = math.log(10000.0) / max(num_timescales - 1, 1)
        # Published in float32; here in the dtype of the model.
        steps = torch.arange(num_timescales, dtype=torch.get_default_dtype())
        self.register_buffer("inv_timescales", torch.exp(steps * -increment))

    def forward(
        self, inputs: Tensor | None, target_input: Tensor, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Attention]:
        """Logits [B, T, V].

        Args:
          inputs: [B, S]; not read by a language model.
          target_input: [B, T], the targets shifted right behind a first column of any value: what
            stands there is the zero vector. (The published model takes the targets and shifts their
            embeddings, to the same effect.)
          return_attention: also return the weights.
        """
        enc_output, encoder_self, inputs_hidden = None, [], None
        if self.has_inputs and inputs is not None:
            inputs_hidden = ~not_padding(inputs, self.src_pad_idx)
            x = self._embed(self.i_vocab_embedding, inputs, self.src_pad_idx) * self.emb_scale
            x = self.i_emb_dropout(x + self.get_position_encoding(inputs))
            enc_output, encoder_self = self.encoder(x, inputs_hidden)

        x = self._embed(self.t_vocab_embedding, target_input[:, 1:], self.trg_pad_idx)
        x = F.pad(x, (0, 0, 1, 0)) * self.emb_scale
        x = self.t_emb_dropout(x + self.get_position_encoding(target_input))
        # Padding stays visible to the target's self-attention: it stands behind every real token.
        x, decoder_self, decoder_cross = self.decoder(
            x, enc_output, ~not_future(target_input), inputs_hidden
        )
        logits = x @ self.t_vocab_embedding.weight.T
        if return_attention:
            return logits, Attention(encoder_self, decoder_self, decoder_cross)
        return logits

    def _embed(self, table: nn.Embedding, tokens: Tensor, pad_idx: int) -> Tensor:
        return table(tokens).masked_fill((tokens == pad_idx).unsqueeze(-1), 0)

    def get_position_encoding(self, tokens: Tensor) -> Tensor:
        """[1, T, D]: sines, then cosines, then a zero if D is odd.

        The published code puts that zero on the wrong axis and fails for an odd D; tensor2tensor,
        which it follows, has it here.
        """
        position = torch.arange(tokens.size(1), device=tokens.device).to(self.inv_timescales)
        angles = position[:, None] * self.inv_timescales
        signal = torch.cat([angles.sin(), angles.cos()], dim=1)
        return F.pad(signal, (0, self.hidden_size % 2)).unsqueeze(0)


def build(config: TransformerConfig) -> Transformer:
    """Builds the reference with the sizes and the source tying of `config`."""
    return Transformer(
        config.source_vocab_size,
        config.target_vocab_size,
        n_encoder_layers=config.num_encoder_layers,
        n_decoder_layers=config.num_decoder_layers,
        hidden_size=config.d_model,
        filter_size=config.d_ff,
        dropout_rate=config.dropout_rate,
        share_target_embedding=config.shares_source_and_target,
        has_inputs=config.has_inputs,
        src_pad_idx=config.pad_id,
        trg_pad_idx=config.pad_id,
        head_size=config.num_heads,
    )


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`.

    The model scales embeddings itself: its multiplications are the source's, its angles', the
    target's, its angles'.
    """
    attentions = {"self": "self_attention"}
    target = {
        "target/embedding": Tap("", op="mul", call=2 if config.has_inputs else 0),
        "target/embedded": Tap("t_emb_dropout"),
        "decoder/final_norm": Tap("decoder.last_norm"),
    }
    if not config.has_inputs:
        return target | for_layers(config.num_decoder_layers, _layer_taps("decoder", attentions))
    return {
        "source/embedding": Tap("", op="mul"),
        "source/embedded": Tap("i_emb_dropout"),
        **for_layers(config.num_encoder_layers, _layer_taps("encoder", attentions)),
        "encoder/final_norm": Tap("encoder.last_norm"),
        **target,
        **for_layers(
            config.num_decoder_layers,
            _layer_taps("decoder", attentions | {"cross": "enc_dec_attention"}),
        ),
    }


def _layer_taps(stack: str, attentions: dict[str, str]) -> dict[str, Tap]:
    site, layer = f"{stack}/layers/{{layer}}", f"{stack}.layers.{{layer}}"
    found = {site: Tap(layer)}
    for call, (kind, name) in enumerate(attentions.items()):
        module = f"{layer}.{name}"
        names = ("linear_q", "linear_k", "linear_v", "output_layer")
        linears = [f"{module}.{linear}" for linear in names]
        found |= attention_taps(f"{site}/{kind}_attention", linears, module)
        found |= pre_norm_taps(f"{site}/{kind}_attention", f"{module}_norm", layer, call)
    network = f"{layer}.ffn"
    found |= feed_forward_taps(f"{site}/feed_forward", f"{network}.layer1", f"{network}.layer2")
    return found | pre_norm_taps(
        f"{site}/feed_forward", f"{network}_norm", layer, call=len(attentions)
    )
