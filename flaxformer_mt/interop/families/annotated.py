"""The weight map of `annotated` and `annotated_wide_heads`, for both layouts of its decoder.

harvardnlp's decoder layers have a `src_attn` (layout "separate"). Those of the study notes have
none and use the self-attention's weights for the source as well (layout "shared"): our
cross-attention is initialized as a copy of self-attention, and the gradient of the reference's
attention is the sum of our two. Parameters whose two attentions are equal are written in the shared
layout, unless they carry a `src_attn`; all others in harvardnlp's.

The position base is read from the checkpoint's position table.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint, Tensors
from flaxformer_mt.interop.weight_maps import rules
from flaxformer_mt.interop.weight_maps.family import Family, guess_tying, sinusoid_buffers

SOURCE = "src_embed.0.lut.weight"
TARGET = "tgt_embed.0.lut.weight"
OUTPUT = "generator.proj"
TABLE = "src_embed.1.pe"

SHARED = "shared"
SEPARATE = "separate"

PUBLISHED_BASES = (10000.0, 1000.0)

LAYERS = rules.Layers(
    encoder="encoder.layers.{layer}.",
    decoder="decoder.layers.{layer}.",
    modules={
        "self_attention": "self_attn",
        "self_attention_norm": "sublayer.0.norm",
        "cross_attention": "src_attn",
        "cross_attention_norm": "sublayer.1.norm",
        "feed_forward/hidden": "feed_forward.w_1",
        "feed_forward/output": "feed_forward.w_2",
        "feed_forward_norm": "sublayer.2.norm",
    },
    encoder_modules={"feed_forward_norm": "sublayer.1.norm"},
    stack_norms={"final_norm": "{stack}.norm"},
    projections=(".linears.0", ".linears.1", ".linears.2", ".linears.3"),
    norm=functools.partial(rules.norm, scale="a_2", bias="b_2"),
)


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    fields: dict[str, Any] = guess_tying(checkpoint, SOURCE, TARGET, f"{OUTPUT}.weight")
    # Position 1, column 2 is the sine of the second frequency, the first that depends on the base.
    if checkpoint.size((TABLE, 1)) > 1 and checkpoint.size((TABLE, 2)) > 2:
        table = checkpoint.tensors[TABLE]
        for base in PUBLISHED_BASES:
            if np.isclose(table[0, 1, 2], np.sin(base ** (-2 / table.shape[2])), rtol=0, atol=1e-5):
                fields["position_base"] = base
    return fields


def _rules(config: TransformerConfig, layout: str) -> list[rules.TensorRule]:
    layers = LAYERS.rules(config)
    if layout == SHARED:
        layers = [_shared(rule) for rule in layers if ".src_attn." not in rule.theirs[0]]
    return [
        *rules.embeddings(config, SOURCE, TARGET, f"{OUTPUT}.weight"),
        rules.same("output/bias", f"{OUTPUT}.bias"),
        *layers,
    ]


def _shared(rule: rules.TensorRule) -> rules.TensorRule:
    (ours,) = rule.ours
    if not ours.startswith("decoder/layers/self_attention/"):
        return rule
    return rules.used_twice(rule, ours.replace("self_attention", "cross_attention"))


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
    sizes=LAYERS.sizes_of_model(
        [SOURCE], [TARGET, f"{OUTPUT}.weight", f"{OUTPUT}.bias"], free_heads=True
    ),
    guess=_guess,
    rules=_rules,
    buffers=lambda config: sinusoid_buffers(config, TABLE, "tgt_embed.1.pe", axis=1),
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
