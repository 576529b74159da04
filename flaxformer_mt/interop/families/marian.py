"""The weight maps of `marian` and `pegasus`: Hugging Face's `MarianMTModel` and Pegasus.

The bias of the logits is a buffer [1, V] there, and not trained. Published files omit the tables of
sinusoids and all but one of tied tensors.

Tying follows from names and shapes. The other fields are read from the settings, which are those of
the model's `config.json`; without them give `num_heads`, and `activation`, `scale_embeddings`,
`pad_id` and `eos_id` if they are not those of OPUS-MT.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    "version": "numbers the format of fairseq's modules",
    "_float_tensor": "tells fairseq's sinusoids their dtype",
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


def sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    """Returns the fields that follow from shapes. With tables of two sizes, none is shared."""
    tensors = checkpoint.tensors
    own = [tensors[name].shape for name in (SOURCE, TARGET) if name in tensors]
    shared = [] if len({*own}) == 2 else [SHARED]
    return LAYERS.sizes_of_model([SOURCE, *shared], [TARGET, *shared, OUTPUT])(
        checkpoint, num_heads
    )


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    fields: dict[str, Any] = tying(checkpoint, shared_is_read=True)
    if TABLES[0] in checkpoint.tensors:
        fields["max_length"] = checkpoint.size((TABLES[0], 0))
    return fields | fields_of_config(checkpoint.settings)


def tying(checkpoint: PublishedCheckpoint, shared_is_read: bool = False) -> dict[str, str]:
    """Returns `tie_embeddings` of a checkpoint, in which the shared table stands for missing ones.

    Where both stacks have a table of their own, nothing reads the shared one; with
    `shared_is_read`, a model that has one reads it in both stacks.
    """
    tensors = checkpoint.tensors
    source, target = (name if name in tensors else SHARED for name in (SOURCE, TARGET))
    is_shared = source == target or (shared_is_read and SHARED in tensors)
    ties_source = is_shared or checkpoint.same(source, target)
    ties_output = OUTPUT not in tensors or checkpoint.same(OUTPUT, target)
    return {"tie_embeddings": family.TYINGS[ties_source, ties_output]}


def fields_of_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration fields that `config.json` has."""
    family.check_kinds(settings, {"decoder_attention_heads": int})
    fairseq.check_equal_heads(settings)
    return {
        **family.fields_of_settings(settings, FIELDS_OF_SETTINGS),
        **family.activation_of_settings(settings, "activation_function", ACTIVATIONS),
    }


def tables(config: TransformerConfig) -> list[TensorRule]:
    """Returns the rules of the tables of embeddings and of the output."""
    rules = embeddings(config, SOURCE, TARGET, OUTPUT)
    if not config.shares_source_and_target:
        return rules
    *others, target = rules
    return [*others, tied(*target.ours, SHARED, *target.theirs)]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [*tables(config), row("output/bias", BIAS), *LAYERS.rules(config)]


def unread(config: TransformerConfig) -> list[family.Buffer]:
    """Returns the shared table if both stacks have their own."""
    if config.shares_source_and_target:
        return []
    size, width = config.target_vocab_size, config.d_model
    return [family.Buffer(SHARED, lambda rows: np.zeros((rows, width)), size, exact=False)]


def _buffers(config: TransformerConfig) -> list[family.Buffer]:
    table = family.sinusoids(config)
    return [
        family.Buffer(name, table, rows=config.max_length, is_parameter=True) for name in TABLES
    ]


def omitted_tables(config: TransformerConfig) -> frozenset[str]:
    """Returns the names of tables that a file may omit."""
    names = {SOURCE, TARGET} if config.shares_source_and_target else {SHARED}
    return frozenset(names | ({OUTPUT} if config.shares_target_and_output else set()))


FAMILY = family.Family(
    name="marian",
    sizes=LAYERS.sizes_of_model([SOURCE, SHARED], [TARGET, SHARED, OUTPUT]),
    also_reads="config.json and vocabularies",
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset({"tie_embeddings", "activation", "scale_embeddings"}),
    order=ORDER,
    omitted=lambda config: omitted_tables(config) | {*TABLES},
    constants=frozenset({BIAS}),
    ignored=IGNORED,
    base=BASE,
)
# A Marian model whose stacks have their own tables has no shared one.
PEGASUS = dataclasses.replace(
    FAMILY,
    name="pegasus",
    sizes=sizes,
    guess=lambda checkpoint: _guess(checkpoint) | tying(checkpoint),
    buffers=lambda config: [*_buffers(config), *unread(config)],
)
