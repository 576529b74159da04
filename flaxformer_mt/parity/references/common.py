"""Shared parts of the references: masks, heads, positions, the forward pass, and taps."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families import fairseq
from flaxformer_mt.interop.weight_maps.rules import Layers
from flaxformer_mt.parity.trace.module_values import Tap, for_layers, softmax_input, softmax_output

MASKED_SCORE = -1e9
"""The value of masked scores in every publication except `torch.nn.Transformer`."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class EncoderDecoder(nn.Module):
    """The interface of the references, with sub-modules `encoder` and `decoder`."""

    encoder: Any
    """Takes (source [B, S], its mask [B, 1, S])."""
    decoder: Any
    """Takes (target [B, T], its mask [B, T, T], the encoder's output, the source's mask)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pad_id = config.pad_id

    def forward(self, source: Tensor, target_input: Tensor, *masks: Tensor) -> Tensor:
        """Returns [B, T, V] for source [B, S] and target_input [B, T]."""
        visible, target_visible = self.masks(source, target_input)
        encoded = self.encoder(source, visible)
        return self.project(self.decoder(target_input, target_visible, encoded, visible))

    def masks(self, source: Tensor, target_input: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the masks of source [B, 1, S] and target [B, T, T]: bool, True = attend."""
        visible = not_padding(target_input, self.pad_id) & not_future(target_input)
        return not_padding(source, self.pad_id), visible

    def project(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, V]."""
        return self.get_submodule("generator")(x)


def in_turn(layers: Any, x: Tensor, *masks_and_memory: Tensor) -> Tensor:
    """Runs the layers of a stack, [B, T, D] to [B, T, D]."""
    for layer in layers:
        x = layer(x, *masks_and_memory)
    return x


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


def attend(
    scores: Tensor, values: Tensor, visible: Tensor, dropout: nn.Module, masked: float
) -> tuple[Tensor, Tensor]:
    """Returns the joined heads [B, T, H*U], and the weights [B, H, T, S] before dropout.

    Scores are [B, H, T, S], values [B, H, S, U], `visible` is bool [B, 1 or T, S].
    """
    weights = scores.masked_fill(~visible.unsqueeze(1), masked).softmax(dim=-1)
    return join_heads(dropout(weights) @ values), weights


def interleaved_sinusoids(rows: int, d_model: int, base: float) -> Tensor:
    """Sines and cosines in turn, [rows, D]."""
    frequencies = torch.exp(torch.arange(0, d_model, 2) * -(math.log(base) / d_model))
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def concatenated_sinusoids(rows: int, d_model: int) -> Tensor:
    """All sines, then all cosines, then a zero if D is odd, with tensor2tensor's frequencies."""
    half = d_model // 2
    steps = torch.arange(half, dtype=torch.get_default_dtype())
    frequencies = torch.exp(steps * -(math.log(10000) / max(half - 1, 1)))
    angles = torch.arange(rows)[:, None] * frequencies
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, d_model % 2))


class InterleavedPositions(nn.Module):
    """dropout(x + sinusoids), for an even D; `name` is the buffer with 5000 rows along `axis`."""

    def __init__(self, config: TransformerConfig, name: str, axis: Literal[0, 1]) -> None:
        super().__init__()
        self.name, self.axis = name, axis
        self.dropout = nn.Dropout(config.dropout_rate)
        table = interleaved_sinusoids(5000, config.d_model, config.position_base)
        self.register_buffer(name, table.unsqueeze(1 - axis))

    def forward(self, x: Tensor) -> Tensor:
        table = self.get_buffer(self.name)
        return self.dropout(x + table.narrow(self.axis, 0, x.size(self.axis)))


def feed_forward(
    config: TransformerConfig, first: str, second: str, linear: Callable[..., nn.Module] = nn.Linear
) -> nn.Sequential:
    """W2 dropout(relu(W1 x)), whose linear maps have these names."""
    network = nn.Sequential()
    network.add_module(first, linear(config.d_model, config.d_ff))
    network.add_module("relu", nn.ReLU())
    network.add_module("dropout", nn.Dropout(config.dropout_rate))
    network.add_module(second, linear(config.d_ff, config.d_model))
    return network


def xavier_uniform(module: nn.Module) -> None:
    """Draws new values for all matrices of a module."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)


def tie(config: TransformerConfig, source: Any, target: Any, output: Any) -> None:
    """Makes embeddings and output projection share the target embedding, as `config` says."""
    if config.shares_source_and_target:
        source.weight = target.weight
    if config.shares_target_and_output:
        output.weight = target.weight


@contextlib.contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Sets the default dtype of PyTorch, such as "float64", inside the context."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


# Taps. "{layer}" in a name is the index of a layer.


def both_stacks(
    config: TransformerConfig,
    layers: Layers,
    in_stack: Callable[[str, str, list[str], dict[str, Tap]], None],
    softmax: str = "",
) -> dict[str, Tap]:
    """Returns the taps of both stacks, whose layers have the names of the family's weight map.

    `in_stack` gets ("source", "encoder", the sub-layers of a layer, its taps) or ("target",
    "decoder", ...), and adds the other taps of the stack; those that are not as in most layers, it
    replaces. `softmax` is the module in an attention that computes the softmax, "" = itself.
    """
    found: dict[str, Tap] = {}
    for side, stack in {"target": "decoder", "source": "encoder"}.items():
        if stack == "decoder" or config.has_inputs:
            attends = stack == "decoder" and config.has_inputs
            sublayers = ["self_attention", *["cross_attention"] * attends, "feed_forward"]
            taps = _layer_taps(config, layers, stack, sublayers, softmax)
            in_stack(side, stack, sublayers, taps)
            found |= for_layers(getattr(config, f"num_{stack}_layers"), taps)
    return found


def _layer_taps(
    config: TransformerConfig, layers: Layers, stack: str, sublayers: Sequence[str], softmax: str
) -> dict[str, Tap]:
    """Returns the taps of a layer.

    The sum of pre-norm, x + f(norm(x)), is an addition in the layer itself, that of post-norm the
    input of the norm.
    """
    site, layer = f"{stack}/layers/{{layer}}", getattr(layers, stack).removesuffix(".")
    names, is_pre = layers.names(stack), config.norm_position != "post"
    found = {site: Tap(layer)}
    for attention in sublayers[:-1]:
        module = names[attention]
        linears = [module + projection for projection in layers.projections or [""] * 4]
        softmax_module = f"{module}.{softmax}".removesuffix(".")
        found |= attention_taps(f"{site}/{attention}", linears, softmax_module)
    hidden, output = (names[f"feed_forward/{part}"] for part in ("hidden", "output"))
    found |= {
        f"{site}/feed_forward/hidden": Tap(hidden),
        f"{site}/feed_forward/activated": Tap(output, "input"),
        f"{site}/feed_forward/output": Tap(output),
    }
    for call, sublayer in enumerate(sublayers):
        norm = names[f"{sublayer}_norm"]
        found[f"{site}/{sublayer}_norm"] = Tap(norm)
        if config.norm_position == "both":
            output_norm = f"{sublayer}_output_norm"
            found[f"{site}/{output_norm}"] = Tap(names[output_norm])
        added = Tap(layer, op="add", call=call)
        found[f"{site}/{sublayer}_sum"] = added if is_pre else Tap(norm, "input")
    return found


def attention_taps(
    site: str, linears: Sequence[str], softmax: str, call: int = 0
) -> dict[str, Tap]:
    """Returns the taps inside an attention, of call number `call`.

    `linears` are the modules that give query, key, value and output.
    """
    query, key, value, output = linears
    return {
        f"{site}/query": Tap(query, call=call),
        f"{site}/key": Tap(key, call=call),
        f"{site}/value": Tap(value, call=call),
        f"{site}/scores": softmax_input(softmax, call),
        f"{site}/weights": softmax_output(softmax, call),
        f"{site}/context": Tap(output, "input", call=call),
        f"{site}/output": Tap(output, call=call),
    }


def heads_joined(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reshapes [B, H, T, K] or [B*H, T, K] to [B, T, H*K]; for `Tap.reshape`."""
    by_head = value.reshape(shape[0], -1, *value.shape[-2:])
    return by_head.swapaxes(1, 2).reshape(shape)


def fairseq_taps(
    config: TransformerConfig, prefix: str, embedding: Tap, embedded: Tap
) -> dict[str, Tap]:
    """Returns the taps of a model of fairseq's kind, whose names begin with `prefix`.

    `embedding` is that of the embeddings, `embedded` that of their sum with positions, with names
    in a stack.
    """

    def in_stack(side, stack, sublayers, found):
        module = f"{prefix}{stack}"
        names = [f"{module}.{tap.module}".removesuffix(".") for tap in (embedding, embedded)]
        found[f"{side}/embedding"] = embedding._replace(module=names[0])
        if config.position_kind != "none":
            found[f"{side}/embedded"] = embedded._replace(module=names[1])
        if config.embedding_norm:
            found[f"{stack}/embedding_norm"] = Tap(f"{module}.layernorm_embedding")
        if config.final_norm:
            found[f"{stack}/final_norm"] = Tap(f"{module}.layer_norm")

    return both_stacks(config, fairseq.layers(prefix), in_stack)
