"""The weight map of `opennmt`: OpenNMT-py 3.

A checkpoint has the state dict in two parts, "model" and "generator", and its options under "opt",
from which the number of heads, the activation, the epsilon and the positions of self-attention are
read. Biases, tying and other positions follow from its tensors.

A bare state dict needs `num_heads`, and `activation`, `norm_epsilon`, `position_kind` (rotary,
alibi), `position_layout` (rotary) or `relative_position_max_distance` if they are not the published
defaults. Each layer has its own table of relative positions. A table that layers share is written
to every layer, and read back as shared with `relative_position_sharing="stack"`.
"""

from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps import family
from flaxformer_mt.interop.weight_maps.rules import Layers, TensorRule, embeddings, same, tied

SOURCE = "encoder.embeddings.make_embedding.emb_luts.0.weight"
TARGET = "decoder.embeddings.make_embedding.emb_luts.0.weight"
OUTPUT = "generator.weight"
TABLE = "encoder.embeddings.make_embedding.pe.pe"
BUCKETS = "self_attn.relative_attention_bias.weight"
LAYERS = Layers(
    encoder="encoder.transformer.{layer}.",
    decoder="decoder.transformer_layers.{layer}.",
    modules={
        "self_attention": "self_attn",
        "self_attention_norm": "layer_norm_1",
        "cross_attention": "context_attn",
        "cross_attention_norm": "layer_norm_2",
        "feed_forward/hidden": "feed_forward.w_1",
        "feed_forward/output": "feed_forward.w_2",
        "feed_forward_norm": "feed_forward.layer_norm",
    },
    encoder_modules={"self_attention_norm": "layer_norm"},
    stack_norms={"final_norm": "{stack}.layer_norm"},
    projections=(".linear_query", ".linear_keys", ".linear_values", ".final_linear"),
)

_FIELDS_OF_OPTIONS = {"heads": "num_heads", "norm_eps": "norm_epsilon"}
_SUPPORTED = {"parallel_residual": (False, None), "sliding_window": (0, None)}
_DROPOUT_OPTIONS = {"dropout": "dropout_rate", "attention_dropout": "attention_dropout_rate"}
_KINDS: dict[str, Any] = {
    "max_relative_positions": int,
    "rotary_dim": int,
    "rotary_interleave": bool,
    "rotary_theta": float,
}


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    options = checkpoint.settings
    family.check_kinds(options, _KINDS)
    family.check_supported(options, _SUPPORTED)
    fields: dict[str, Any] = {
        **family.guess_tying(checkpoint, SOURCE, TARGET, OUTPUT),
        "qkv_bias": checkpoint.has_any(".linear_query.bias"),
        "attention_output_bias": checkpoint.has_any(".final_linear.bias"),
        "feed_forward_bias": checkpoint.has_any(".w_1.bias"),
    }
    if not checkpoint.has_any(".pe.pe"):
        fields |= _attention_positions(checkpoint)
    elif options.get("max_relative_positions"):
        raise UserError(
            "the model cannot have sinusoids and max_relative_positions="
            f"{options['max_relative_positions']}"
        )
    elif checkpoint.size((TABLE, 0)) > 1 and checkpoint.size((TABLE, 2)) > 2:
        # Position 1, column 1 is the cosine of the first frequency, or the sine of the second.
        second = checkpoint.tensors[TABLE][1, 0, 1]
        is_cosine = np.isclose(second, np.cos(1.0), rtol=0, atol=1e-5)
        fields["position_layout"] = "interleaved" if is_cosine else "concatenated"
    fields |= family.fields_of_settings(options, _FIELDS_OF_OPTIONS)
    fields |= family.activation_of_settings(
        options, "pos_ffn_activation_fn", {"relu": "relu", "gelu": "gelu"}
    )
    # A rate may be a list with one value per stage of training.
    return fields | {
        name: rate[-1] if isinstance(rate, list) else rate
        for name, rate in family.fields_of_settings(options, _DROPOUT_OPTIONS).items()
    }


def _attention_positions(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    options = checkpoint.settings
    distance = options.get("max_relative_positions", 0)
    if checkpoint.has_any(BUCKETS):
        fields: dict[str, Any] = {
            "position_kind": "t5_relative",
            "relative_position_buckets": checkpoint.size(
                (LAYERS.decoder.format(layer=0) + BUCKETS, 0)
            ),
        }
        return fields | ({"relative_position_max_distance": distance} if distance > 0 else {})
    if distance == -2:
        return {"position_kind": "alibi"}
    if distance != -1:
        return {"position_kind": "none"}
    if options.get("rotary_dim"):
        raise UserError(f"the model rotates all features, not rotary_dim={options['rotary_dim']}")
    interleaved = options.get("rotary_interleave", True)
    return {
        "position_kind": "rotary",
        "position_layout": "interleaved" if interleaved else "concatenated",
        "position_base": options.get("rotary_theta", 1e4),
    }


def _position_biases(config: TransformerConfig) -> list[TensorRule]:
    stacks = {
        "encoder": (LAYERS.encoder + BUCKETS, config.num_encoder_layers),
        "decoder": (LAYERS.decoder + BUCKETS, config.num_decoder_layers),
    }
    return [
        rule
        for stack, (theirs, num_layers) in stacks.items()
        for rule in (
            same(f"{stack}/layers/position_bias/embedding", theirs),
            tied(
                f"{stack}/position_bias/embedding",
                *(theirs.format(layer=layer) for layer in range(num_layers)),
            ),
        )
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        *_position_biases(config),
        *embeddings(config, SOURCE, TARGET, OUTPUT),
        same("output/bias", "generator.bias"),
        *LAYERS.rules(config),
    ]


def _buffers(config: TransformerConfig) -> list[family.Buffer]:
    if config.position_kind != "sinusoidal":
        return []
    return family.sinusoid_buffers(config, TABLE, TABLE.replace("encoder", "decoder"))


FAMILY = family.Family(
    name="opennmt",
    sizes=LAYERS.sizes_of_model([SOURCE], [TARGET, OUTPUT, "generator.bias"]),
    also_reads="its options (opt) and vocabularies (vocab)",
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset({
        "norm_epsilon", "qkv_bias", "attention_output_bias", "feed_forward_bias", "activation",
        "position_kind", "position_layout", "relative_position_buckets",
        "relative_position_max_distance", "relative_position_sharing", "tie_embeddings",
    }),
    order=(
        "encoder", "decoder", "generator", "embeddings", "make_embedding", "emb_luts", "pe",
        "transformer", "self_attn", "linear_keys", "linear_values", "linear_query", "final_linear",
        "relative_attention_bias", "feed_forward", "w_1", "w_2", "layer_norm", "transformer_layers",
        "layer_norm_1", "context_attn", "layer_norm_2", "weight", "bias",
    ),
    parts=("generator",),
    optimizer_key="optim",
)  # fmt: skip
