"""What the references share: masks, heads, dtype, and the shape of what they return."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MASKED_SCORE = -1e9
"""What every publication but `torch.nn.Transformer` writes over a hidden score."""


class Attention(NamedTuple):
    """The attention weights of every layer, one tensor a layer."""

    encoder_self: list[Tensor]
    """[B, H, S, S]"""
    decoder_self: list[Tensor]
    """[B, H, T, T]"""
    decoder_cross: list[Tensor]
    """[B, H, T, S]"""


def not_padding(tokens: Tensor, pad_id: int) -> Tensor:
    """Which keys may be seen: bool [B, 1, S] for tokens [B, S]."""
    return (tokens != pad_id).unsqueeze(1)


def not_future(tokens: Tensor) -> Tensor:
    """Which keys each query may see: bool [1, T, T], the lower triangle, for tokens [B, T]."""
    length = tokens.size(1)
    return torch.ones(1, length, length, dtype=torch.bool, device=tokens.device).tril()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H*K] to [B, H, T, K]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, H, T, K] to [B, T, H*K]."""
    return x.transpose(1, 2).flatten(2)


@contextlib.contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Lets PyTorch make parameters and tables of the dtype `name`, "float64" say, for a while."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
