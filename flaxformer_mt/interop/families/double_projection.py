"""The weight map of `double_projection`.

A head's query is W'(W x + b) + b', with W, b per head and W', b' shared by all heads. The two
linear maps compose into one, with kernel W' W and bias W' b + b' for each head, and so for keys
and values. The original four tensors are carried; parameters that have been trained since are
written with W' = 1 and b' = 0, which is the same function.

The publication has layers but no model around them, so the names depend on how the layers are held:
no prefix for a single layer, "0.", "1.", ... for a list of encoder or of decoder layers, and
"encoder.0.", ..., "decoder.0.", ... for both.
"""

from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.rules import ArrayTuple, Layers, TensorRule, linear


def layers(num_encoder_layers: int, num_decoder_layers: int) -> Layers:
    """Returns the names of the layers, which depend on which there are."""
    encoder, decoder = "encoder.{layer}.", "decoder.{layer}."
    if num_encoder_layers + num_decoder_layers == 1:
        encoder = decoder = ""
    elif not num_encoder_layers or not num_decoder_layers:
        encoder = decoder = "{layer}."
    in_decoder = {
        "self_attention": "self_attention",
        "self_attention_norm": "norm1",
        "cross_attention": "cross_attention",
        "cross_attention_norm": "norm2",
        "feed_forward/hidden": "feed_forward.0",
        "feed_forward/output": "feed_forward.2",
        "feed_forward_norm": "norm3",
    }
    in_encoder = {"feed_forward_norm": "norm2"}
    modules = in_decoder if num_decoder_layers else in_decoder | in_encoder
    projections = (".attention.W_q", ".attention.W_k", ".attention.W_v", ".W_o")
    return Layers(
        encoder, decoder, modules, in_encoder, projections=projections, attention=_attention
    )


def _depths(checkpoint: PublishedCheckpoint) -> tuple[int, int]:
    """Returns the numbers of encoder and decoder layers; only the latter have cross-attention."""
    encoder, decoder = checkpoint.num_layers("encoder."), checkpoint.num_layers("decoder.")
    if encoder or decoder:
        return encoder, decoder
    number = checkpoint.num_layers("") or 1
    has_decoder_layers = any("cross_attention." in name for name in checkpoint.tensors)
    return (0, number) if has_decoder_layers else (number, 0)


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    depths = _depths(checkpoint)
    return layers(*depths).sizes(checkpoint) | {
        "num_encoder_layers": depths[0],
        "num_decoder_layers": depths[1],
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    own = layers(*_depths(checkpoint))
    second = own.decoder.format(layer=0) + "self_attention.attention.W_q"
    head_dim = checkpoint.size(
        (f"{second}.weight", 0), (f"{second}.weight", 1), (f"{second}.bias", 0)
    )
    return {"num_heads": own.sizes(checkpoint)["d_model"] // head_dim}


def _folded(ours: str, attention: str, name: str, num_heads: int) -> TensorRule:
    """Returns the rule for the two linear maps of all heads; `name` is W_q, W_k or W_v."""

    def to_ours(w: np.ndarray, b: np.ndarray, w2: np.ndarray, b2: np.ndarray) -> ArrayTuple:
        # In float64, so that float32 results are rounded once. Traced arrays keep their dtype:
        # JAX may have float64 disabled.
        dtype = np.float64 if isinstance(w, np.ndarray) else w.dtype
        heads = w.T.reshape(len(w), num_heads, -1).astype(dtype)  # [D, H, K]
        kernel = (heads @ w2.T).reshape(w.shape)
        bias = (b.reshape(num_heads, -1).astype(dtype) @ w2.T + b2).reshape(b.shape)
        return kernel.astype(w.dtype), bias.astype(b.dtype)

    def to_theirs(kernel: np.ndarray, bias: np.ndarray) -> ArrayTuple:
        head_dim = len(bias) // num_heads
        return kernel.T, bias, np.eye(head_dim, dtype=bias.dtype), np.zeros(head_dim, bias.dtype)

    return TensorRule(
        (f"{ours}/kernel", f"{ours}/bias"),
        (
            f"{attention}.{name}.weight",
            f"{attention}.{name}.bias",
            f"{attention}.attention.{name}.weight",
            f"{attention}.attention.{name}.bias",
        ),
        to_ours,
        to_theirs,
        rearranges=False,
    )


def _attention(config: TransformerConfig, ours: str, theirs: str) -> list[TensorRule]:
    return [
        _folded(f"{ours}/query", theirs, "W_q", config.num_heads),
        _folded(f"{ours}/key", theirs, "W_k", config.num_heads),
        _folded(f"{ours}/value", theirs, "W_v", config.num_heads),
        *linear(f"{ours}/output", f"{theirs}.W_o"),
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return layers(config.num_encoder_layers, config.num_decoder_layers).rules(config)


FAMILY = Family(
    name="double_projection",
    sizes=_sizes,
    guess=_guess,
    rules=_rules,
    order=(
        "encoder", "decoder", "self_attention", "cross_attention", "W_q", "W_k", "W_v", "W_o",
        "attention", "feed_forward", "norm1", "norm2", "norm3", "weight", "bias",
    ),
)  # fmt: skip
