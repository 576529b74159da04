"""The weight map of `fsmt`: Hugging Face's FSMT, fairseq's models of WMT 2019 (facebook/wmt19-*).

Source and target have vocabularies of their own, or share one. Some files have the tables of
sinusoids, whose row of padding is zero.

Tying follows from names and tensors. The other fields are read from the settings, which are those
of the model's `config.json`; without them give `num_heads`, and `activation`, `scale_embeddings`,
`pad_id` and `eos_id` if they are not those of the published models.
"""

import functools
from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families import marian
from flaxformer_mt.interop.families.fairseq import PAD_ID
from flaxformer_mt.interop.families.marian import LAYERS, SOURCE, TABLES, TARGET
from flaxformer_mt.interop.weight_maps import family
from flaxformer_mt.interop.weight_maps.rules import TensorRule, embeddings
from flaxformer_mt.model.positions import sinusoidal_table

OUTPUT = "model.decoder.output_projection.weight"


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    source = SOURCE if SOURCE in checkpoint.tensors else TARGET
    return LAYERS.sizes_of_model([source], [TARGET, OUTPUT])(checkpoint, num_heads)


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    source, output = (name if name in checkpoint.tensors else TARGET for name in (SOURCE, OUTPUT))
    fields: dict[str, Any] = family.guess_tying(checkpoint, source, TARGET, output)
    if TABLES[0] in checkpoint.tensors:
        padding = checkpoint.settings.get("pad_token_id", PAD_ID)
        fields["max_length"] = checkpoint.size((TABLES[0], 0)) - padding - 1
    return fields | marian.fields_of_config(checkpoint.settings)


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [*embeddings(config, SOURCE, TARGET, OUTPUT), *LAYERS.rules(config)]


def _table(config: TransformerConfig, rows: int) -> np.ndarray:
    table = sinusoidal_table(
        rows, config.d_model, layout="concatenated", exponent="tensor2tensor"
    ).copy()
    table[config.pad_id] = 0
    return table


def _buffers(config: TransformerConfig) -> list[family.Buffer]:
    rows = config.max_length + config.position_offset
    table = functools.partial(_table, config)
    return [family.Buffer(name, table, rows=rows, is_parameter=True) for name in TABLES]


def _omitted(config: TransformerConfig) -> frozenset[str]:
    names = {*TABLES}
    if config.shares_source_and_target:
        names.add(SOURCE)
    if config.shares_target_and_output:
        names.add(OUTPUT)
    return frozenset(names)


FAMILY = family.Family(
    name="fsmt",
    sizes=_sizes,
    also_reads="config.json and vocabularies",
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset({"tie_embeddings", "activation", "scale_embeddings", "pad_id"}),
    order=(*marian.ORDER, "output_projection"),
    omitted=_omitted,
    ignored=marian.IGNORED,
    base=marian.BASE,
)
