"""The weight maps of `t5` (Hugging Face's T5, T5 1.1, mT5, Flan-T5) and `umt5` (UMT5).

The relative positions of a stack are in its first layer; UMT5 has others in every layer. Newer
models have a gated feed-forward network ("wi_0" and "wi_1") and an output of their own ("lm_head").

Both follow from the tensors. The other fields are read from the settings, which are those of the
model's `config.json`; without them give `num_heads`, and `activation`, `norm_epsilon`,
`relative_position_max_distance`, `pad_id` and `eos_id` if they are not the published defaults.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families.marian import IGNORED
from flaxformer_mt.interop.weight_maps import rules
from flaxformer_mt.interop.weight_maps.family import Family, check_kinds, fields_of_settings

SHARED = "shared.weight"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
BUCKETS = "{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
# Some published files have a table that nothing reads.
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

_DROPOUT_RATES = ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate")
FIELDS_OF_SETTINGS = {
    "num_heads": "num_heads",
    "layer_norm_epsilon": "norm_epsilon",
    "relative_attention_max_distance": "relative_position_max_distance",
    "pad_token_id": "pad_id",
    "eos_token_id": "eos_id",
    "decoder_start_token_id": "bos_id",
}
KINDS: dict[str, Any] = {
    "model_type": str,
    "dropout_rate": float,
    "feed_forward_proj": str,
    "tie_word_embeddings": bool,
    "scale_decoder_outputs": bool,
}
ACTIVATIONS = {
    "relu": "relu",
    "gated-relu": "relu",
    "gated-gelu": "gelu_tanh",
    "gated-gelu_new": "gelu_tanh",
    "gated-silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
}
"""Our activation for each `feed_forward_proj`."""


def _feed_forward(gated: bool, index: int) -> dict[str, str]:
    names = {"hidden": "wi_0", "gate": "wi_1"} if gated else {"hidden": "wi"}
    return {
        "feed_forward_norm": f"layer.{index}.layer_norm",
        **{
            f"feed_forward/{part}": f"layer.{index}.DenseReluDense.{name}"
            for part, name in (names | {"output": "wo"}).items()
        },
    }


def layers(gated: bool) -> rules.Layers:
    """Returns the names of the layers, with or without a gated feed-forward network."""
    return rules.Layers(
        encoder="encoder.block.{layer}.",
        decoder="decoder.block.{layer}.",
        modules={
            "self_attention": "layer.0.SelfAttention",
            "self_attention_norm": "layer.0.layer_norm",
            "cross_attention": "layer.1.EncDecAttention",
            "cross_attention_norm": "layer.1.layer_norm",
            **_feed_forward(gated, index=2),
        },
        encoder_modules=_feed_forward(gated, index=1),
        stack_norms={"final_norm": "{stack}.final_layer_norm"},
        projections=(".q", ".k", ".v", ".o"),
    )


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    own = layers(checkpoint.has_any(".wi_0.weight"))
    tables = (SHARED, SOURCE, TARGET)
    return {
        "head_dim": own.key_width(checkpoint, num_heads),
        "relative_position_buckets": checkpoint.size(
            *((BUCKETS.format(stack=stack, layer=0), 0) for stack in rules.STACKS)
        ),
        **own.sizes_of_model(tables, tables)(checkpoint, num_heads),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    settings = checkpoint.settings
    check_kinds(settings, KINDS)
    table = TARGET if TARGET in checkpoint.tensors else SHARED
    has_output = OUTPUT in checkpoint.tensors and not checkpoint.same(OUTPUT, table)
    fields: dict[str, Any] = {
        "feed_forward_gate": checkpoint.has_any(".wi_0.weight"),
        "tie_embeddings": "source_target" if has_output else "all",
        **fields_of_settings(settings, FIELDS_OF_SETTINGS),
    }
    if fields["feed_forward_gate"]:
        fields["activation"] = "gelu_tanh"
    if "dropout_rate" in settings:  # One rate for all sites.
        fields |= dict.fromkeys(_DROPOUT_RATES, settings["dropout_rate"])
    fields["scale_logits"] = scales_logits(settings, default=not has_output)
    return fields | _activation(settings, gated=fields["feed_forward_gate"])


def scales_logits(settings: Mapping[str, Any], default: bool) -> bool:
    """Returns whether logits are scaled: never in mT5; in T5, settings tell it in two ways."""
    if settings.get("model_type") == "mt5":
        return False
    tied = settings.get("tie_word_embeddings", default)
    return bool(settings.get("scale_decoder_outputs", tied))


def _activation(settings: Mapping[str, Any], gated: bool) -> dict[str, str]:
    kind = settings.get("feed_forward_proj")
    if kind is None:
        return {}
    if kind not in ACTIVATIONS or gated != str(kind).startswith("gated-"):
        raise UserError(
            f"the model cannot have feed_forward_proj={kind}, only {[*ACTIVATIONS]}, of which "
            f"{'those that are gated' if gated else 'the others'} fit its tensors"
        )
    return {"activation": ACTIVATIONS[kind]}


def _rules(config: TransformerConfig, layout: str) -> list[rules.TensorRule]:
    tables = [SHARED, SOURCE, TARGET]
    if config.shares_target_and_output:
        tables.append(OUTPUT)
    positions = {
        stack: rules.same(f"{stack}/position_bias/embedding", BUCKETS.format(stack=stack, layer=0))
        for stack in rules.STACKS
    }
    of_layers = [
        rules.same(
            f"{stack}/layers/position_bias/embedding",
            BUCKETS.format(stack=stack, layer="{layer}"),
        )
        for stack in rules.STACKS
    ]
    if layout == _UNREAD:
        positions["decoder"] = rules.unused(positions["decoder"], _UNREAD)
    return [
        rules.tied("target_embedding/embedding", *tables),
        rules.transposed("output/kernel", OUTPUT),
        *positions.values(),
        *of_layers,
        *layers(config.feed_forward_gate).rules(config),
    ]


def _omitted(config: TransformerConfig) -> frozenset[str]:
    output = {OUTPUT} if config.shares_target_and_output else set()
    return frozenset({SHARED, SOURCE, TARGET} | output)


def _layout(names: Collection[str]) -> str:
    return _UNREAD if _UNREAD in names else ""


FAMILY = Family(
    name="t5",
    sizes=_sizes,
    also_reads="config.json and a vocabulary",
    guess=_guess,
    rules=_rules,
    open_switches=frozenset({
        "tie_embeddings", "activation", "feed_forward_gate", "norm_epsilon", "scale_logits",
        "relative_position_buckets", "relative_position_max_distance",
    }),
    head_widths="equal",
    order=(
        "shared", "encoder", "decoder", "embed_tokens", "block", "layer", "SelfAttention",
        "EncDecAttention", "q", "k", "v", "o", "relative_attention_bias", "DenseReluDense", "wi",
        "wi_0", "wi_1", "wo", "layer_norm", "final_layer_norm", "lm_head", "weight",
    ),
    omitted=_omitted,
    ignored=IGNORED,
    layout_of_tensors=_layout,
    layout_of_params=lambda arrays, carried: _layout(carried),
)  # fmt: skip
UMT5 = dataclasses.replace(FAMILY, name="umt5")
