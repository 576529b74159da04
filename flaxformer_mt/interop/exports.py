"""Which formats a trained model could be exported to, told from its configuration alone."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import adaptation
from flaxformer_mt.interop.families import marian, marian_native
from flaxformer_mt.interop.weight_maps import validation

# The values that CTranslate2's specification can hold, of switches with others; ...
_CTRANSLATE2_VALUES = {
    "has_inputs": (True,),
    "has_targets": (True,),
    "embedding_bias": (False,),
    "decoder_kind": ("attention",),
    "norm_position": ("post", "pre"),
    "norm_kind": ("layer_norm", "unbiased_std", "rms"),
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "position_kind": ("sinusoidal", "learned", "rotary", "alibi", "t5_relative", "none"),
}
# ... and the other fields of the mathematics, of which it can hold all values. A field that is in
# none of these sets is new, and `ctranslate2_spec` does not know it.
_CTRANSLATE2_FIELDS = validation.FREE_FIELDS | frozenset({
    "norm_epsilon", "embedding_norm", "final_norm",
    "qkv_bias", "attention_output_bias", "feed_forward_bias", "output_bias",
    "feed_forward_gate", "scale_scores", "train_pad_embedding",
    "position_layout", "position_exponent", "position_base", "position_offset",
    "relative_position_buckets", "relative_position_max_distance", "relative_position_sharing",
    "num_kv_heads", "scale_embeddings", "scale_logits", "tie_embeddings", "zero_pad_embeddings",
    "mask_target_padding",
})  # fmt: skip


def exports(model: TransformerConfig, has_sentencepiece: bool = True) -> dict[str, str]:
    """Returns for each export format what prevents it, or "" if nothing does.

    The formats are those of `convert.WRITERS` that take a vocabulary learned here; such
    vocabularies are SentencePiece models, which `jax` needs. Weights that happen to be equal or
    zero could allow more.
    """
    vocabulary = "" if has_sentencepiece else "its vocabulary is not a SentencePiece model"
    return {
        "ctranslate2": ctranslate2_obstacle(model),
        "jax": vocabulary if model.has_inputs else "has_inputs=False",
        "marian": _marian_obstacle(model),
        "marian-native": marian_native_obstacle(model),
    }


def summary(model: TransformerConfig, has_sentencepiece: bool = True) -> str:
    """Names the formats that are possible, and those that are not: "jax; not marian"."""
    obstacles = exports(model, has_sentencepiece)
    possible = [name for name, obstacle in obstacles.items() if not obstacle]
    others = [name for name, obstacle in obstacles.items() if obstacle]
    names = ", ".join(possible) or "none"
    return f"{names}; not {', '.join(others)}" if others else names


def ctranslate2_obstacle(model: TransformerConfig, accepted: Collection[str] = ()) -> str:
    """Returns why CTranslate2's specification cannot hold a model, or "" if it can."""
    for field in dataclasses.fields(model):
        name, value = field.name, getattr(model, field.name)
        if name in _CTRANSLATE2_VALUES:
            if value not in _CTRANSLATE2_VALUES[name]:
                return f"{name}={value}"
        elif name not in _CTRANSLATE2_FIELDS and value != field.default:
            return f"{name}={value}"
    if not min(model.num_encoder_layers, model.num_decoder_layers):
        return "a stack without layers"
    layers = max(model.num_encoder_layers, model.num_decoder_layers)
    if (
        model.position_kind == "t5_relative"
        and model.relative_position_sharing == "layer"
        and layers > 1
    ):
        return "relative_position_sharing=layer: its layers share one bias"
    if model.norm_kind == "unbiased_std" and "norm_epsilon" not in accepted:
        return (
            "norm_kind=unbiased_std: results differ slightly, because epsilon is inside the root; "
            "to convert anyway, give --accept norm_epsilon"
        )
    return ""


def _marian_obstacle(model: TransformerConfig) -> str:
    if min(model.bos_id, model.pad_id) < 0:
        return "it needs a start token and a padding token"
    return _refusal(adaptation.check_adaptable, model, marian.FAMILY)


def marian_native_obstacle(model: TransformerConfig) -> str:
    """Returns why Marian's own decoder cannot run a model, or "" if it can."""
    for name, wanted in marian_native.TOKENS.items():
        if getattr(model, name) != wanted:
            return f"{name}={getattr(model, name)}, not {wanted}"
    return _refusal(validation.check_switches, marian_native.FAMILY, model)


def _refusal(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except UserError as error:
        return str(error)
    return ""
