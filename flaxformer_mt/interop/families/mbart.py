"""The weight maps of `mbart` (Hugging Face's mBART, mBART-50, BART) and `m2m100` (M2M-100, NLLB).

Source, target and output share one table, which files have once; tables that differ are separate.
The bias of mBART's logits is a buffer [1, V], and not trained. The sinusoids of M2M-100 are in no
file.

The position of norms follows from names. The other fields are read from the settings, which are
those of the model's `config.json`; without them give `num_heads`, and `activation`,
`scale_embeddings`, `pad_id` and `eos_id` if they are not those of the published models.
"""

import dataclasses
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families import marian
from flaxformer_mt.interop.families.marian import BIAS, LAYERS
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.rules import TensorRule, row, same

_POSITIONS = "embed_positions.weight"
_UNUSED_POSITIONS = 2
"""Rows at the beginning of the position tables that nothing reads."""


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    has_final_norm = checkpoint.has_any(".encoder.layer_norm.weight")
    tables = [(f"model.{stack}.{_POSITIONS}", 0) for stack in ("encoder", "decoder")]
    return _fields(checkpoint) | {
        "norm_position": "pre" if has_final_norm else "post",
        "max_length": checkpoint.size(*tables) - _UNUSED_POSITIONS,
    }


def _fields(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    return marian.fields_of_config(checkpoint.settings) | marian.tying(checkpoint)


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        *marian.tables(config),
        row("output/bias", BIAS),
        same("source_positions/embedding", f"model.encoder.{_POSITIONS}"),
        same("target_positions/embedding", f"model.decoder.{_POSITIONS}"),
        *LAYERS.rules(config),
    ]


FAMILY = Family(
    name="mbart",
    sizes=marian.sizes,
    also_reads="config.json and vocabularies",
    guess=_guess,
    rules=_rules,
    buffers=marian.unread,
    open_switches=frozenset({"norm_position", "activation", "scale_embeddings", "tie_embeddings"}),
    order=marian.ORDER,
    omitted=marian.omitted_tables,
    constants=frozenset({BIAS}),
    ignored=marian.IGNORED,
    base=marian.BASE,
)
M2M100 = dataclasses.replace(
    FAMILY,
    name="m2m100",
    guess=_fields,
    open_switches=frozenset({"activation", "scale_embeddings", "pad_id", "tie_embeddings"}),
    constants=frozenset(),
    ignored={**marian.IGNORED, "weights": "are the sinusoids, which are computed"},
)
