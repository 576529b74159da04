"""The weight map of `annotated` and `annotated_wide_heads`, for both layouts of its decoder.

harvardnlp's decoder layers have a `src_attn` (layout "separate"). Those of the study notes have
none and use the self-attention's weights for the source as well (layout "shared"): our
cross-attention is initialized as a copy of self-attention, and the gradient of the reference's
attention is the sum of our two. Parameters whose two attentions are equal are written in the shared
layout, unless they carry a `src_attn`; all others in harvardnlp's.

The position base is read from the checkpoint's position table.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint, Tensors
from flaxformer_mt.interop.weight_maps.family import (
    Buffer,
    Family,
    guess_tying,
    head_width,
    sinusoids,
)
from flaxformer_mt.interop.weight_maps.rules import (
    TensorRule,
    embeddings,
    linear,
    norm,
    same,
    used_twice,
)

SOURCE = "src_embed.0.lut.weight"
TARGET = "tgt_embed.0.lut.weight"
OUTPUT = "generator.proj"
ENCODER = "encoder.layers.{layer}"
DECODER = "decoder.layers.{layer}"
TABLE = "src_embed.1.pe"

SHARED = "shared"
SEPARATE = "separate"

PUBLISHED_BASES = (10000.0, 1000.0)


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    layer = DECODER.format(layer=0)
    hidden, narrow = f"{layer}.feed_forward.w_1", f"{layer}.feed_forward.w_2.weight"
    query, key, value, joined = (f"{layer}.self_attn.linears.{index}" for index in range(4))
    table, bias = f"{OUTPUT}.weight", f"{OUTPUT}.bias"
    keys = checkpoint.size((f"{query}.weight", 0), (f"{key}.weight", 0), (f"{query}.bias", 0))
    values = checkpoint.size((f"{value}.weight", 0), (f"{joined}.weight", 1), (f"{value}.bias", 0))
    return {
        "source_vocab_size": checkpoint.size((SOURCE, 0)),
        "target_vocab_size": checkpoint.size((TARGET, 0), (table, 0), (bias, 0)),
        "d_model": checkpoint.size((SOURCE, 1), (TARGET, 1), (table, 1)),
        "d_ff": checkpoint.size((f"{hidden}.weight", 0), (f"{hidden}.bias", 0), (narrow, 1)),
        "head_dim": head_width(keys, num_heads),
        "value_dim": head_width(values, num_heads),
        "num_encoder_layers": checkpoint.num_layers("encoder.layers."),
        "num_decoder_layers": checkpoint.num_layers("decoder.layers."),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    fields: dict[str, Any] = guess_tying(checkpoint, SOURCE, TARGET, f"{OUTPUT}.weight")
    # Position 1, column 2 is the sine of the second frequency, the first that depends on the base.
    if checkpoint.size((TABLE, 1)) > 1 and checkpoint.size((TABLE, 2)) > 2:
        table = checkpoint.tensors[TABLE]
        for base in PUBLISHED_BASES:
            if np.isclose(table[0, 1, 2], np.sin(base ** (-2 / table.shape[2])), rtol=0, atol=1e-5):
                fields["position_base"] = base
    return fields


def _norm(ours: str, theirs: str) -> list[TensorRule]:
    return norm(ours, theirs, scale="a_2", bias="b_2")


def _attention(ours: str, theirs: str) -> list[TensorRule]:
    return [
        rule
        for index, name in enumerate(("query", "key", "value", "output"))
        for rule in linear(f"{ours}/{name}", f"{theirs}.linears.{index}", bias=True)
    ]


def _decoder_attentions(layout: str) -> list[TensorRule]:
    ours, theirs = "decoder/layers/self_attention", f"{DECODER}.self_attn"
    rules = _attention(ours, theirs)
    if layout == SEPARATE:
        return rules + _attention("decoder/layers/cross_attention", f"{DECODER}.src_attn")
    return [
        used_twice(rule, rule.ours[0].replace("self_attention", "cross_attention"))
        for rule in rules
    ]


def _feed_forward(ours: str, theirs: str) -> list[TensorRule]:
    return [
        *linear(f"{ours}/hidden", f"{theirs}.w_1", bias=True),
        *linear(f"{ours}/output", f"{theirs}.w_2", bias=True),
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        *embeddings(config, SOURCE, TARGET, f"{OUTPUT}.weight"),
        same("output/bias", f"{OUTPUT}.bias"),
        *_attention("encoder/layers/self_attention", f"{ENCODER}.self_attn"),
        *_norm("encoder/layers/self_attention_norm", f"{ENCODER}.sublayer.0.norm"),
        *_feed_forward("encoder/layers/feed_forward", f"{ENCODER}.feed_forward"),
        *_norm("encoder/layers/feed_forward_norm", f"{ENCODER}.sublayer.1.norm"),
        *_norm("encoder/final_norm", "encoder.norm"),
        *_decoder_attentions(layout),
        *_norm("decoder/layers/self_attention_norm", f"{DECODER}.sublayer.0.norm"),
        *_norm("decoder/layers/cross_attention_norm", f"{DECODER}.sublayer.1.norm"),
        *_feed_forward("decoder/layers/feed_forward", f"{DECODER}.feed_forward"),
        *_norm("decoder/layers/feed_forward_norm", f"{DECODER}.sublayer.2.norm"),
        *_norm("decoder/final_norm", "decoder.norm"),
    ]


def _buffers(config: TransformerConfig) -> list[Buffer]:
    table = sinusoids(config)
    return [
        Buffer(f"{side}_embed.1.pe", lambda rows: table(rows)[None], rows=5000, axis=1)
        for side in ("src", "tgt")
    ]


def _layout_of_tensors(names: Collection[str]) -> str:
    return SEPARATE if any(".src_attn." in name for name in names) else SHARED


def _layout_of_params(arrays: Tensors, carried: Tensors) -> str:
    if _layout_of_tensors(carried) == SEPARATE:
        return SEPARATE
    cross = {path: array for path, array in arrays.items() if "/cross_attention/" in path}
    equal = all(
        np.array_equal(array, arrays[path.replace("/cross_attention/", "/self_attention/")])
        for path, array in cross.items()
    )
    return SHARED if equal else SEPARATE


FAMILY = Family(
    name="annotated",
    sizes=_sizes,
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset({"tie_embeddings", "position_base"}),
    layout_of_tensors=_layout_of_tensors,
    layout_of_params=_layout_of_params,
    head_widths="free",
    order=(
        "encoder", "decoder", "src_embed", "tgt_embed", "generator", "lut", "pe", "layers",
        "self_attn", "src_attn", "linears", "feed_forward", "w_1", "w_2", "sublayer", "norm", "a_2",
        "b_2", "proj", "weight", "bias",
    ),
)  # fmt: skip
WIDE_HEADS = dataclasses.replace(FAMILY, name="annotated_wide_heads")
"""The sizes of heads are free in both."""
