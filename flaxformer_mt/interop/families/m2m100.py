"""The weight map of `m2m100`: Hugging Face's M2M-100 and NLLB.

Source, target and output share one table; files have it once. Sinusoids are in no file.

Fields that do not follow from shapes are read from the settings, which are those of the model's
`config.json`; without them give `num_heads`, and `activation`, `scale_embeddings`, `pad_id` and
`eos_id` if they are not those of M2M-100.
"""

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families import marian
from flaxformer_mt.interop.families.fairseq import LAYER_ORDER
from flaxformer_mt.interop.families.mbart import IGNORED, TABLES
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.layers import stack_norms
from flaxformer_mt.interop.weight_maps.rules import TensorRule, tied


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    return [
        tied("target_embedding/embedding", *TABLES),
        *marian.LAYERS.rules(config),
        *stack_norms("final_norm", "model.{stack}.layer_norm"),
    ]


FAMILY = Family(
    name="m2m100",
    sizes=marian.LAYERS.sizes_of_model(TABLES, TABLES),
    also_reads="config.json and vocabularies",
    guess=lambda checkpoint: marian.fields_of_config(checkpoint.settings),
    rules=_rules,
    open_switches=frozenset({"activation", "scale_embeddings", "pad_id"}),
    order=(
        "model", "shared", "encoder", "decoder", "embed_tokens", *LAYER_ORDER, "layer_norm",
        "lm_head", "weight", "bias",
    ),
    omitted=lambda config: frozenset(TABLES),
    ignored={**IGNORED, "weights": "are the sinusoids, which are computed"},
    base=marian.BASE,
)  # fmt: skip
