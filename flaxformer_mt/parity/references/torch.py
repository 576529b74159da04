"""`torch.nn.Transformer`, inside the embeddings and output of PyTorch's translation tutorial.

Post-norm or pre-norm, final norms in either case.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Transformer.html, and for the names
around it https://docs.pytorch.org/tutorials/beginner/translation_transformer.html
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.common import Attention, not_future


class PositionalEncoding(nn.Module):
    """Interleaved sinusoids of base 10000, for an even D."""

    pos_embedding: Tensor

    def __init__(self, emb_size: int, dropout: float, maxlen: int = 5000) -> None:
        super().__init__()
        frequency = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
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
    """Token vectors times sqrt(D)."""

    def __init__(self, vocab_size: int, emb_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size)
        self.emb_size = emb_size

    def forward(self, tokens: Tensor) -> Tensor:
        """[T, B] to [T, B, D]."""
        return self.embedding(tokens) * math.sqrt(self.emb_size)


class Seq2SeqTransformer(nn.Module):
    """The whole model.

    Args:
      norm_first: pre-norm.
      batch_first: the layout inside `transformer`; forward always takes and gives [B, ...].
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
    ) -> None:
        super().__init__()
        self.pad_id = pad_id
        sizes: dict[str, Any] = {
            "d_model": emb_size,
            "nhead": nhead,
            "dim_feedforward": dim_feedforward,
            "dropout": dropout,
            "activation": activation,
            "norm_first": norm_first,
            "batch_first": batch_first,
        }
        # The encoder that nn.Transformer makes itself would leave out padded positions in a fast
        # path, with other results for them.
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**sizes),
            num_encoder_layers,
            nn.LayerNorm(emb_size),
            enable_nested_tensor=False,
        )
        self.transformer = nn.Transformer(
            **sizes, num_decoder_layers=num_decoder_layers, custom_encoder=encoder
        )
        self.generator = nn.Linear(emb_size, tgt_vocab_size)
        self.src_tok_emb = TokenEmbedding(src_vocab_size, emb_size)
        self.tgt_tok_emb = TokenEmbedding(tgt_vocab_size, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size, dropout)
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
    """Collects the weights of every layer while it is open.

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
    """The reference with the sizes, activation and norm position of `config`."""
    return Seq2SeqTransformer(
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
    )
