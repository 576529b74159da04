"""Conversion between the weights of published Transformers and our parameters.

`families/` has the weight map of each published model, `formats/` the formats of whole models,
`weight_maps/` what a map is and how it is applied. `convert.py` is the command `convert`.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.families import (
    annotated,
    annotated_wide_heads,
    double_projection,
    fairseq,
    jadore801120,
    marian,
    opennmt,
    torch,
    tunz,
)
from flaxformer_mt.interop.weight_maps import adam_state, checkpoints
from flaxformer_mt.interop.weight_maps.adam_state import AdamState, TrainingState
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.presets import canonical_family

__all__ = [
    "FAMILIES", "AdamState", "Family", "TrainingState", "differentiable", "load", "load_training",
    "model_params", "save",
]  # fmt: skip

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        jadore801120,
        double_projection,
        annotated_wide_heads,
        annotated,
        tunz,
        torch,
        marian,
        fairseq,
        opennmt,
    )
}
"""Every family's map, by name."""


def load(
    family: str | Family,
    path_or_state_dict: str | os.PathLike[str] | Mapping[str, Any],
    **overrides: Any,
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Reads a published checkpoint.

    Args:
      family: a key of `FAMILIES`, an alias of one (`presets.FAMILY_ALIASES`), or a map of your own.
      path_or_state_dict: a PyTorch or safetensors file, or a state dict of PyTorch tensors or numpy
        arrays. A dict that holds one under "model" or "state_dict" will do, too; training options
        that it has beside it, under "settings", "opt", "args" or "cfg", are read.
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
    return checkpoints.load(_family(family), path_or_state_dict, overrides)


def load_training(
    family: str | Family,
    path_or_state_dict: str | os.PathLike[str] | Mapping[str, Any],
    **overrides: Any,
) -> TrainingState:
    """Reads a published checkpoint with the state of its Adam optimizer.

    Arguments are those of `load`. The state is sought under "optimizer", "optimizer_state_dict",
    "optim" and "last_optimizer_state".

    Raises:
      UserError: as `load`; or the state is not that of a `torch.optim.Adam`, or lacks a moment, or
        has one too many or of the wrong shape or dtype.
    """
    return adam_state.load_training(_family(family), path_or_state_dict, overrides)


def save(
    family: str | Family,
    config: TransformerConfig,
    params: Mapping[str, Any],
    path: str | os.PathLike[str],
    adam: AdamState | None = None,
) -> None:
    """Writes parameters as a checkpoint that the published code loads.

    Args:
      family: a key of `FAMILIES`, an alias of one (`presets.FAMILY_ALIASES`), or a map of your own.
      config: what `params` are the parameters of.
      params: from `load`, or from our model; with the subtree `carried` or without.
      path: ends in .safetensors or, for a PyTorch file, in .pt.
      adam: the optimizer's state, from `load_training`. Then the file, which must be .pt, holds
        {"model": the tensors, "optimizer": a state dict of `torch.optim.Adam`}, under the keys
        that the published code has for them.

    Raises:
      UserError: the configuration is not the family's mathematics, the parameters (or moments) are
        not the configuration's, or the file cannot be written.
    """
    if adam is None:
        checkpoints.save(_family(family), config, params, path)
    else:
        adam_state.save(_family(family), config, params, adam, path)


def differentiable(
    family: str | Family, config: TransformerConfig, names: Collection[str]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Our parameters as a function of a published model's own, to differentiate and train these.

    Args:
      family: a key of `FAMILIES`, an alias of one (`presets.FAMILY_ALIASES`), or a map of your own.
      config: from `load`.
      names: of the reference's parameters, as `torch.nn.Module.named_parameters` lists them: each
        tied one once, no buffers. (A buffer that is one of our parameters, as Marian's
        `final_logits_bias`, is zero unless it is among them.)

    Returns:
      A function of {name: array} to the parameters that `load` gives for these tensors, without
      what they carry. It can be traced by `jax.jit` and `jax.grad`.

    Raises:
      UserError: a parameter of the reference is not among the names.
    """
    return checkpoints.differentiable(_family(family), config, names)


def _family(family: str | Family) -> Family:
    if isinstance(family, Family):
        return family
    family = canonical_family(family)
    if family not in FAMILIES:
        raise UserError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    return FAMILIES[family]
