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
from flaxformer_mt.interop.families import fairseq, marian
from flaxformer_mt.interop.families.marian import BIAS, LAYERS, OUTPUT, SHARED, SOURCE, TARGET
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.layers import stack_norms
from flaxformer_mt.interop.weight_maps.rules import TensorRule, row, same, tied

TABLES = (SHARED, SOURCE, TARGET, OUTPUT)
"""The names of the one table of embeddings."""
POSITIONS = "embed_positions.weight"
IGNORED = {
    **marian.IGNORED,
    "version": "numbers the format of fairseq's modules",
    "_float_tensor": "tells fairseq's sinusoids their dtype",
}
_UNUSED_POSITIONS = 2
"""Rows at the beginning of the position tables that nothing reads."""


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    has_final_norm = checkpoint.has_any(".encoder.layer_norm.weight")
    tables = [(f"model.{stack}.{POSITIONS}", 0) for stack in ("encoder", "decoder")]
    return marian.fields_of_config(checkpoint.settings) | {
        "norm_position": "pre" if has_final_norm else "post",
        "max_length": checkpoint.size(*tables) - _UNUSED_POSITIONS,
    }


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        tied("target_embedding/embedding", *TABLES),
        row("output/bias", BIAS),
        same("source_positions/embedding", f"model.encoder.{POSITIONS}"),
        same("target_positions/embedding", f"model.decoder.{POSITIONS}"),
        *stack_norms("embedding_norm", "model.{stack}.layernorm_embedding"),
        *LAYERS.rules(config),
        *stack_norms("final_norm", "model.{stack}.layer_norm"),
    ]


FAMILY = Family(
    name="mbart",
    sizes=LAYERS.sizes_of_model(TABLES, TABLES),
    also_reads="config.json and vocabularies",
    guess=_guess,
    rules=_rules,
    open_switches=frozenset({"norm_position", "activation", "scale_embeddings"}),
    order=(
        BIAS, "model", "shared", "encoder", "decoder", "embed_tokens", "embed_positions",
        *fairseq.LAYER_ORDER, "layernorm_embedding", "layer_norm", "lm_head", "weight", "bias",
    ),
    omitted=lambda config: frozenset(TABLES),
    constants=frozenset({BIAS}),
    ignored=IGNORED,
    base=marian.BASE,
)  # fmt: skip
