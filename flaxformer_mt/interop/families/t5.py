"""The weight map of `t5`: Hugging Face's T5, T5 1.1, mT5 and Flan-T5.

The relative positions of a stack are in its first layer. Newer models have a gated feed-forward
network ("wi_0" and "wi_1") and an output of their own ("lm_head").

Both follow from the tensors. The other fields are read from the settings, which are those of the
model's `config.json`; without them give `num_heads`, and `activation`, `norm_epsilon`,
`relative_position_max_distance`, `pad_id` and `eos_id` if they are not the published defaults.
"""

from collections.abc import Collection, Mapping
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.family import (
    Family,
    fields_of_settings,
    head_width,
)
from flaxformer_mt.interop.weight_maps.rules import (
    TensorRule,
    linear,
    same,
    tied,
    transposed,
    unused,
)

SHARED = "shared.weight"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
BUCKETS = "{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
# Some published files have a table that nothing reads.
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_LAYER = "{stack}.block.{{layer}}.layer.{index}"

_DROPOUT_RATES = ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate")
_FIELDS_OF_SETTINGS = {
    "num_heads": "num_heads",
    "layer_norm_epsilon": "norm_epsilon",
    "relative_attention_max_distance": "relative_position_max_distance",
    "pad_token_id": "pad_id",
    "eos_token_id": "eos_id",
    "decoder_start_token_id": "bos_id",
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


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    layer = _LAYER.format(stack="decoder", index=2).format(layer=0) + ".DenseReluDense"
    hidden = "wi_0" if checkpoint.has_any(".wi_0.weight") else "wi"
    first, last = f"{layer}.{hidden}.weight", f"{layer}.wo.weight"
    table = [(name, 0) for name in (SHARED, SOURCE, TARGET) if name in checkpoint.tensors]
    rows = checkpoint.size(*table or [(SHARED, 0)])
    query = _LAYER.format(stack="decoder", index=0).format(layer=0) + ".SelfAttention.q.weight"
    return {
        "source_vocab_size": rows,
        "target_vocab_size": rows,
        "d_model": checkpoint.size((first, 1), (last, 0), (query, 1)),
        "d_ff": checkpoint.size((first, 0), (last, 1)),
        "head_dim": head_width(checkpoint.size((query, 0)), num_heads),
        "num_encoder_layers": checkpoint.num_layers("encoder.block."),
        "num_decoder_layers": checkpoint.num_layers("decoder.block."),
        "relative_position_buckets": checkpoint.size(
            *((BUCKETS.format(stack=stack), 0) for stack in ("encoder", "decoder"))
        ),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    settings = checkpoint.settings
    table = TARGET if TARGET in checkpoint.tensors else SHARED
    has_output = OUTPUT in checkpoint.tensors and not checkpoint.same(OUTPUT, table)
    fields: dict[str, Any] = {
        "feed_forward_gate": checkpoint.has_any(".wi_0.weight"),
        "tie_embeddings": "source_target" if has_output else "all",
        **fields_of_settings(settings, _FIELDS_OF_SETTINGS),
    }
    if fields["feed_forward_gate"]:
        fields["activation"] = "gelu_tanh"
    if "dropout_rate" in settings:  # One rate for all sites.
        fields |= dict.fromkeys(_DROPOUT_RATES, settings["dropout_rate"])
    fields["scale_logits"] = scales_logits(settings, default=not has_output)
    return fields | _feed_forward(settings, gated=fields["feed_forward_gate"])


def scales_logits(settings: Mapping[str, Any], default: bool) -> bool:
    """Returns whether logits are scaled: never in mT5; in T5, settings tell it in two ways."""
    if settings.get("model_type") == "mt5":
        return False
    tied = settings.get("tie_word_embeddings", default)
    return bool(settings.get("scale_decoder_outputs", tied))


def _feed_forward(settings: Mapping[str, Any], gated: bool) -> dict[str, str]:
    kind = settings.get("feed_forward_proj")
    if kind is None:
        return {}
    if kind not in ACTIVATIONS or gated != str(kind).startswith("gated-"):
        raise UserError(
            f"the model cannot have feed_forward_proj={kind}, only {[*ACTIVATIONS]}, of which "
            f"{'those that are gated' if gated else 'the others'} fit its tensors"
        )
    return {"activation": ACTIVATIONS[kind]}


def _attention(ours: str, theirs: str, name: str) -> list[TensorRule]:
    letters = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return [
        *(
            rule
            for part, letter in letters.items()
            for rule in linear(f"{ours}/{part}", f"{theirs}.{name}.{letter}", bias=False)
        ),
        same(f"{ours}_norm/scale", f"{theirs}.layer_norm.weight"),
    ]


def _feed_forward_rules(config: TransformerConfig, ours: str, theirs: str) -> list[TensorRule]:
    names = {"hidden": "wi", "output": "wo"}
    if config.feed_forward_gate:
        names = {"hidden": "wi_0", "gate": "wi_1", "output": "wo"}
    return [
        *(
            rule
            for part, name in names.items()
            for rule in linear(f"{ours}/{part}", f"{theirs}.DenseReluDense.{name}", bias=False)
        ),
        same(f"{ours}_norm/scale", f"{theirs}.layer_norm.weight"),
    ]


def _stack_rules(config: TransformerConfig, stack: str, feed_forward: int) -> list[TensorRule]:
    layers = f"{stack}/layers"

    def layer(index: int) -> str:
        return _LAYER.format(stack=stack, index=index)

    rules = [
        *_attention(f"{layers}/self_attention", layer(0), "SelfAttention"),
        *_feed_forward_rules(config, f"{layers}/feed_forward", layer(feed_forward)),
        same(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight"),
    ]
    if stack == "decoder":
        rules += _attention(f"{layers}/cross_attention", layer(1), "EncDecAttention")
    return rules


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    tables = [SHARED, SOURCE, TARGET]
    output = []
    if config.shares_target_and_output:
        tables.append(OUTPUT)
    else:
        output = [transposed("output/kernel", OUTPUT)]
    positions = {
        stack: same(f"{stack}/position_bias/embedding", BUCKETS.format(stack=stack))
        for stack in ("encoder", "decoder")
    }
    if layout == _UNREAD:
        positions["decoder"] = unused(positions["decoder"], _UNREAD)
    return [
        tied("target_embedding/embedding", *tables),
        *output,
        *positions.values(),
        *_stack_rules(config, "encoder", feed_forward=1),
        *_stack_rules(config, "decoder", feed_forward=2),
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
    open_switches=frozenset(
        {
            "tie_embeddings",
            "activation",
            "feed_forward_gate",
            "norm_epsilon",
            "scale_logits",
            "relative_position_buckets",
            "relative_position_max_distance",
        }
    ),
    head_widths="equal",
    order=(
        "shared", "encoder", "decoder", "embed_tokens", "block", "layer", "SelfAttention",
        "EncDecAttention", "q", "k", "v", "o", "relative_attention_bias", "DenseReluDense", "wi",
        "wi_0", "wi_1", "wo", "layer_norm", "final_layer_norm", "lm_head", "weight",
    ),
    omitted=_omitted,
    layout_of_tensors=_layout,
    layout_of_params=lambda arrays, carried: _layout(carried),
)  # fmt: skip
