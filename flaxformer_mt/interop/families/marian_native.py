"""The weight map and the options of models in Marian's own format.

Names and options are those of Marian, src/models/transformer.h: layer numbers in names start from
1, and biases have the shape [1, D]. Decoding starts from a zero vector. There is no padding token.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps import family
from flaxformer_mt.interop.weight_maps.rules import Layers, TensorRule, embeddings, row, same
from flaxformer_mt.model.transformer import ZERO_VECTOR
from flaxformer_mt.presets import check_choice

NAME = "marian-native"

SHARED = "Wemb"
SOURCE, TARGET = "encoder_Wemb", "decoder_Wemb"
OUTPUT = "decoder_ff_logit_out_Wt"
# Older models store it transposed.
LEGACY_OUTPUT = "decoder_ff_logit_out_W"
BIAS = "decoder_ff_logit_out_b"

NO_TOKEN = -1
"""The padding id of a vocabulary without padding token."""
END = 0
"""The id of `</s>` in all of Marian's vocabularies."""
TOKENS = {"pad_id": NO_TOKEN, "bos_id": ZERO_VECTOR, "eos_id": END}
"""The special tokens of all models."""

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention", "rnn"),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-no-projection": (False,),
    "transformer-pool": (False,),
    "transformer-rnn-projection": (False,),
    "transformer-train-position-embeddings": (False,),
    "transformer-train-positions": (False,),
    "transformer-disable-position-embeddings": (False,),
    "transformer-tied-layers": ([],),
    "lemma-dim-emb": (0,),
    "right-left": (False,),
    "ulr": (False,),
}
"""The supported values of options, the default first. Options not listed here do not matter."""
_RECURRENT = {"dec-cell": ("ssru",), "layer-normalization": (False,)}
"""The same for recurrent decoders only."""
_NORMS = {("", "an"): "post", ("n", "a"): "pre"}
"""Operations before and after a sub-layer (n: normalize, a: add the residual): norm position."""
# Marian's gelu is x * sigmoid(1.702 x), which our model does not have.
_ACTIVATIONS = {"relu": "relu", "swish": "silu"}
_FIELDS_OF_OPTIONS = {
    "transformer-heads": "num_heads",
    "dim-emb": "d_model",
    "transformer-dim-ffn": "d_ff",
    "enc-depth": "num_encoder_layers",
    "dec-depth": "num_decoder_layers",
}
_REQUIRED: dict[str, Any] = dict.fromkeys(_FIELDS_OF_OPTIONS, int)
_REQUIRED["dim-vocabs"] = tuple[int, int]
_OPTIONAL = ("tied-embeddings", "tied-embeddings-all", "tied-embeddings-src", "output-omit-bias")


# In the names below, "*" stands for "W" or "b", and in those of norms for "scale" or "bias".


def _linear(ours: str, theirs: str) -> list[TensorRule]:
    return [
        same(f"{ours}/kernel", theirs.replace("*", "W")),
        row(f"{ours}/bias", theirs.replace("*", "b")),
    ]


def _norm(ours: str, theirs: str) -> list[TensorRule]:
    return [row(f"{ours}/{part}", theirs.replace("*", part)) for part in ("scale", "bias")]


def _layers(suffix: str) -> Layers:
    return Layers(
        encoder="encoder_l{number}_",
        decoder="decoder_l{number}_",
        modules={
            "self_attention": "self",
            "self_attention_norm": f"self_Wo_ln_*{suffix}",
            "cross_attention": "context",
            "cross_attention_norm": f"context_Wo_ln_*{suffix}",
            "feed_forward/hidden": "ffn_*1",
            "feed_forward/output": "ffn_*2",
            "feed_forward_norm": f"ffn_ffn_ln_*{suffix}",
        },
        stack_norms={"embedding_norm": "{stack}_emb_ln_*_pre", "final_norm": "{stack}_top_ln_*"},
        projections=("_*q", "_*k", "_*v", "_*o"),
        linear=_linear,
        norm=_norm,
    )


def _recurrence(suffix: str) -> list[TensorRule]:
    ours, theirs = "decoder/layers/recurrence", "decoder_l{number}_rnn"
    normalized = theirs if suffix else f"{theirs}_ffn"
    return [
        same(f"{ours}/candidate/kernel", f"{theirs}_W"),
        *_linear(f"{ours}/forget", f"{theirs}_*f"),
        *_norm(f"{ours}_norm", f"{normalized}_ln_*{suffix}"),
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    # Marian marks pre-norms in their names.
    suffix = "_pre" if config.norm_position == "pre" else ""
    return [
        *_embeddings(config, layout),
        row("output/bias", BIAS),
        *_layers(suffix).rules(config),
        *_recurrence(suffix),
    ]


def _embeddings(config: TransformerConfig, layout: str) -> list[TensorRule]:
    source, target = (None, SHARED) if config.shares_source_and_target else (SOURCE, TARGET)
    if config.shares_target_and_output:
        return embeddings(config, source, target, None)
    if layout != LEGACY_OUTPUT:
        return embeddings(config, source, target, OUTPUT)
    return [*embeddings(config, source, target, None), same("output/kernel", LEGACY_OUTPUT)]


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    hidden, narrow = "encoder_l1_ffn_W1", "encoder_l1_ffn_W2"
    return {
        "source_vocab_size": checkpoint.size((SHARED, 0), (SOURCE, 0)),
        "target_vocab_size": checkpoint.size((SHARED, 0), (TARGET, 0)),
        "d_model": checkpoint.size((SHARED, 1), (SOURCE, 1), (hidden, 0), (narrow, 1)),
        "d_ff": checkpoint.size((hidden, 1), ("encoder_l1_ffn_b1", 1), (narrow, 0)),
        "num_encoder_layers": checkpoint.num_layers("encoder_l", "_", first=1),
        "num_decoder_layers": checkpoint.num_layers("decoder_l", "_", first=1),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    options = checkpoint.settings
    family.check_kinds(options, _REQUIRED | dict.fromkeys(_OPTIONAL, bool))
    for name in _REQUIRED:
        if options.get(name) is None:
            raise UserError(f"its options have no {name}")
    family.check_supported(options, _SUPPORTED, _spelled)
    is_recurrent = options.get("transformer-decoder-autoreg") == "rnn"
    if is_recurrent:
        family.check_supported(options, _RECURRENT, _spelled)
    source_vocabulary, target_vocabulary = options["dim-vocabs"]
    ties_output, ties_all, ties_source, omits_bias = (bool(options.get(name)) for name in _OPTIONAL)
    return {
        **family.fields_of_settings(options, _FIELDS_OF_OPTIONS),
        **family.activation_of_settings(options, "transformer-ffn-activation", _ACTIVATIONS),
        "source_vocab_size": source_vocabulary,
        "target_vocab_size": target_vocabulary,
        "decoder_kind": "ssru" if is_recurrent else "attention",
        "norm_position": _norm_position(options),
        "embedding_norm": _has_norm(options, "transformer-postprocess-emb"),
        "final_norm": _has_norm(options, "transformer-postprocess-top"),
        "output_bias": not omits_bias,
        "tie_embeddings": family.TYINGS[ties_all or ties_source, ties_all or ties_output],
    }


def _spelled(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _steps(options: Mapping[str, Any], name: str) -> str:
    return str(options.get(name, "")).replace("d", "")


def _norm_position(options: Mapping[str, Any]) -> str:
    names = ("transformer-preprocess", "transformer-postprocess")
    before, after = (_steps(options, name) for name in names)
    if (before, after) not in _NORMS:
        given = " and ".join(f"{name}: {_spelled(options.get(name, ''))}" for name in names)
        raise UserError(f"the model cannot have {given}, only dan after or n before and da after")
    return _NORMS[before, after]


def _has_norm(options: Mapping[str, Any], name: str) -> bool:
    if _steps(options, name) not in ("", "n"):
        raise UserError(f"the model cannot have {name}: {_spelled(options[name])}, only d and n")
    return _steps(options, name) == "n"


def options(config: TransformerConfig) -> dict[str, Any]:
    """Returns Marian's options for a configuration."""
    letters = {position: steps for steps, position in _NORMS.items()}
    before, after = letters[config.norm_position]
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    return {
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS_OF_OPTIONS.items()},
        **{name: values[0] for name, values in (_SUPPORTED | _RECURRENT).items()},
        "dim-vocabs": [config.source_vocab_size, config.target_vocab_size],
        "output-omit-bias": not config.output_bias,
        "tied-embeddings": config.tie_embeddings == "target_output",
        "tied-embeddings-all": config.tie_embeddings == "all",
        "tied-embeddings-src": config.tie_embeddings == "source_target",
        "transformer-decoder-autoreg": _SUPPORTED["transformer-decoder-autoreg"][
            config.decoder_kind == "ssru"
        ],
        "transformer-ffn-activation": names[config.activation],
        "transformer-postprocess": after.replace("a", "da"),
        "transformer-postprocess-emb": "dn" if config.embedding_norm else "d",
        "transformer-postprocess-top": "n" if config.final_norm else "",
        "transformer-preprocess": before,
    }


def _preset(**overrides: Any) -> TransformerConfig:
    check_choice(NAME, overrides, "activation", ("silu", "relu"))
    check_choice(NAME, overrides, "norm_position", ("post", "pre"))
    values: dict[str, Any] = {
        "norm_epsilon": 1e-6,
        "activation": "silu",
        "position_layout": "concatenated",
        "position_exponent": "tensor2tensor",
        "mask_target_padding": False,
        **TOKENS,
    }
    return TransformerConfig(**values | overrides)


FAMILY = family.Family(
    name=NAME,
    sizes=_sizes,
    guess=_guess,
    rules=_rules,
    open_switches=frozenset({
        "activation", "decoder_kind", "embedding_norm", "final_norm", "norm_position",
        "output_bias", "tie_embeddings",
    }),
    layout_of_tensors=lambda names: LEGACY_OUTPUT if LEGACY_OUTPUT in names else OUTPUT,
    layout_of_params=lambda arrays, carried: OUTPUT,
    preset=_preset,
)  # fmt: skip
