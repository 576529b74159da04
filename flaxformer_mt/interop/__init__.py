"""Weights of published Transformers, to our parameters and back.

One file a family holds its map; `weights.py` is the engine that all of them share.
"""

import os
from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import annotated, jadore801120, notebook, questions, torch, tunz, weights
from flaxformer_mt.interop.weights import model_params

__all__ = ["FAMILIES", "load", "model_params", "save"]

FAMILIES: dict[str, weights.Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (jadore801120, notebook, questions, annotated, tunz, torch)
}
"""Every family's map, by name."""


def load(
    family: str, path_or_state_dict: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Reads a published checkpoint.

    Args:
      family: a key of `FAMILIES`.
      path_or_state_dict: a PyTorch or safetensors file, or a state dict of PyTorch tensors or numpy
        arrays. A dict that holds one under "model" or "state_dict" will do, too; options that it
        has under "settings" are read.
      **overrides: fields of `TransformerConfig` that names and shapes cannot tell. `num_heads` is
        needed unless the checkpoint has it; for the others there is the family's preset.

    Returns:
      The configuration, and the parameters as nested dicts of numpy arrays in the file's dtype.
      Beside the model's own there may be a subtree `carried`, see `weights.py` and `model_params`.

    Raises:
      UserError: the file cannot be read or would run code; a tensor is missing, left over, of the
        wrong shape or dtype; tensors that should be tied differ; an override is missing or does not
        go with the tensors.
    """
    return weights.load(_family(family), path_or_state_dict, overrides)


def save(
    family: str,
    config: TransformerConfig,
    params: Mapping[str, Any],
    path: str | os.PathLike[str],
) -> None:
    """Writes parameters as a checkpoint that the published code loads.

    Args:
      family: a key of `FAMILIES`.
      config: what `params` are the parameters of.
      params: from `load`, or from our model; with the subtree `carried` or without.
      path: ends in .safetensors or, for a PyTorch file, in .pt.

    Raises:
      UserError: the configuration is not the family's mathematics, the parameters are not the
        configuration's, or the file cannot be written.
    """
    weights.save(_family(family), config, params, path)


def _family(name: str) -> weights.Family:
    if name not in FAMILIES:
        raise UserError(f"unknown family {name!r}: choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]
