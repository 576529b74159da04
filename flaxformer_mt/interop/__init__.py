"""Conversion between the weights of published Transformers and our parameters.

`families/` has the weight map of each published model, `formats/` the formats of whole models,
`weight_maps/` what a map is and how it is applied. `convert.py` is the command `convert`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.interop.families import FAMILIES as FAMILIES
from flaxformer_mt.interop.families import find
from flaxformer_mt.interop.formats import own_format
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES as HUB_FAMILIES
from flaxformer_mt.interop.weight_maps import adam_state, checkpoints
from flaxformer_mt.interop.weight_maps.adam_state import AdamState as AdamState
from flaxformer_mt.interop.weight_maps.adam_state import TrainingState as TrainingState
from flaxformer_mt.interop.weight_maps.adam_state import load_training as load_training
from flaxformer_mt.interop.weight_maps.checkpoints import differentiable as differentiable
from flaxformer_mt.interop.weight_maps.family import Family as Family
from flaxformer_mt.interop.weight_maps.mapping import model_params as model_params


def load(
    family: str | Family,
    path_or_state_dict: str | os.PathLike[str] | Mapping[str, Any],
    **overrides: Any,
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Reads a published checkpoint and converts it to our parameters.

    Args:
      family: a key of `FAMILIES`, an alias of one (`presets.FAMILY_ALIASES`), or a `Family`; or
        "flaxformer_mt", for a file of our parameters.
      path_or_state_dict: a PyTorch or safetensors file, or a state dict of PyTorch tensors or numpy
        arrays, possibly nested under "model" or "state_dict" in a dict with training options under
        "settings", "opt", "args" or "cfg", which are read.
      **overrides: fields of `TransformerConfig` that do not follow from names and shapes.
        `num_heads` is required unless the checkpoint contains it; the others default to the
        family's preset.

    Returns:
      The configuration, and the parameters as nested dicts of numpy arrays in the file's dtype,
      possibly with a subtree `carried`: see `weight_maps/mapping.py` and `model_params`.

    Raises:
      UserError: the file cannot be read, or would run code; a tensor is missing, unexpected, of the
        wrong shape or dtype, or not finite; tied tensors differ; an override is missing or
        contradicts the tensors.
    """
    if family == own_format.OWN and not isinstance(path_or_state_dict, Mapping):
        state, _ = own_format.read(Path(path_or_state_dict), overrides)
        return state.config, state.params
    found = find(family)
    with checkpoints.error_context(path_or_state_dict, found.name):
        checkpoint = checkpoints.read(found, path_or_state_dict)
        return checkpoints.from_checkpoint(found, checkpoint, overrides)


def save(
    family: str | Family,
    config: TransformerConfig,
    params: Mapping[str, Any],
    path: str | os.PathLike[str],
    adam: AdamState | None = None,
) -> None:
    """Writes parameters as a state dict that the published module loads, or as our own.

    Options and vocabularies are not written. Programs that read them from a checkpoint, too (those
    of a family with `also_reads`), need the module and `load_state_dict`; `convert` writes folders
    that the programs of Marian and Hugging Face load.

    Args:
      family: as for `load`.
      config: the configuration of `params`.
      params: from `load` or from our model, with or without the subtree `carried`, which a file of
        our parameters leaves out.
      path: the file, ending in .safetensors (always for "flaxformer_mt") or, for a PyTorch file,
        in .pt.
      adam: the optimizer's state, from `load_training`. A published file,
        which must be .pt, then contains {"model": the tensors, "optimizer": a state dict of
        `torch.optim.Adam`}, under the keys that the published code uses.

    Raises:
      TypeError: an argument is of another type.
      UserError: the published code cannot have this configuration, the parameters (or moments) do
        not match it, or the file cannot be written.
    """
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"config must be a TransformerConfig, not {type(config).__name__}")
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be nested dicts of arrays, not {type(params).__name__}")
    path = Path(path)
    if family == own_format.OWN:
        own_format.write(path, TrainingState(config, model_params(params), adam), family)
    elif adam is None:
        checkpoint_files.write(path, checkpoints.to_state_dict(find(family), config, params))
    elif path.suffix == ".safetensors":
        raise UserError(f"{path}: PyTorch reads Adam's state from .pt files only: use .pt")
    else:
        content = adam_state.to_checkpoint(find(family), config, params, adam)
        checkpoint_files.write_torch(path, content)
