"""The weight map of `marian`: Hugging Face's `MarianMTModel`.

The bias of the logits is a buffer [1, V] there, and not trained. Published files omit the tables of
sinusoids and all but one of tied tensors.

Tying follows from names and shapes. The other fields are read from the settings, which are those of
the model's `config.json`; without them give `num_heads`, and `activation`, `scale_embeddings`,
`pad_id` and `eos_id` if they are not those of OPUS-MT.
"""

from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families import fairseq
from flaxformer_mt.interop.weight_maps import family
from flaxformer_mt.interop.weight_maps.rules import TensorRule, embeddings, row, tied

SHARED = "model.shared.weight"
SOURCE = "model.encoder.embed_tokens.weight"
TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
BIAS = "final_logits_bias"
TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
BASE = "model."
IGNORED = {
    "position_ids": "are the numbers 0, 1, 2, ...",
    "n_averaged": "counts what torch.optim.swa_utils.AveragedModel has averaged",
}
LAYERS = fairseq.layers(BASE)
ORDER = (
    BIAS, "model", "shared", "encoder", "decoder", "embed_tokens", "embed_positions",
    *fairseq.LAYER_ORDER, "layernorm_embedding", "layer_norm", "lm_head", "weight", "bias",
)  # fmt: skip
"""`Family.order`, also of mBART and M2M-100."""

FIELDS_OF_SETTINGS = {
    "encoder_attention_heads": "num_heads",
    "d_model": "d_model",
    "scale_embedding": "scale_embeddings",
    "max_position_embeddings": "max_length",
    "dropout": "dropout_rate",
    "attention_dropout": "attention_dropout_rate",
    "activation_dropout": "activation_dropout_rate",
    "pad_token_id": "pad_id",
    "eos_token_id": "eos_id",
    "decoder_start_token_id": "bos_id",
}
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    tensors = checkpoint.tensors
    ties_source = SHARED in tensors or checkpoint.same(SOURCE, TARGET)
    target = TARGET if TARGET in tensors else SHARED
    ties_output = OUTPUT not in tensors or checkpoint.same(OUTPUT, target)
    tying = {"tie_embeddings": family.TYINGS[ties_source, ties_output]}
    return tying | guess_without_ties(checkpoint)


def guess_without_ties(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    """Returns the fields of `config.json`, and the number of positions of the tables."""
    fields = fields_of_config(checkpoint.settings)
    if TABLES[0] in checkpoint.tensors:
        fields = {"max_length": checkpoint.size((TABLES[0], 0))} | fields
    return fields


def fields_of_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration fields that `config.json` has."""
    family.check_kinds(settings, {"decoder_attention_heads": int})
    fairseq.check_equal_heads(settings)
    return {
        **family.fields_of_settings(settings, FIELDS_OF_SETTINGS),
        **family.activation_of_settings(settings, "activation_function", ACTIVATIONS),
    }


def _embeddings(config: TransformerConfig) -> list[TensorRule]:
    rules = embeddings(config, SOURCE, TARGET, OUTPUT)
    if not config.shares_source_and_target:
        return rules
    *others, target = rules
    return [*others, tied(*target.ours, SHARED, *target.theirs)]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [*_embeddings(config), row("output/bias", BIAS), *LAYERS.rules(config)]


def buffers(config: TransformerConfig) -> list[family.Buffer]:
    """Returns the tables of sinusoids."""
    table = family.sinusoids(config)
    return [
        family.Buffer(name, table, rows=config.max_length, is_parameter=True) for name in TABLES
    ]


def _omitted(config: TransformerConfig) -> frozenset[str]:
    names = {*TABLES}
    if config.shares_source_and_target:
        names |= {SOURCE, TARGET}
    if config.shares_target_and_output:
        names.add(OUTPUT)
    return frozenset(names)


FAMILY = family.Family(
    name="marian",
    sizes=LAYERS.sizes_of_model([SOURCE, SHARED], [TARGET, SHARED, OUTPUT]),
    also_reads="config.json and vocabularies",
    guess=_guess,
    rules=_rules,
    buffers=buffers,
    open_switches=frozenset({"tie_embeddings", "activation", "scale_embeddings"}),
    order=ORDER,
    omitted=_omitted,
    constants=frozenset({BIAS}),
    ignored=IGNORED,
    base=BASE,
)
