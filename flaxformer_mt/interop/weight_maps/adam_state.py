"""Converts the state of PyTorch's Adam optimizer, in both directions.

PyTorch's `Adam.state_dict()` is {"state": {index: {"step", "exp_avg", "exp_avg_sq"}},
"param_groups": [...]}. The index numbers parameters as `torch.nn.Module.named_parameters` lists
them: in the order of the state dict, without buffers, a tied parameter once. A parameter that no
gradient has reached has no entry. A module that has the published names may define them in another
order; that of a file is kept in `AdamState.settings`, for the numbers of the file written from it.

Moments are converted as their parameters are, by the family's rules. Where a rule combines several
tensors, or uses one twice, no moments of ours are equivalent: ours are zero there, and the
originals are carried in `mean["carried"]` and `variance["carried"]`, by name, as in the parameters.
So are the moments of parameters that the reference never reads.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import checkpoint_files, families
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint, Tensors
from flaxformer_mt.interop.weight_maps import checkpoints, mapping, validation
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.mapping import CARRIED, WeightMap
from flaxformer_mt.model.functional import parameter_shapes

MEAN, VARIANCE = "exp_avg", "exp_avg_sq"

# The default options of `torch.optim.Adam`.
DEFAULT_GROUP = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
    "fused": None, "decoupled_weight_decay": False,
}  # fmt: skip


class AdamState(NamedTuple):
    """The state of an Adam optimizer."""

    step: int
    """The number of steps made."""
    mean: dict[str, Any]
    """The first moments, without bias correction: a tree like the parameters, in their dtype."""
    variance: dict[str, Any]
    """The second moments."""
    settings: Mapping[str, Any] = {}
    """What has no counterpart in our optimizer: PyTorch's "param_groups"; "step_type", the dtype of
    its step counter ("int" if that is not a tensor); and "parameters", their names in the order of
    the module that it belongs to."""


class TrainingState(NamedTuple):
    """A published training checkpoint, converted."""

    config: TransformerConfig
    params: dict[str, Any]
    """As returned by `interop.load`."""
    adam: AdamState | None
    """None if the checkpoint has no optimizer state."""
    notes: tuple[str, ...] = ()
    """One-line remarks for the user."""


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
    family = families.find(family)
    with checkpoints.error_context(path_or_state_dict, family.name):
        checkpoint = checkpoints.read(family, path_or_state_dict)
        config, params = checkpoints.from_checkpoint(family, checkpoint, overrides)
        if checkpoint.optimizer is None:
            return TrainingState(config, params, None)
        weight_map = WeightMap.of_tensors(family, config, checkpoint.tensors)
        adam = _read(weight_map, checkpoint)
    paths = weight_map.mixed
    notes = (
        f"Adam's moments of {', '.join(paths)} start at zero: {family.name} computes these "
        "parameters from others, whose moments are carried",
    )
    return TrainingState(config, params, adam, notes if paths and adam.step else ())


def to_checkpoint(
    family: Family, config: TransformerConfig, params: Mapping[str, Any], adam: AdamState
) -> dict[str, Any]:
    """Returns a published training checkpoint; errors as of `interop.save`."""
    written = checkpoints.to_state_dict(family, config, params)
    weight_map = WeightMap.of_tensors(family, config, written)
    tensors = _in_order_of_parameters(weight_map, written, adam.settings.get("parameters"))
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in ("model", *family.parts)}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part in family.parts:
            parts[part][rest] = tensor
        else:
            parts["model"][name] = tensor
    optimizer = _to_state_dict(weight_map, tensors, adam)
    return {**parts, family.optimizer_key: optimizer}


def _read(weight_map: WeightMap, checkpoint: PublishedCheckpoint) -> AdamState:
    groups, state = _groups_and_state(checkpoint.optimizer)
    groups = [_without_prefix(group, checkpoint.prefix) for group in groups]
    parameters = _parameters(weight_map, checkpoint.tensors)
    names = _names_by_index(groups, parameters)
    if names is None:
        raise UserError(
            "the optimizer's parameters are not the model's, or it has several groups without names"
        )
    entries: dict[str, Mapping[str, Any]] = {}
    for index, entry in state.items():
        if index not in names:
            raise UserError(f"entry {index} of the optimizer's state is unexpected")
        entries[names[index]] = entry
    moments = {kind: _moments(kind, entries, weight_map) for kind in (MEAN, VARIANCE)}
    for name, is_trained in parameters.items():
        if entries and is_trained and name not in entries:
            raise UserError(f"Adam's moments of {name} are missing")
    step, step_type = _steps(entries)
    return AdamState(
        step,
        _to_ours(weight_map, moments[MEAN]),
        _to_ours(weight_map, moments[VARIANCE]),
        {"param_groups": groups, "step_type": step_type, "parameters": [*parameters]},
    )


def _groups_and_state(optimizer: Any) -> tuple[list[Any], Mapping[Any, Any]]:
    # OpenNMT's optimizer wraps PyTorch's.
    optimizer = optimizer.get("optimizer", optimizer)
    match optimizer:
        case {"param_groups": [*groups], "state": {**state}} if all(
            isinstance(group, Mapping) and "params" in group for group in groups
        ) and all(isinstance(entry, Mapping) for entry in state.values()):
            return groups, state
    raise UserError("the optimizer's state is not that of a torch.optim.Adam")


def _without_prefix(group: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    names = group.get("param_names")
    if not prefix or not isinstance(names, list):
        return group
    return {**group, "param_names": [str(name).removeprefix(prefix) for name in names]}


def _parameters(weight_map: WeightMap, tensors: Tensors) -> dict[str, bool]:
    """Returns the reference's parameters in PyTorch's order, and whether each is trained."""
    family = weight_map.family
    buffers = {buffer.name: buffer.is_parameter for buffer in family.buffers(weight_map.config)}
    names = {name for _, _, _, theirs in weight_map.applications() for name in theirs}
    listed = mapping.in_order(family, names | buffers.keys())
    is_complete = tensors.keys() >= {name for name in listed if buffers.get(name, True)}
    # A file is in the order of the model that wrote it. If that is the published order, so is the
    # place of a parameter that the file omits.
    if is_complete or [*tensors] != mapping.in_order(family, tensors):
        listed = [*tensors, *(name for name in listed if name not in tensors)]
    untrained = buffers.keys() | weight_map.unread
    trained = {name: name not in untrained for name in listed}
    for rule, _, _, theirs in weight_map.applications():
        if rule.tied:
            for name in sorted(theirs, key=listed.index)[1:]:
                del trained[name]
    return {
        name: is_trained
        for name, is_trained in trained.items()
        if name not in family.constants and buffers.get(name, True)
    }


def _in_order_of_parameters(weight_map: WeightMap, tensors: Tensors, names: Any) -> Tensors:
    """Returns the reference's tensors in an order in which its parameters are `names`.

    They are returned as they are if that is their order already, or if the reference has other
    parameters than `names`, which may be anything: our own files have them.
    """
    if not isinstance(names, list) or [*_parameters(weight_map, tensors)] == names:
        return tensors
    ranks = {str(name): rank for rank, name in enumerate(names)}
    listed = sorted(tensors, key=lambda name: ranks.get(name, len(ranks)))
    ordered = {name: tensors[name] for name in listed}
    return ordered if [*_parameters(weight_map, ordered)] == names else tensors


def _names_by_index(
    groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, bool]
) -> dict[int, str] | None:
    """Returns the parameter of each optimizer index; None if they do not match.

    An optimizer has either all parameters or only those that are trained.
    """
    indices = [index for group in groups for index in group["params"]]
    named = [name for group in groups for name in group.get("param_names", ())]
    trained = [name for name, is_trained in parameters.items() if is_trained]
    for names in (list(parameters), trained):
        if named and sorted(named) == sorted(names):
            return dict(zip(indices, named, strict=True))
        # Without names the order is known only if there is one group.
        if not named and len(groups) == 1 and len(indices) == len(names):
            return dict(zip(indices, names, strict=True))
    return None


def _moments(
    kind: str, entries: Mapping[str, Mapping[str, Any]], weight_map: WeightMap
) -> dict[str, np.ndarray]:
    shapes, dtype = weight_map.shapes(), weight_map.config.param_dtype
    moments = {}
    for name, entry in entries.items():
        for key in ("step", MEAN, VARIANCE):
            if key not in entry:
                raise UserError(f"Adam's {key} of {name} is missing")
        for key in entry:
            if key not in ("step", MEAN, VARIANCE):
                raise UserError(
                    f"Adam's {key} of {name} is unsupported: our Adam has no such state"
                )
        label = f"{kind} of {name}"
        moment = checkpoint_files.to_numpy(label, entry[kind])
        shape = shapes.get(name, moment.shape)
        if moment.shape != shape:
            raise UserError(f"Adam's {label} has shape {moment.shape}, but must be {shape}")
        if moment.dtype != dtype:
            raise UserError(f"Adam's {label} is {moment.dtype}, the parameters are {dtype}")
        moments[name] = moment
    return moments


def _steps(entries: Mapping[str, Mapping[str, Any]]) -> tuple[int, str]:
    if not entries:
        return 0, "float32"
    counts = {name: _count(name, entry["step"]) for name, entry in entries.items()}
    first = next(iter(counts))
    for name, count in counts.items():
        if count != counts[first]:
            raise UserError(
                f"Adam has made {count} steps on {name}, but {counts[first]} on {first}: it must "
                "be the same number for all parameters"
            )
    is_int = isinstance(entries[first]["step"], int)
    return int(counts[first]), "int" if is_int else counts[first].dtype.name


def _count(name: str, step: Any) -> np.ndarray:
    try:
        count = np.asarray(step)
    except (RuntimeError, TypeError) as error:  # A tensor that numpy has no dtype for.
        raise UserError(f"Adam's step of {name} is not a number") from error
    if count.ndim or count.dtype.kind not in "if":
        raise UserError(f"Adam's step of {name} is not a number")
    return count


def _to_ours(weight_map: WeightMap, moments: Tensors) -> dict[str, Any]:
    dtype, rearranging = weight_map.config.param_dtype, weight_map.rearranging
    zeros = {name: np.zeros(shape, dtype) for name, shape in weight_map.shapes().items()}
    arrays = rearranging.to_ours(zeros | rearranging.with_ties(moments))
    shapes = parameter_shapes(weight_map.config)
    arrays |= {path: np.zeros(shapes[path], dtype) for path in weight_map.mixed}
    tree = unflatten_dict(arrays, sep="/")
    returned = _to_theirs(weight_map, arrays)
    carried = {name: moment for name, moment in moments.items() if name not in returned}
    return tree | {CARRIED: carried} if carried else tree


def _to_theirs(weight_map: WeightMap, arrays: Tensors) -> dict[str, np.ndarray]:
    moments, unread = weight_map.rearranging.to_theirs(arrays), weight_map.unread
    return {name: moment for name, moment in moments if name not in unread}


def _to_state_dict(weight_map: WeightMap, tensors: Tensors, adam: AdamState) -> dict[str, Any]:
    parameters = _parameters(weight_map, tensors)
    groups = list(adam.settings.get("param_groups", [DEFAULT_GROUP | {"params": []}]))
    names = _names_by_index(groups, parameters)
    if names is None:
        # The state comes from a model with other parameters: use the first group's options for all.
        names = dict(enumerate(parameters))
        options = {key: value for key, value in groups[0].items() if key != "param_names"}
        groups = [options | {"params": list(names)}]
    mean = _moments_by_name(weight_map, adam.mean, "mean")
    variance = _moments_by_name(weight_map, adam.variance, "variance")
    step_type = adam.settings.get("step_type", "float32")
    step = adam.step if step_type == "int" else np.array(adam.step, step_type)
    state = {
        index: {"step": step, MEAN: mean[name], VARIANCE: variance[name]}
        for index, name in names.items()
        if adam.step and name in mean
    }
    return {"state": state, "param_groups": groups}


def _moments_by_name(
    weight_map: WeightMap, tree: Mapping[str, Any], what: str
) -> dict[str, np.ndarray]:
    arrays = mapping.by_path(tree)
    validation.check_params(weight_map.config, arrays, f"Adam's {what} of")
    carried = {name: np.asarray(moment) for name, moment in tree.get(CARRIED, {}).items()}
    for path in weight_map.mixed:
        if not carried or arrays[path].any():
            raise UserError(
                f"Adam's {what} of {path} cannot be written for {weight_map.family.name}, which "
                "computes this parameter from others: save without adam"
            )
    return carried | _to_theirs(weight_map, arrays)
