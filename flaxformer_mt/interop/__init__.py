"""Conversion between the weights of published Transformers and our parameters.

`families/` has the weight map of each published model, `formats/` the formats of whole models,
`weight_maps/` what a map is and how it is applied. `convert.py` is the command `convert`.
"""

from flaxformer_mt.interop.families import FAMILIES as FAMILIES
from flaxformer_mt.interop.weight_maps.adam_state import AdamState as AdamState
from flaxformer_mt.interop.weight_maps.adam_state import TrainingState as TrainingState
from flaxformer_mt.interop.weight_maps.adam_state import load_training as load_training
from flaxformer_mt.interop.weight_maps.adam_state import save as save
from flaxformer_mt.interop.weight_maps.checkpoints import differentiable as differentiable
from flaxformer_mt.interop.weight_maps.checkpoints import load as load
from flaxformer_mt.interop.weight_maps.family import Family as Family
from flaxformer_mt.interop.weight_maps.mapping import model_params as model_params
