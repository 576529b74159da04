"""Conversion between the weights of published Transformers and our parameters.

`families/` has the weight map of each published model, `formats/` the formats of whole models,
`weight_maps/` what a map is and how it is applied. `convert.py` is the command `convert`.
"""

from flaxformer_mt.interop.families import FAMILIES
from flaxformer_mt.interop.weight_maps.adam_state import (
    AdamState,
    TrainingState,
    load_training,
    save,
)
from flaxformer_mt.interop.weight_maps.checkpoints import differentiable, load
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.mapping import model_params

__all__ = [
    "FAMILIES", "AdamState", "Family", "TrainingState", "differentiable", "load", "load_training",
    "model_params", "save",
]  # fmt: skip
