"""The weight map of `mbart`: Hugging Face's mBART, mBART-50 and BART.

Source, target and output share one table. The bias of the logits is a buffer [1, V], and not
trained. Published files omit all but one of tied tensors.

The position of norms follows from names. The other fields are read from the settings, which are
those of the model's `config.json`; without them give `num_heads`, and `activation`,
`scale_embeddings`, `pad_id` and `eos_id` if they are not those of mBART.
"""

from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families.fairseq import (
    LAYER_ORDER,
    check_equal_heads,
    layer_sizes,
    layers,
)
from flaxformer_mt.interop.families.marian import (
    ACTIVATIONS,
    BIAS,
    FIELDS_OF_SETTINGS,
    OUTPUT,
    SHARED,
    SOURCE,
    TARGET,
    output_bias,
)
from flaxformer_mt.interop.weight_maps.family import (
    Family,
    activation_of_settings,
    fields_of_settings,
)
from flaxformer_mt.interop.weight_maps.rules import TensorRule, norm, same, tied

TABLES = (SHARED, SOURCE, TARGET, OUTPUT)
"""The names of the one table of embeddings."""
POSITIONS = "embed_positions.weight"
_UNUSED_POSITIONS = 2
"""Rows at the beginning of the position tables that nothing reads."""


def table_size(checkpoint: PublishedCheckpoint) -> int:
    """Returns V, the rows of the table of embeddings, whichever of its names is present."""
    present = [(name, 0) for name in TABLES if name in checkpoint.tensors]
    return checkpoint.size(*present or [(SHARED, 0)])


def stack_norms(ours: str, theirs: str) -> list[TensorRule]:
    """Returns the rules for a norm below or above both stacks."""
    return [
        rule
        for stack in ("encoder", "decoder")
        for rule in norm(f"{stack}/{ours}", f"model.{stack}.{theirs}")
    ]


def guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    """Returns the fields that follow from the settings of `config.json`."""
    settings = checkpoint.settings
    check_equal_heads(settings)
    return {
        **fields_of_settings(settings, FIELDS_OF_SETTINGS),
        **activation_of_settings(settings, "activation_function", ACTIVATIONS),
    }


def sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    """Returns the fields that follow from the tensors' shapes."""
    rows = table_size(checkpoint)
    return {
        "source_vocab_size": rows,
        "target_vocab_size": rows,
        **layer_sizes(checkpoint, "model.encoder", "model.decoder"),
    }


def omitted(config: TransformerConfig) -> frozenset[str]:
    """Returns the names of tied tensors."""
    return frozenset(TABLES)


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    has_final_norm = checkpoint.has_any(".encoder.layer_norm.weight")
    tables = [(f"model.{stack}.{POSITIONS}", 0) for stack in ("encoder", "decoder")]
    return guess(checkpoint) | {
        "norm_position": "pre" if has_final_norm else "post",
        "max_length": checkpoint.size(*tables) - _UNUSED_POSITIONS,
    }


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        tied("target_embedding/embedding", *TABLES),
        output_bias(),
        same("source_positions/embedding", f"model.encoder.{POSITIONS}"),
        same("target_positions/embedding", f"model.decoder.{POSITIONS}"),
        *stack_norms("embedding_norm", "layernorm_embedding"),
        *layers("model.encoder", "model.decoder"),
        *(stack_norms("final_norm", "layer_norm") if config.final_norm else []),
    ]


FAMILY = Family(
    name="mbart",
    sizes=sizes,
    also_reads="config.json and vocabularies",
    guess=_guess,
    rules=_rules,
    open_switches=frozenset({"norm_position", "activation", "scale_embeddings"}),
    order=(
        BIAS, "model", "shared", "encoder", "decoder", "embed_tokens", "embed_positions",
        *LAYER_ORDER, "layernorm_embedding", "layer_norm", "lm_head", "weight", "bias",
    ),
    omitted=omitted,
    constants=frozenset({BIAS}),
)  # fmt: skip
