"""`torch.nn.Transformer`, inside the embeddings and output of PyTorch's translation tutorial.

Post-norm or pre-norm, final norms in either case.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Transformer.html, and for the names
around it https://docs.pytorch.org/tutorials/beginner/translation_transformer.html
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.common import (
    Attention,
    feed_forward_taps,
    heads_joined,
    not_future,
    post_norm_taps,
    pre_norm_taps,
)
from flaxformer_mt.parity.trace import (
    Reshape,
    Tap,
    for_layers,
    softmax_input,
    softmax_output,
    time_major,
)

# nn.Transformer takes two by name, any other as a function.
_ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
}


class PositionalEncoding(nn.Module):
    """Interleaved sinusoids, of base 10000 as published, for an even D."""

    pos_embedding: Tensor

    def __init__(
        self, emb_size: int, dropout: float, maxlen: int = 5000, base: float = 10000.0
    ) -> None:
        super().__init__()
        frequency = torch.exp(-torch.arange(0, emb_size, 2) * math.log(base) / emb_size)
        position = torch.arange(0, maxlen).reshape(maxlen, 1)
        table = torch.zeros((maxlen, emb_size))
        table[:, 0::2] = torch.sin(position * frequency)
        table[:, 1::2] = torch.cos(position * frequency)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", table.unsqueeze(-2))

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, D] to [T, B, D]."""
        return self.dropout(x + self.pos_embedding[: x.size(0)])


class TokenEmbedding(nn.Module):
    """Token embeddings times sqrt(D), as published, or unscaled."""

    def __init__(self, vocab_size: int, emb_size: int, scales: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size)
        self.scale = math.sqrt(emb_size) if scales else 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        """[T, B] to [T, B, D]."""
        return self.embedding(tokens) * self.scale


class Seq2SeqTransformer(nn.Module):
    """The whole model.

    Args:
      norm_first: pre-norm.
      batch_first: the layout inside `transformer`; forward always takes and returns [B, ...].
    """

    def __init__(
        self,
        num_encoder_layers: int,
        num_decoder_layers: int,
        emb_size: int,
        nhead: int,
        src_vocab_size: int,
        tgt_vocab_size: int,
        dim_feedforward: int,
        dropout: float,
        activation: str = "relu",
        norm_first: bool = False,
        batch_first: bool = False,
        pad_id: int = 0,
        layer_norm_eps: float = 1e-5,
        scales: bool = True,
        position_base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.pad_id = pad_id
        sizes: dict[str, Any] = {
            "d_model": emb_size,
            "nhead": nhead,
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "activation": _ACTIVATIONS.get(activation, activation),
            "layer_norm_eps": layer_norm_eps,
            "norm_first": norm_first,
            "batch_first": batch_first,
        }
        # The encoder that nn.Transformer makes itself would leave out padded positions in a fast
        # path, with other results for them.
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**sizes),
            num_encoder_layers,
            nn.LayerNorm(emb_size, eps=layer_norm_eps),
            enable_nested_tensor=False,
        )
        self.transformer = nn.Transformer(
            **sizes, num_decoder_layers=num_decoder_layers, custom_encoder=encoder
        )
        self.generator = nn.Linear(emb_size, tgt_vocab_size)
        self.src_tok_emb = TokenEmbedding(src_vocab_size, emb_size, scales)
        self.tgt_tok_emb = TokenEmbedding(tgt_vocab_size, emb_size, scales)
        self.positional_encoding = PositionalEncoding(emb_size, dropout, base=position_base)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self, src: Tensor, tgt: Tensor, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Attention]:
        """Logits [B, T, V] for src [B, S] and tgt [B, T]."""
        src_padding, tgt_padding = src == self.pad_id, tgt == self.pad_id
        x = self.positional_encoding(self.src_tok_emb(src.T))  # [S, B, D]
        y = self.positional_encoding(self.tgt_tok_emb(tgt.T))  # [T, B, D]
        batch_first = self.transformer.batch_first
        with _attention_weights(self.transformer) as weights:
            y = self.transformer(
                x.transpose(0, 1) if batch_first else x,
                y.transpose(0, 1) if batch_first else y,
                tgt_mask=~not_future(tgt)[0],
                src_key_padding_mask=src_padding,
                tgt_key_padding_mask=tgt_padding,
                memory_key_padding_mask=src_padding,
            )
        logits = self.generator(y if batch_first else y.transpose(0, 1))
        return (logits, weights) if return_attention else logits


@contextmanager
def _attention_weights(transformer: nn.Transformer) -> Iterator[Attention]:
    """Collects the attention weights of every layer inside the context.

    PyTorch's layers do not ask their attention modules for weights. Hooks make them, and by being
    there also keep every layer off the inference fast path.
    """
    weights = Attention([], [], [])
    modules = [(layer.self_attn, weights.encoder_self) for layer in transformer.encoder.layers]
    for layer in transformer.decoder.layers:
        modules += [
            (layer.self_attn, weights.decoder_self),
            (layer.multihead_attn, weights.decoder_cross),
        ]

    def ask_for_weights(module, args, kwargs):
        return args, kwargs | {"need_weights": True, "average_attn_weights": False}

    handles = []
    for module, found in modules:
        handles += [
            module.register_forward_pre_hook(ask_for_weights, with_kwargs=True),
            module.register_forward_hook(
                lambda module, args, output, found=found: found.append(output[1])
            ),
        ]
    try:
        yield weights
    finally:
        for handle in handles:
            handle.remove()


def build(config: TransformerConfig, batch_first: bool = False) -> Seq2SeqTransformer:
    """Builds the reference with the sizes and the open switches of `config`."""
    model = Seq2SeqTransformer(
        num_encoder_layers=config.num_encoder_layers,
        num_decoder_layers=config.num_decoder_layers,
        emb_size=config.d_model,
        nhead=config.num_heads,
        src_vocab_size=config.source_vocab_size,
        tgt_vocab_size=config.target_vocab_size,
        dim_feedforward=config.d_ff,
        dropout=config.dropout_rate,
        activation=config.activation,
        norm_first=config.norm_position == "pre",
        batch_first=batch_first,
        pad_id=config.pad_id,
        layer_norm_eps=config.norm_epsilon,
        scales=config.scale_embeddings,
        position_base=config.position_base,
    )
    if config.shares_source_and_target:
        model.src_tok_emb.embedding.weight = model.tgt_tok_emb.embedding.weight
    if config.shares_target_and_output:
        model.generator.weight = model.tgt_tok_emb.embedding.weight
    return model


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of this reference or of a bare `torch.nn.Transformer`."""
    bare = isinstance(module, nn.Transformer)
    transformer: Any = module if bare else module.transformer
    prefix = "" if bare else "transformer."
    embeddings = {
        "source/embedding": Tap("src_tok_emb", reshape=time_major),
        "source/embedded": Tap("positional_encoding", reshape=time_major),
        "target/embedding": Tap("tgt_tok_emb", reshape=time_major),
        "target/embedded": Tap("positional_encoding", call=1, reshape=time_major),
    }
    encoder, decoder = f"{prefix}encoder", f"{prefix}decoder"
    layout = None if transformer.batch_first else time_major
    in_encoder = _layer_taps("encoder", encoder, {"self": "self_attn"}, config, layout)
    in_decoder = _layer_taps(
        "decoder", decoder, {"self": "self_attn", "cross": "multihead_attn"}, config, layout
    )
    return {
        **({} if bare else embeddings),
        **for_layers(config.num_encoder_layers, in_encoder),
        "encoder/final_norm": Tap(f"{encoder}.norm", reshape=layout),
        **for_layers(config.num_decoder_layers, in_decoder),
        "decoder/final_norm": Tap(f"{decoder}.norm", reshape=layout),
    }


def _layer_taps(
    stack: str,
    module: str,
    attentions: dict[str, str],
    config: TransformerConfig,
    layout: Reshape | None,
) -> dict[str, Tap]:
    site, layer = f"{stack}/layers/{{layer}}", f"{module}.layers.{{layer}}"

    def residual_taps(sublayer: str, index: int) -> dict[str, Tap]:
        norm = f"{layer}.norm{index + 1}"
        if config.norm_position == "pre":
            return pre_norm_taps(f"{site}/{sublayer}", norm, layer, index)
        return post_norm_taps(f"{site}/{sublayer}", norm)

    in_layout = {site: Tap(layer)}
    inside_attention: dict[str, Tap] = {}
    for index, (kind, name) in enumerate(attentions.items()):
        attention = f"{site}/{kind}_attention"
        in_layout[f"{attention}/output"] = Tap(f"{layer}.{name}")
        in_layout |= residual_taps(f"{kind}_attention", index)
        inside_attention |= _inside_attention_taps(attention, f"{layer}.{name}")
    in_layout |= feed_forward_taps(
        f"{site}/feed_forward", f"{layer}.linear1", f"{layer}.linear2"
    ) | residual_taps("feed_forward", len(attentions))
    return inside_attention | {
        name: tap._replace(reshape=layout) for name, tap in in_layout.items()
    }


def _inside_attention_taps(site: str, module: str) -> dict[str, Tap]:
    """`torch.nn.MultiheadAttention` computes everything itself, without sub-modules.

    It multiplies queries [B*H, T, K] by their scale and then with keys [B*H, K, S], at last weights
    with values [B*H, S, K], and the context [T*B, H*K] with the output projection.
    """

    def keys_joined(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return heads_joined(value.swapaxes(1, 2), shape)

    return {
        f"{site}/query": Tap(module, "input", "mul", reshape=heads_joined),
        f"{site}/key": Tap(module, "input", "bmm", argument=1, reshape=keys_joined),
        f"{site}/value": Tap(module, "input", "bmm", -1, argument=1, reshape=heads_joined),
        f"{site}/scores": softmax_input(module),
        f"{site}/weights": softmax_output(module),
        f"{site}/context": Tap(module, "input", "addmm", -1, argument=1, reshape=time_major),
    }
