"""Our parameters in one safetensors file, with Adam's state and carried tensors.

`flaxformer_mt.runs.parameter_file` defines the format and reads the parameters alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_mt.config import to_dict
from flaxformer_mt.config.fields import MAX_INTEGER
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import parse_json
from flaxformer_mt.interop import checkpoint_files, families
from flaxformer_mt.interop.checkpoint_files import Tensors
from flaxformer_mt.interop.weight_maps import mapping
from flaxformer_mt.interop.weight_maps.adam_state import AdamState, TrainingState
from flaxformer_mt.interop.weight_maps.checkpoints import error_context
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.validation import check_params
from flaxformer_mt.presets import canonical_family
from flaxformer_mt.runs import parameter_file
from flaxformer_mt.runs.parameter_file import ADAM

OWN = parameter_file.FORMAT
"""The name of our own parameters where a family is expected."""


def write(path: Path, state: TrainingState, origin: str) -> None:
    """Writes a training state without loss."""
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: use the suffix .safetensors")
    metadata = {"format": OWN, "config": json.dumps(to_dict(state.config)), "origin": origin}
    if state.adam is not None:
        # A learning rate may be a tensor.
        settings = json.dumps(dict(state.adam.settings), default=float)
        metadata |= {"adam_step": str(state.adam.step), "adam_settings": settings}
    checkpoint_files.write_safetensors(path, _tensors(state), metadata)


def read(path: Path, overrides: Mapping[str, Any]) -> tuple[TrainingState, str]:
    """Reads what `write` wrote: the state, and the family that its carried tensors belong to.

    The file contains the whole configuration, so overrides are an error.
    """
    with error_context(path, OWN):
        config, tensors, metadata = parameter_file.read(path)
        if overrides:
            raise UserError(f"it contains {next(iter(overrides))}: fields cannot be overridden")
        with parameter_file.refusing_damaged_metadata():
            adam = _adam_of(metadata, tensors)
        params = _unflatten("", tensors)
        check_params(config, mapping.by_path(params))
        if adam is not None:
            check_params(config, mapping.by_path(adam.mean), "Adam's mean of")
            check_params(config, mapping.by_path(adam.variance), "Adam's variance of")
        state = TrainingState(config, params, adam)
        family = canonical_family(metadata.get("origin", OWN))
        _require_known(tensors, state, family)
        return state, family


def _require_known(tensors: Tensors, state: TrainingState, family: str) -> None:
    """Raises `UserError` for a tensor beside the parameters that nothing would read."""
    unknown = sorted(tensors.keys() - _tensors(state).keys())
    if family in (OWN, *families.FAMILIES):  # Not one that a program has defined.
        known = set() if family == OWN else _names(families.FAMILIES[family], state)
        carried = [name for name in sorted(tensors) if parameter_file.CARRIED in name]
        unknown += [
            name for name in carried if name.partition(parameter_file.CARRIED)[2] not in known
        ]
    if unknown:
        raise UserError(f"tensor {unknown[0]} is unexpected: nothing in the model has it")


def _names(family: Family, state: TrainingState) -> set[str]:
    """Returns the names of all tensors that a family has for a model."""
    arrays, carried = mapping.by_path(state.params), state.params.get(mapping.CARRIED, {})
    rules = family.rules(state.config, family.layout_of_params(arrays, carried))
    names = {buffer.name for buffer in family.buffers(state.config)}
    for _, _, _, theirs in mapping.WeightMap(family, state.config, rules).applications():
        names.update(theirs)
    return names


def _adam_of(metadata: Mapping[str, str], tensors: Tensors) -> AdamState | None:
    if "adam_step" not in metadata:
        return None
    mean, variance = (_unflatten(f"{ADAM}{kind}/", tensors) for kind in ("mean", "variance"))
    settings = parse_json(metadata["adam_settings"], "its metadata")
    step = int(metadata["adam_step"])
    if not 0 <= step <= MAX_INTEGER:
        raise ValueError(f"adam_step={step}")
    # JSON has no tuples.
    groups = [
        group | {"betas": tuple(group["betas"])} if "betas" in group else group
        for group in settings.get("param_groups", [])
    ]
    settings |= {"param_groups": groups} if groups else {}
    return AdamState(step, mean, variance, settings)


def _tensors(state: TrainingState) -> dict[str, np.ndarray]:
    tensors = _flatten("", state.params)
    if state.adam is not None:
        tensors |= _flatten(f"{ADAM}mean/", state.adam.mean)
        tensors |= _flatten(f"{ADAM}variance/", state.adam.variance)
    return tensors


def _flatten(prefix: str, tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns arrays by path; carried tensors keep their dotted names."""
    arrays = flatten_dict(dict(tree), sep="/")
    return {f"{prefix}{path}": np.asarray(array) for path, array in arrays.items()}


def _unflatten(prefix: str, tensors: Tensors) -> dict[str, Any]:
    """Inverts `_flatten`, for the tensors with this prefix."""
    own = {
        _path(name.removeprefix(prefix)): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and (prefix or not name.startswith(ADAM))
    }
    try:
        return unflatten_dict(dict(sorted(own.items())))
    except IndexError as error:
        raise UserError("the name of an array is that of a group of others") from error


def _path(name: str) -> tuple[str, ...]:
    """Returns the keys of an array; the name of a carried tensor may contain slashes."""
    return tuple(name.split("/", 1 if name.startswith(f"{mapping.CARRIED}/") else -1))
