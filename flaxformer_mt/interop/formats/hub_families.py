"""What the folders of each family of the Hugging Face Hub have of their own: `config.json`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families import fsmt, marian, mbart, t5, t5gemma
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.rules import STACKS

Settings = Mapping[str, Any]

_COMMON_DEFAULTS: Settings = {"is_encoder_decoder": True, "tie_word_embeddings": True}
_KINDS: Settings = {
    **dict.fromkeys(("model_type", "torch_dtype", "tokenizer_class"), str),
    "decoder_attention_heads": int,
    "scale_decoder_outputs": bool,
}
_FAIRSEQ_DEFAULTS: Settings = {
    **_COMMON_DEFAULTS,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "dropout": 0.1,
    "scale_embedding": False,
    "activation_function": "gelu",
}


@dataclasses.dataclass(frozen=True)
class HubFamily:
    """The folders of a family."""

    family: Family
    architectures: Mapping[str, str]
    """Class of the model for each `model_type`. The first one is written, unless `kind_of` says
    otherwise."""
    fields: dict[str, str]
    """Our names of the fields of `config.json` that the tensors do not tell."""
    sizes: dict[str, str]
    """Our names of the sizes in `config.json`, which follow from the tensors as well."""
    others: Callable[[TransformerConfig, Settings], dict[str, Any]]
    """The other fields for a configuration, given those of the published folder, or nothing. Values
    without a single counterpart in ours are those of the folder where they are equivalent."""
    defaults: Settings
    """Fields that `config.json` may omit, with the defaults of transformers' class."""
    new: Callable[[TransformerConfig], dict[str, Any]]
    """Fields of a `config.json` that no folder gave, for converters other than transformers."""
    kind_of: Callable[[TransformerConfig], str] | None = None
    """Returns the `model_type` of a configuration, one of several."""
    flat: Callable[[Settings], dict[str, Any]] = dict
    """Returns `config.json` without objects inside, with the names that the fields have here."""
    nested: Callable[[Settings], dict[str, Any]] = dict
    """The inverse of `flat`."""

    def model_type(self, model: TransformerConfig) -> str:
        """Returns the `model_type` of a configuration."""
        return self.kind_of(model) if self.kind_of else next(iter(self.architectures))

    @property
    def kinds(self) -> dict[str, Any]:
        """The types of the fields of `config.json` that are read."""
        model = TransformerConfig()
        ours = {theirs: getattr(model, ours) for theirs, ours in (self.fields | self.sizes).items()}
        known = {**self.new(model), **ours, **self.defaults}
        return {**_KINDS, **{name: type(value) for name, value in known.items()}}

    def settings(self, model: TransformerConfig, kept: Settings) -> dict[str, Any]:
        """Returns `config.json` for a configuration, given that of the published folder."""
        names = {**self.fields, **self.sizes}
        return {
            "is_encoder_decoder": True,
            **{theirs: getattr(model, ours) for theirs, ours in names.items()},
            **self.others(model, kept),
        }


def _activation(model: TransformerConfig, kept: Settings) -> str:
    given = kept.get("activation_function")
    if marian.ACTIVATIONS.get(str(given)) == model.activation:
        return str(given)
    return {ours: theirs for theirs, ours in marian.ACTIVATIONS.items()}[model.activation]


def _fairseq_like(model: TransformerConfig, kept: Settings) -> dict[str, Any]:
    return {
        "decoder_attention_heads": model.num_heads,
        "activation_function": _activation(model, kept),
        # transformers ties tables that a file has once, and never those that differ in it.
        "tie_word_embeddings": kept.get("tie_word_embeddings", model.tie_embeddings == "all"),
    }


def _marian(model: TransformerConfig, kept: Settings) -> dict[str, Any]:
    return _fairseq_like(model, kept) | {
        "tie_word_embeddings": model.shares_target_and_output,
        "share_encoder_decoder_embeddings": model.shares_source_and_target,
    }


def _t5(model: TransformerConfig, kept: Settings) -> dict[str, Any]:
    activation = kept.get("feed_forward_proj", "relu")
    is_gated = str(activation).startswith("gated-")
    if t5.ACTIVATIONS.get(activation) != model.activation or is_gated != model.feed_forward_gate:
        names = [name for name, ours in t5.ACTIVATIONS.items() if ours == model.activation]
        gated = [name for name in names if name.startswith("gated-") == model.feed_forward_gate]
        activation = gated[0]
    values = {"dropout_rate": model.dropout_rate, "feed_forward_proj": activation}
    if t5.scales_logits(kept, default=True) != model.scale_logits:
        # It only says whether logits are scaled.
        values["tie_word_embeddings"] = model.scale_logits
        if "scale_decoder_outputs" in kept:
            values["scale_decoder_outputs"] = model.scale_logits
    return values


def _t5gemma(model: TransformerConfig, kept: Settings) -> dict[str, Any]:
    values: dict[str, Any] = {"tie_word_embeddings": model.shares_target_and_output}
    for stack in STACKS:
        activation = kept.get(f"{stack}.hidden_activation")
        if t5gemma.ACTIVATIONS.get(str(activation)) != model.activation:
            names = {ours: theirs for theirs, ours in reversed(t5gemma.ACTIVATIONS.items())}
            activation = names[model.activation]
        bases = (name for name in t5gemma.BASES if f"{stack}.{name}" in kept)
        layers, window = getattr(model, f"num_{stack}_layers"), model.attention_window
        own = {
            "hidden_activation": activation,
            "query_pre_attn_scalar": model.key_width,
            next(bases, t5gemma.BASES[0]): model.position_base,
            "layer_types": t5gemma.layer_types(layers, window),
            "sliding_window": window or kept.get(f"{stack}.sliding_window", 4096),
        }
        values |= {f"{stack}.{name}": value for name, value in own.items()}
    return values


_T5GEMMA_SIZES = {
    "encoder.vocab_size": "source_vocab_size",
    "decoder.vocab_size": "target_vocab_size",
    "encoder.num_hidden_layers": "num_encoder_layers",
    "decoder.num_hidden_layers": "num_decoder_layers",
    **{
        f"{stack}.{theirs}": ours
        for stack in STACKS
        for theirs, ours in {
            "hidden_size": "d_model",
            "intermediate_size": "d_ff",
            "head_dim": "key_width",
            "num_key_value_heads": "kv_heads",
        }.items()
    },
}
_FAIRSEQ_SIZES = {
    "vocab_size": "source_vocab_size",
    "encoder_layers": "num_encoder_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_ffn_dim": "d_ff",
    "decoder_ffn_dim": "d_ff",
}
_T5_SIZES = {
    "vocab_size": "target_vocab_size",
    "d_model": "d_model",
    "d_kv": "key_width",
    "d_ff": "d_ff",
    "num_layers": "num_encoder_layers",
    "num_decoder_layers": "num_decoder_layers",
    "relative_attention_num_buckets": "relative_position_buckets",
}


def _new(model: TransformerConfig) -> dict[str, Any]:
    return {"forced_eos_token_id": model.eos_id, "dtype": model.param_dtype}


def _new_marian(model: TransformerConfig) -> dict[str, Any]:
    return _new(model) | {
        "normalize_before": False,
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "add_bias_logits": False,
        "add_final_layer_norm": False,
    }


_hub_family_like_fairseq = functools.partial(
    HubFamily,
    fields=marian.FIELDS_OF_SETTINGS,
    sizes=_FAIRSEQ_SIZES,
    others=_fairseq_like,
    defaults=_FAIRSEQ_DEFAULTS,
    new=_new,
)
_T5_DEFAULTS: Settings = {
    **_COMMON_DEFAULTS,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_hub_family_like_t5 = functools.partial(
    HubFamily,
    fields=t5.FIELDS_OF_SETTINGS,
    sizes=_T5_SIZES,
    others=_t5,
    defaults=_T5_DEFAULTS,
    new=lambda model: {"dtype": model.param_dtype},
)

HUB_FAMILIES = {
    found.family.name: found
    for found in (
        _hub_family_like_fairseq(
            family=marian.FAMILY,
            architectures={"marian": "MarianMTModel"},
            sizes={**_FAIRSEQ_SIZES, "decoder_vocab_size": "target_vocab_size"},
            others=_marian,
            defaults={**_FAIRSEQ_DEFAULTS, "share_encoder_decoder_embeddings": True},
            new=_new_marian,
        ),
        _hub_family_like_fairseq(
            family=mbart.FAMILY,
            architectures={
                "mbart": "MBartForConditionalGeneration",
                "bart": "BartForConditionalGeneration",
            },
            kind_of=lambda model: "mbart" if model.norm_position == "pre" else "bart",
        ),
        _hub_family_like_fairseq(
            family=mbart.M2M100,
            architectures={"m2m_100": "M2M100ForConditionalGeneration"},
            defaults={
                **_FAIRSEQ_DEFAULTS,
                "attention_dropout": 0.1,
                "scale_embedding": True,
                "activation_function": "relu",
            },
        ),
        _hub_family_like_fairseq(
            family=marian.PEGASUS,
            architectures={"pegasus": "PegasusForConditionalGeneration"},
            defaults={
                **_FAIRSEQ_DEFAULTS,
                "pad_token_id": 0,
                "eos_token_id": 1,
                "decoder_start_token_id": 0,
            },
        ),
        _hub_family_like_fairseq(
            family=fsmt.FAMILY,
            architectures={"fsmt": "FSMTForConditionalGeneration"},
            sizes={
                "src_vocab_size": "source_vocab_size",
                "tgt_vocab_size": "target_vocab_size",
                **{name: ours for name, ours in _FAIRSEQ_SIZES.items() if name != "vocab_size"},
            },
            defaults={
                **_FAIRSEQ_DEFAULTS,
                "tie_word_embeddings": False,
                "scale_embedding": True,
                "activation_function": "relu",
                "decoder_start_token_id": 2,
            },
        ),
        _hub_family_like_t5(
            family=t5.FAMILY,
            architectures={
                "t5": "T5ForConditionalGeneration",
                "mt5": "MT5ForConditionalGeneration",
            },
        ),
        _hub_family_like_t5(
            family=t5.UMT5,
            architectures={"umt5": "UMT5ForConditionalGeneration"},
            defaults={**_T5_DEFAULTS, "feed_forward_proj": "gated-gelu"},
        ),
        HubFamily(
            family=t5gemma.FAMILY,
            architectures={"t5gemma": "T5GemmaForConditionalGeneration"},
            fields=t5gemma.FIELDS_OF_SETTINGS,
            sizes=_T5GEMMA_SIZES,
            others=_t5gemma,
            defaults={**_COMMON_DEFAULTS, "pad_token_id": 0, "eos_token_id": 1},
            new=lambda model: {"dtype": model.param_dtype},
            flat=t5gemma.flat,
            nested=t5gemma.nested,
        ),
    )
}
"""By the name of the family."""
