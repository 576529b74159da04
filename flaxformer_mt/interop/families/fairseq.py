"""The weight map of `fairseq`.

The number of heads, the activation and the scale are read from a checkpoint's options, under "args"
or, if newer, under "cfg"; norms, positions and tying follow from the names of its tensors.

A bare state dict needs `num_heads`, and `activation` or `scale_embeddings` if they are not the
published defaults.
"""

import argparse
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps import family
from flaxformer_mt.interop.weight_maps.rules import Layers, TensorRule, embeddings, same

SOURCE = "encoder.embed_tokens.weight"
TARGET = "decoder.embed_tokens.weight"
OUTPUT = "decoder.output_projection.weight"
PAD_ID = 1  # In all fairseq dictionaries.

_FIELDS_OF_OPTIONS = {
    "encoder_attention_heads": "num_heads",
    "dropout": "dropout_rate",
    "attention_dropout": "attention_dropout_rate",
    "activation_dropout": "activation_dropout_rate",
}
_KINDS: dict[str, Any] = {
    "decoder_attention_heads": int,
    "relu_dropout": float,
    "encoder_normalize_before": bool,
    "decoder_normalize_before": bool,
    "no_token_positional_embeddings": bool,
    "no_scale_embedding": bool,
}
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


# Shared with MarianMT, whose layers are copies of fairseq's.

LAYER_ORDER = (
    "layers", "self_attn", "self_attn_layer_norm", "encoder_attn", "encoder_attn_layer_norm",
    "k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2", "final_layer_norm",
)  # fmt: skip
"""The part of `Family.order` within a stack."""


def layers(prefix: str) -> Layers:
    """Returns the names of the layers of a model whose stacks' names begin with `prefix`."""
    return Layers(
        encoder=f"{prefix}encoder.layers.{{layer}}.",
        decoder=f"{prefix}decoder.layers.{{layer}}.",
        modules={
            "self_attention": "self_attn",
            "self_attention_norm": "self_attn_layer_norm",
            "cross_attention": "encoder_attn",
            "cross_attention_norm": "encoder_attn_layer_norm",
            "feed_forward/hidden": "fc1",
            "feed_forward/output": "fc2",
            "feed_forward_norm": "final_layer_norm",
        },
        stack_norms={
            "embedding_norm": f"{prefix}{{stack}}.layernorm_embedding",
            "final_norm": f"{prefix}{{stack}}.layer_norm",
        },
        projections=(".q_proj", ".k_proj", ".v_proj", ".out_proj"),
    )


def check_equal_heads(settings: Mapping[str, Any]) -> None:
    """Raises UserError if encoder and decoder differ in the number of heads, which ours cannot."""
    encoder, decoder = (settings.get(f"{side}_attention_heads") for side in ("encoder", "decoder"))
    if None not in (encoder, decoder) and encoder != decoder:
        raise UserError(f"the encoder has {encoder} heads and the decoder {decoder}: unsupported")


# Specific to fairseq.

LAYERS = layers("")
_SUPPORTED = {"cross_self_attention": (False, None), "no_cross_attention": (False, None)}


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model's options by their older, flat names: {"encoder_attention_heads": 8}."""

    def to_dict(value: Any) -> Any:
        return vars(value) if isinstance(value, argparse.Namespace) else value

    options = to_dict(settings.get("model", settings))
    stacks = {side: to_dict(options.get(side)) for side in ("encoder", "decoder")}
    return dict(options) | {
        f"{side}_{name}": value
        for side, nested in stacks.items()
        if isinstance(nested, Mapping)
        for name, value in nested.items()
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    tensors, options = checkpoint.tensors, _options(checkpoint.settings)
    family.check_kinds(options, _KINDS)
    check_equal_heads(options)
    family.check_supported(options, _SUPPORTED)
    has_final_norm = checkpoint.has_any(".layer_norm.weight")
    pre_norm = options.get("encoder_normalize_before", has_final_norm)
    family.check_supported(options, {"decoder_normalize_before": (pre_norm,)})
    fields: dict[str, Any] = {
        **family.guess_tying(checkpoint, SOURCE, TARGET, OUTPUT if OUTPUT in tensors else None),
        "norm_position": "pre" if pre_norm else "post",
        "final_norm": has_final_norm,
        "embedding_norm": checkpoint.has_any(".layernorm_embedding.weight"),
    }
    if checkpoint.has_any(".embed_positions.weight"):
        tables = [(f"{stack}.embed_positions.weight", 0) for stack in ("encoder", "decoder")]
        fields["position_kind"] = "learned"
        fields["max_length"] = checkpoint.size(*tables) - PAD_ID - 1
    elif options.get("no_token_positional_embeddings"):
        fields["position_kind"] = "none"
    # The older name counts where the newer one is 0.
    rate = options.get("activation_dropout") or options.get("relu_dropout")
    fields |= family.fields_of_settings(
        {**options, "activation_dropout": rate} if rate else options, _FIELDS_OF_OPTIONS
    )
    fields |= family.activation_of_settings(options, "activation_fn", _ACTIVATIONS)
    if "no_scale_embedding" in options:
        fields["scale_embeddings"] = not options["no_scale_embedding"]
    return fields


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        *embeddings(config, SOURCE, TARGET, OUTPUT),
        same("source_positions/embedding", "encoder.embed_positions.weight"),
        same("target_positions/embedding", "decoder.embed_positions.weight"),
        *LAYERS.rules(config),
    ]


def _buffers(config: TransformerConfig) -> list[family.Buffer]:
    values = {"version": 3.0}
    if config.position_kind == "sinusoidal":
        # Without meaning: older versions read the dtype of their positions from it.
        values["embed_positions._float_tensor"] = 0.0
    return [
        family.Buffer(f"{stack}.{name}", functools.partial(_scalar, value), rows=1, exact=False)
        for stack in ("encoder", "decoder")
        for name, value in values.items()
    ]


def _scalar(value: float, rows: int) -> np.ndarray:
    return np.full(1, value)


def _omitted(config: TransformerConfig) -> frozenset[str]:
    output = {OUTPUT} if config.shares_target_and_output else set()
    return frozenset(output | {buffer.name for buffer in _buffers(config)})


FAMILY = family.Family(
    name="fairseq",
    sizes=LAYERS.sizes_of_model([SOURCE], [TARGET, OUTPUT]),
    also_reads="its options (args or cfg) and dictionaries",
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset({
        "norm_position", "final_norm", "embedding_norm", "activation", "position_kind",
        "scale_embeddings", "tie_embeddings", "pad_id",
    }),
    order=(
        "encoder", "decoder", "version", "embed_tokens", "embed_positions", "_float_tensor",
        "layernorm_embedding", *LAYER_ORDER, "layer_norm", "output_projection", "weight", "bias",
    ),
    omitted=_omitted,
    optimizer_key="last_optimizer_state",
)  # fmt: skip
