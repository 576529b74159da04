"""Shared parts of the references: masks, heads, dtype, taps, and the returned attention."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flaxformer_mt.parity.trace import Tap, softmax_input, softmax_output

MASKED_SCORE = -1e9
"""The value of masked scores in every publication except `torch.nn.Transformer`."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Activations by their names in `TransformerConfig.activation`."""


class Attention(NamedTuple):
    """The attention weights of every layer, one tensor per layer."""

    encoder_self: list[Tensor]
    """[B, H, S, S]"""
    decoder_self: list[Tensor]
    """[B, H, T, T]"""
    decoder_cross: list[Tensor]
    """[B, H, T, S]"""


def not_padding(tokens: Tensor, pad_id: int) -> Tensor:
    """Returns the padding mask of tokens [B, S]: bool [B, 1, S], True = attend."""
    return (tokens != pad_id).unsqueeze(1)


def not_future(tokens: Tensor) -> Tensor:
    """Returns the causal mask of tokens [B, T]: bool [1, T, T], True = attend."""
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
    """Sets the default dtype of PyTorch, such as "float64", inside the context."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


# Taps that most references have in common.


def attention_taps(site: str, linears: Sequence[str], softmax: str) -> dict[str, Tap]:
    """Returns the taps inside an attention; "{layer}" in a name is a layer index.

    Args:
      site: of the attention.
      linears: the modules that give query, key, value and output.
      softmax: the module that takes the softmax.
    """
    query, key, value, output = linears
    return {
        f"{site}/query": Tap(query),
        f"{site}/key": Tap(key),
        f"{site}/value": Tap(value),
        f"{site}/scores": softmax_input(softmax),
        f"{site}/weights": softmax_output(softmax),
        f"{site}/context": Tap(output, "input"),
        f"{site}/output": Tap(output),
    }


def feed_forward_taps(site: str, hidden: str, output: str) -> dict[str, Tap]:
    """Returns the taps inside a feed-forward network of two linear modules."""
    return {
        f"{site}/hidden": Tap(hidden),
        f"{site}/activated": Tap(output, "input"),
        f"{site}/output": Tap(output),
    }


def post_norm_taps(site: str, norm: str) -> dict[str, Tap]:
    """Returns the taps of the sum and the norm of norm(x + f(x))."""
    return {f"{site}_sum": Tap(norm, "input"), f"{site}_norm": Tap(norm)}


def pre_norm_taps(site: str, norm: str, layer: str, call: int) -> dict[str, Tap]:
    """Returns the taps of the norm and the sum of x + f(norm(x)), added in the layer itself.

    Args:
      site: of the sub-layer.
      norm: its norm module.
      layer: the layer module.
      call: the index of the addition in the layer.
    """
    return {f"{site}_norm": Tap(norm), f"{site}_sum": Tap(layer, op="add", call=call)}


def heads_joined(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reshapes [B, H, T, K] or [B*H, T, K] to [B, T, H*K]; for `Tap.reshape`."""
    by_head = value.reshape(shape[0], -1, *value.shape[-2:])
    return by_head.swapaxes(1, 2).reshape(shape)
