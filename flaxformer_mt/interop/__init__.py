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
    double_projection,
    fairseq,
    jadore801120,
    m2m100,
    marian,
    mbart,
    opennmt,
    t5,
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
    family.name: family
    for family in (
        jadore801120.FAMILY,
        double_projection.FAMILY,
        annotated.WIDE_HEADS,
        annotated.FAMILY,
        tunz.FAMILY,
        torch.FAMILY,
        marian.FAMILY,
        fairseq.FAMILY,
        opennmt.FAMILY,
        mbart.FAMILY,
        m2m100.FAMILY,
        t5.FAMILY,
    )
}
"""The weight maps of all families, by name."""


def load(
    family: str | Family,
    path_or_state_dict: str | os.PathLike[str] | Mapping[str, Any],
    **overrides: Any,
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Reads a published checkpoint and converts it to our parameters.

    Args:
      family: a key of `FAMILIES`, an alias of one (`presets.FAMILY_ALIASES`), or a `Family`.
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
    return checkpoints.load(_family(family), path_or_state_dict, overrides)


def load_training(
    family: str | Family,
    path_or_state_dict: str | os.PathLike[str] | Mapping[str, Any],
    **overrides: Any,
) -> TrainingState:
    """Reads a published checkpoint with the state of its Adam optimizer.

    Arguments are those of `load`. The state is read from "optimizer", "optimizer_state_dict",
    "optim" or "last_optimizer_state".

    Raises:
      UserError: as `load`; or the state is not that of a `torch.optim.Adam`; or a moment is
        missing, unexpected, or of the wrong shape or dtype.
    """
    return adam_state.load_training(_family(family), path_or_state_dict, overrides)


def save(
    family: str | Family,
    config: TransformerConfig,
    params: Mapping[str, Any],
    path: str | os.PathLike[str],
    adam: AdamState | None = None,
) -> None:
    """Writes parameters as a state dict that the published module loads.

    Options and vocabularies are not written. Programs that read them from a checkpoint, too (those
    of a family with `also_reads`), need the module and `load_state_dict`; `convert` writes folders
    that the programs of Marian and Hugging Face load.

    Args:
      family: a key of `FAMILIES`, an alias of one (`presets.FAMILY_ALIASES`), or a `Family`.
      config: the configuration of `params`.
      params: from `load` or from our model, with or without the subtree `carried`.
      path: the file, ending in .safetensors or, for a PyTorch file, in .pt.
      adam: the optimizer's state, from `load_training`. The file, which must be .pt, then contains
        {"model": the tensors, "optimizer": a state dict of `torch.optim.Adam`}, under the keys
        that the published code uses.

    Raises:
      TypeError: an argument is of another type.
      UserError: the published code cannot have this configuration, the parameters (or moments) do
        not match it, or the file cannot be written.
    """
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"config must be a TransformerConfig, not {type(config).__name__}")
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be nested dicts of arrays, not {type(params).__name__}")
    if adam is None:
        checkpoints.save(_family(family), config, params, path)
    else:
        adam_state.save(_family(family), config, params, adam, path)


def differentiable(
    family: str | Family, config: TransformerConfig, names: Collection[str]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns our parameters as a differentiable function of a published model's parameters.

    Args:
      family: a key of `FAMILIES`, an alias of one (`presets.FAMILY_ALIASES`), or a `Family`.
      config: from `load`.
      names: the reference's parameters, as `torch.nn.Module.named_parameters` lists them: a tied
        one once, no buffers. (A buffer that is one of our parameters, such as Marian's
        `final_logits_bias`, is zero unless it is among them.)

    Returns:
      A function from {name: array} to the parameters that `load` returns for these tensors, without
      carried tensors. It can be traced by `jax.jit` and `jax.grad`.

    Raises:
      UserError: a parameter of the reference is missing from the names.
    """
    return checkpoints.differentiable(_family(family), config, names)


def _family(family: str | Family) -> Family:
    if isinstance(family, Family):
        return family
    if not isinstance(family, str):
        raise TypeError(f"family must be a name or a Family, not {type(family).__name__}")
    family = canonical_family(family)
    if family not in FAMILIES:
        raise UserError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    return FAMILIES[family]
