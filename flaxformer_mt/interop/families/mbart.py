"""The weight maps of `mbart` (mBART, mBART-50, BART), `m2m100` (M2M-100, NLLB) and `pegasus`.

They are those of Hugging Face. Source, target and output share one table; files have it once. The
bias of the logits of mBART and Pegasus is a buffer [1, V], and not trained. The sinusoids of
M2M-100 are in no file.

The position of norms follows from names. The other fields are read from the settings, which are
those of the model's `config.json`; without them give `num_heads`, and `activation`,
`scale_embeddings`, `pad_id` and `eos_id` if they are not those of the published models.
"""

import dataclasses
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families import marian
from flaxformer_mt.interop.families.marian import BIAS, LAYERS, OUTPUT, SHARED, SOURCE, TARGET
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.rules import TensorRule, row, same, tied

_TABLES = (SHARED, SOURCE, TARGET, OUTPUT)
"""The names of the one table of embeddings."""
_POSITIONS = "embed_positions.weight"
IGNORED = {
    **marian.IGNORED,
    "version": "numbers the format of fairseq's modules",
    "_float_tensor": "tells fairseq's sinusoids their dtype",
}
_UNUSED_POSITIONS = 2
"""Rows at the beginning of the position tables that nothing reads."""


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    has_final_norm = checkpoint.has_any(".encoder.layer_norm.weight")
    tables = [(f"model.{stack}.{_POSITIONS}", 0) for stack in ("encoder", "decoder")]
    return marian.fields_of_config(checkpoint.settings) | {
        "norm_position": "pre" if has_final_norm else "post",
        "max_length": checkpoint.size(*tables) - _UNUSED_POSITIONS,
    }


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        tied("target_embedding/embedding", *_TABLES),
        row("output/bias", BIAS),
        same("source_positions/embedding", f"model.encoder.{_POSITIONS}"),
        same("target_positions/embedding", f"model.decoder.{_POSITIONS}"),
        *LAYERS.rules(config),
    ]


FAMILY = Family(
    name="mbart",
    sizes=LAYERS.sizes_of_model(_TABLES, _TABLES),
    also_reads="config.json and vocabularies",
    guess=_guess,
    rules=_rules,
    open_switches=frozenset({"norm_position", "activation", "scale_embeddings"}),
    order=marian.ORDER,
    omitted=lambda config: frozenset(_TABLES),
    constants=frozenset({BIAS}),
    ignored=IGNORED,
    base=marian.BASE,
)
M2M100 = dataclasses.replace(
    FAMILY,
    name="m2m100",
    guess=lambda checkpoint: marian.fields_of_config(checkpoint.settings),
    open_switches=frozenset({"activation", "scale_embeddings", "pad_id"}),
    constants=frozenset(),
    ignored={**IGNORED, "weights": "are the sinusoids, which are computed"},
)
PEGASUS = dataclasses.replace(
    FAMILY,
    name="pegasus",
    guess=marian.guess_without_ties,
    buffers=marian.buffers,
    open_switches=frozenset({"activation", "scale_embeddings"}),
    omitted=lambda config: frozenset({*_TABLES, *marian.TABLES}),
)
