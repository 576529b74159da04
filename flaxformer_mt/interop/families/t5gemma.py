"""The weight map of `t5gemma`: Hugging Face's T5Gemma, Gemma 2 with an encoder.

The output is tied to the target embedding if the file has it once. The other fields are read from
the settings, which are those of the model's `config.json`; without them give `num_heads`, and
`activation`, `attention_window`, `score_cap`, `logit_cap`, `position_base`, `norm_epsilon`,
`pad_id`, `bos_id` and `eos_id` if they are not those of the published models.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps import family, rules
from flaxformer_mt.interop.weight_maps.rules import STACKS

SOURCE, TARGET = (f"model.{stack}.embed_tokens.weight" for stack in STACKS)
OUTPUT = "lm_head.out_proj.weight"

_ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "cross_attn"}
_NORMS = {**_ATTENTIONS, "feed_forward": "feedforward"}
LAYERS = rules.Layers(
    encoder="model.encoder.layers.{layer}.",
    decoder="model.decoder.layers.{layer}.",
    modules={
        **_ATTENTIONS,
        **{f"{ours}_norm": f"pre_{theirs}_layernorm" for ours, theirs in _NORMS.items()},
        **{f"{ours}_output_norm": f"post_{theirs}_layernorm" for ours, theirs in _NORMS.items()},
        "feed_forward/hidden": "mlp.gate_proj",
        "feed_forward/gate": "mlp.up_proj",
        "feed_forward/output": "mlp.down_proj",
    },
    stack_norms={"final_norm": "model.{stack}.norm"},
    projections=(".q_proj", ".k_proj", ".v_proj", ".o_proj"),
)

ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "relu": "relu",
}
BASES = ("rope_parameters.rope_theta", "rope_theta")
"""Names of the base of the rotations, that of transformers 5 first."""
_OF_STACKS = {
    "num_attention_heads": "num_heads",
    "rms_norm_eps": "norm_epsilon",
    "max_position_embeddings": "max_length",
    "attn_logit_softcapping": "score_cap",
    "final_logit_softcapping": "logit_cap",
}
FIELDS_OF_SETTINGS = {
    **{f"{stack}.{theirs}": ours for stack in STACKS for theirs, ours in _OF_STACKS.items()},
    "dropout_rate": "dropout_rate",
    "attention_dropout": "attention_dropout_rate",
    "pad_token_id": "pad_id",
    "eos_token_id": "eos_id",
    "decoder.bos_token_id": "bos_id",
    "decoder_start_token_id": "bos_id",
}
# Settings of which the model has one for both stacks.
_SHARED = (
    *_OF_STACKS, *BASES, "hidden_size", "intermediate_size", "num_key_value_heads", "head_dim",
    "hidden_activation", "query_pre_attn_scalar", "attention_bias", "rope_parameters.rope_type",
)  # fmt: skip
_CAP = "softcapping"


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with those of the stacks beside the others, "encoder.head_dim".

    A cap of null, which is none, becomes 0.
    """

    def items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value and name.startswith(STACKS):
            for inner, found in value.items():
                yield from items(f"{name}.{inner}", found)
        else:
            yield name, 0.0 if value is None and name.endswith(_CAP) else value

    return {key: found for name, value in settings.items() for key, found in items(name, value)}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that `flat` made these of."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        *outer, last = name.split(".") if name.startswith(STACKS) else [name]
        inside = found
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[last] = None if name.endswith(_CAP) and not value else value
    return found


def layer_types(layers: int, window: int) -> list[str]:
    """Returns the kinds of the attention of a stack's layers, as `config.json` names them."""
    kinds = ("sliding_attention", "full_attention")
    return [kinds[layer % 2 if window else 1] for layer in range(layers)]


def _window(settings: Mapping[str, Any], stack: str) -> Any:
    types, window = (settings.get(f"{stack}.{name}") for name in ("layer_types", "sliding_window"))
    if types is None or types == layer_types(len(types), window=1):
        return window
    if types == layer_types(len(types), window=0):
        return 0
    raise UserError(
        f"the model cannot have {stack}.layer_types: {types}, only sliding_attention and "
        "full_attention in turn, or full_attention in all layers"
    )


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    is_tied = OUTPUT not in checkpoint.tensors or checkpoint.same(OUTPUT, TARGET)
    fields: dict[str, Any] = {"tie_embeddings": "target_output" if is_tied else "none"}
    if not checkpoint.settings:
        return fields
    settings = flat(checkpoint.settings)
    both = {name: [settings.get(f"{stack}.{name}") for stack in STACKS] for name in _SHARED}
    both["layer_types and sliding_window"] = [_window(settings, stack) for stack in STACKS]
    for name, (encoder, decoder) in both.items():
        if encoder != decoder:
            raise UserError(
                f"the model cannot have {name} of {encoder} in its encoder and {decoder} in its "
                "decoder, only one for both"
            )
    supported = {
        "decoder.query_pre_attn_scalar": (settings["decoder.head_dim"],),
        "decoder.attention_bias": (False,),
        "decoder.rope_parameters.rope_type": ("default",),
    }
    family.check_supported(settings, supported)
    bases = {f"decoder.{name}": "position_base" for name in BASES}
    return {
        **fields,
        **family.fields_of_settings(settings, FIELDS_OF_SETTINGS | bases),
        **family.activation_of_settings(settings, "decoder.hidden_activation", ACTIVATIONS),
        "attention_window": _window(settings, "decoder"),
    }


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    own = "model.decoder.layers.0.self_attn"
    queries = checkpoint.size((f"{own}.q_proj.weight", 0), (f"{own}.o_proj.weight", 1))
    keys = checkpoint.size((f"{own}.k_proj.weight", 0), (f"{own}.v_proj.weight", 0))
    width = rules.head_width(queries, num_heads)
    if keys % width and num_heads > 1:
        raise UserError(f"num_heads={num_heads} is not the number of heads: {keys} rows of keys")
    groups = keys // width
    return {
        **LAYERS.sizes_of_model([SOURCE], [TARGET, OUTPUT])(checkpoint, num_heads),
        "head_dim": width,
        "num_kv_heads": groups if groups < num_heads else 0,
    }


def _rules(config: TransformerConfig, layout: str) -> list[rules.TensorRule]:
    return [*rules.embeddings(config, SOURCE, TARGET, OUTPUT), *LAYERS.rules(config)]


FAMILY = family.Family(
    name="t5gemma",
    sizes=_sizes,
    also_reads="config.json and a vocabulary",
    guess=_guess,
    rules=_rules,
    open_switches=frozenset({
        "tie_embeddings", "activation", "norm_epsilon", "num_kv_heads", "attention_window",
        "score_cap", "logit_cap", "position_base",
    }),
    head_widths="equal",
    order=(
        "model", "encoder", "decoder", "embed_tokens", "norm", "layers", "self_attn", "q_proj",
        "k_proj", "v_proj", "o_proj", "pre_self_attn_layernorm", "post_self_attn_layernorm", "mlp",
        "gate_proj", "up_proj", "down_proj", "pre_feedforward_layernorm",
        "post_feedforward_layernorm", "cross_attn", "pre_cross_attn_layernorm",
        "post_cross_attn_layernorm", "lm_head", "out_proj", "weight",
    ),
    omitted=lambda config: frozenset({OUTPUT} if config.shares_target_and_output else ()),
    base="model.",
)  # fmt: skip
