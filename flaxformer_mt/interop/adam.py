"""Carries Adam's state between a published checkpoint and trees like our parameters.

PyTorch's `Adam.state_dict()` is {"state": {index: {"step", "exp_avg", "exp_avg_sq"}},
"param_groups": [...]}. The index counts parameters as `torch.nn.Module.named_parameters` lists
them: in the order of the state dict, without buffers, a tied parameter once. One that no gradient
has reached has no entry.

Moments go where the parameter goes, by the family's own rules. Where a rule mixes several tensors,
or uses one twice, no moments of ours say the same as theirs: ours are zero there, and the originals
are carried in `mean["carried"]` and `variance["carried"]`, by name, as in the parameters. So are
those of a parameter that the reference never reads.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import checkpoint_files as files
from flaxformer_mt.interop import weights
from flaxformer_mt.interop.checkpoint_files import Checkpoint, Tensors
from flaxformer_mt.interop.rules import Family, Rule
from flaxformer_mt.interop.weights import CARRIED

MEAN, VARIANCE = "exp_avg", "exp_avg_sq"

# What `torch.optim.Adam` takes if it is given no options.
DEFAULT_GROUP = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
    "fused": None, "decoupled_weight_decay": False,
}  # fmt: skip


class AdamState(NamedTuple):
    """What Adam remembers of the steps that it has made."""

    step: int
    """Steps made."""
    mean: dict[str, Any]
    """Moving averages of gradients, not corrected for their start from zero: a tree like the
    parameters, in their dtype."""
    variance: dict[str, Any]
    """The same of squared gradients."""
    settings: Mapping[str, Any] = {}
    """What has no place in our optimizer: PyTorch's "param_groups", and "step_type", the dtype in
    which it counts steps ("int" where that is no tensor)."""


class TrainingState(NamedTuple):
    """A published checkpoint in our terms."""

    config: TransformerConfig
    params: dict[str, Any]
    """As `interop.load` gives them."""
    adam: AdamState | None
    """None if there is no optimizer's state in the checkpoint."""
    notes: tuple[str, ...] = ()
    """What the reader should know about it, a line each."""


def load_training(
    family: Family, source: str | os.PathLike[str] | Mapping[str, Any], overrides: dict[str, Any]
) -> TrainingState:
    """What `interop.load_training` does, for a family's map."""
    with weights.refusals_name(source, family.name):
        checkpoint = files.read(source)
        config, params = weights.from_checkpoint(family, checkpoint, overrides)
        if checkpoint.optimizer is None:
            return TrainingState(config, params, None)
        adam = _read(family, config, checkpoint)
    paths = unmoved_paths(weights.rules_for(family, config, checkpoint.tensors))
    notes = (
        f"Adam's moments of {', '.join(paths)} start at zero: {family.name} computes these from "
        "other parameters, whose moments are carried",
    )
    return TrainingState(config, params, adam, notes if paths and adam.step else ())


def save(
    family: Family,
    config: TransformerConfig,
    params: Mapping[str, Any],
    adam: AdamState,
    path: str | os.PathLike[str],
) -> None:
    """What `interop.save` does with Adam's state, for a family's map."""
    if Path(path).suffix == ".safetensors":
        raise UserError(f"{path}: PyTorch reads Adam's state from .pt files only: give it .pt")
    tensors = weights.to_state_dict(family, config, params)
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in ("model", *family.parts)}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part in family.parts:
            parts[part][rest] = tensor
        else:
            parts["model"][name] = tensor
    optimizer = _to_state_dict(family, config, tensors, adam)
    files.write_torch(Path(path), {**parts, family.optimizer_key: optimizer})


def unmoved_paths(rules: Sequence[Rule]) -> list[str]:
    """Those of our parameters whose moments are no rearrangement of the reference's."""
    return [path for rule in rules if not rule.rearranges for path in rule.ours]


def _read(family: Family, config: TransformerConfig, checkpoint: Checkpoint) -> AdamState:
    """The state in a checkpoint whose tensors go with `config`.

    Raises:
      UserError: it is not Adam's; a moment is missing, left over, or of the wrong shape or dtype;
        parameters have made different numbers of steps.
    """
    groups, state = _groups_and_state(checkpoint.optimizer)
    rules = weights.rules_for(family, config, checkpoint.tensors)
    parameters = _parameters(family, rules, config, checkpoint.tensors)
    names = _names_by_index(groups, parameters)
    if names is None:
        raise UserError(
            "the optimizer has other parameters than the model, or several groups without names"
        )
    entries: dict[str, Mapping[str, Any]] = {}
    for index, entry in state.items():
        if index not in names:
            raise UserError(f"entry {index} of the optimizer's state is left over")
        entries[names[index]] = entry
    shapes = weights.reference_shapes(rules, config)
    moments = {
        kind: {
            name: _moment(kind, name, entry, shapes.get(name), config)
            for name, entry in entries.items()
        }
        for kind in (MEAN, VARIANCE)
    }
    for name, is_trained in parameters.items():
        if entries and is_trained and name not in entries:
            raise UserError(f"Adam's moments of {name} are missing")
    step, step_type = _steps(entries)
    return AdamState(
        step,
        _to_ours(rules, config, moments[MEAN]),
        _to_ours(rules, config, moments[VARIANCE]),
        {"param_groups": groups, "step_type": step_type},
    )


def _groups_and_state(optimizer: Any) -> tuple[list[Any], Mapping[Any, Any]]:
    """The two parts of an optimizer's state dict."""
    # OpenNMT's own optimizer has PyTorch's inside.
    optimizer = optimizer.get("optimizer", optimizer)
    match optimizer:
        case {"param_groups": [*groups], "state": {**state}} if all(
            isinstance(group, Mapping) and "params" in group for group in groups
        ) and all(isinstance(entry, Mapping) for entry in state.values()):
            return groups, state
    raise UserError("the optimizer's state is not that of a torch.optim.Adam")


def _parameters(
    family: Family, rules: Sequence[Rule], config: TransformerConfig, tensors: Tensors
) -> dict[str, bool]:
    """The reference's parameters, as PyTorch lists them, and whether gradients reach each."""
    buffers = {buffer.name: buffer.is_parameter for buffer in family.buffers(config)}
    names = {name for _, _, theirs in weights.applications(rules, config) for name in theirs}
    complete = names | buffers.keys()
    # A file that holds everything is in the order of the very model that it comes from.
    is_complete = tensors.keys() >= complete
    listed = [*tensors] if is_complete else weights.in_order(family, complete)
    trained = {name: name not in buffers for name in listed}
    for rule, _, theirs in weights.applications(rules, config):
        trained |= {
            name: False
            for name, template in zip(theirs, rule.theirs, strict=True)
            if template in rule.unread
        }
        if rule.tied:
            for name in sorted(theirs, key=listed.index)[1:]:
                del trained[name]
    return {
        name: is_trained
        for name, is_trained in trained.items()
        if name not in family.constants and buffers.get(name, True)
    }


def _names_by_index(
    groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, bool]
) -> dict[int, str] | None:
    """Which parameter each index of the optimizer means; None if the two do not go together.

    An optimizer has all parameters, or only those that are trained.
    """
    indices = [index for group in groups for index in group["params"]]
    named = [name for group in groups for name in group.get("param_names", ())]
    trained = [name for name, is_trained in parameters.items() if is_trained]
    for names in (list(parameters), trained):
        if named and sorted(named) == sorted(names):
            return dict(zip(indices, named, strict=True))
        # Without names the groups must not have changed the order.
        if not named and len(groups) == 1 and len(indices) == len(names):
            return dict(zip(indices, names, strict=True))
    return None


def _moment(
    kind: str,
    name: str,
    entry: Mapping[str, Any],
    shape: tuple[int, ...] | None,
    config: TransformerConfig,
) -> np.ndarray:
    """The moment of one parameter, checked; a parameter without shape is none of the map's."""
    for key in ("step", MEAN, VARIANCE):
        if key not in entry:
            raise UserError(f"Adam's {key} of {name} is missing")
    for key in entry:
        if key not in ("step", MEAN, VARIANCE):
            raise UserError(f"Adam's {key} of {name} is left over: there is no such thing in ours")
    moment = files.to_numpy(f"{kind} of {name}", entry[kind])
    if shape is not None and moment.shape != shape:
        raise UserError(f"Adam's {kind} of {name} has shape {moment.shape}, but should be {shape}")
    if moment.dtype != config.param_dtype:
        raise UserError(
            f"Adam's {kind} of {name} is {moment.dtype}, the parameters are {config.param_dtype}"
        )
    return moment


def _steps(entries: Mapping[str, Mapping[str, Any]]) -> tuple[int, str]:
    """The number of steps that all parameters have made, and the type that it is kept in."""
    if not entries:
        return 0, "float32"
    counts = {name: np.asarray(entry["step"]) for name, entry in entries.items()}
    first = next(iter(counts))
    for name, count in counts.items():
        if count.ndim or count.dtype.kind not in "if":
            raise UserError(f"Adam's step of {name} is no number")
        if count != counts[first]:
            raise UserError(
                f"Adam has made {count} steps on {name}, but {counts[first]} on {first}: ours "
                "makes the same number on all parameters"
            )
    is_int = isinstance(entries[first]["step"], int)
    return int(counts[first]), "int" if is_int else counts[first].dtype.name


def _to_ours(rules: Sequence[Rule], config: TransformerConfig, moments: Tensors) -> dict[str, Any]:
    """A tree of moments like the parameters, from those that the reference has, by name."""
    moved = [rule for rule in rules if rule.rearranges]
    shapes = weights.reference_shapes(rules, config)
    zeros = {name: np.zeros(shape, config.param_dtype) for name, shape in shapes.items()}
    arrays = weights.from_reference(
        moved, config, zeros | weights.with_ties(moved, config, moments)
    )
    ours = weights.parameter_shapes(config)
    arrays |= {path: np.zeros(ours[path], config.param_dtype) for path in unmoved_paths(rules)}
    tree = unflatten_dict(arrays, sep="/")
    returned = _to_theirs(moved, config, arrays)
    carried = {name: moment for name, moment in moments.items() if name not in returned}
    return tree | {CARRIED: carried} if carried else tree


def _to_theirs(
    rules: Sequence[Rule], config: TransformerConfig, arrays: Tensors
) -> dict[str, np.ndarray]:
    """The inverse: by name, from moments by path, without those of parameters that are not read."""
    return {
        name: moment
        for rule, layer, theirs in weights.applications(rules, config)
        for name, template, moment in zip(
            theirs,
            rule.theirs,
            rule.to_theirs(
                *(arrays[path] if layer is None else arrays[path][layer] for path in rule.ours)
            ),
            strict=True,
        )
        if template not in rule.unread
    }


def _to_state_dict(
    family: Family, config: TransformerConfig, tensors: Tensors, adam: AdamState
) -> dict[str, Any]:
    """PyTorch's state dict of an Adam over the reference's tensors.

    Raises:
      UserError: the moments are not those of the configuration's parameters, or the reference's
        cannot be told from them.
    """
    rules = weights.rules_for(family, config, tensors)
    parameters = _parameters(family, rules, config, tensors)
    groups = list(adam.settings.get("param_groups", [DEFAULT_GROUP | {"params": []}]))
    names = _names_by_index(groups, parameters)
    if names is None:
        # From a model of other parameters: its options apply to all of this one's.
        names = dict(enumerate(parameters))
        options = {key: value for key, value in groups[0].items() if key != "param_names"}
        groups = [options | {"params": list(names)}]
    mean = _moments_by_name(family, rules, config, adam.mean, "mean")
    variance = _moments_by_name(family, rules, config, adam.variance, "variance")
    state = {
        index: {
            "step": _step(adam),
            MEAN: mean[name],
            VARIANCE: variance[name],
        }
        for index, name in names.items()
        if adam.step and name in mean
    }
    return {"state": state, "param_groups": groups}


def _moments_by_name(
    family: Family,
    rules: Sequence[Rule],
    config: TransformerConfig,
    tree: Mapping[str, Any],
    what: str,
) -> dict[str, np.ndarray]:
    """All moments of one kind that the reference has, from ours and what they carry."""
    arrays = weights.by_path(tree)
    weights.check_params(config, arrays, f"Adam's {what} of")
    carried = {name: np.asarray(moment) for name, moment in tree.get(CARRIED, {}).items()}
    for path in unmoved_paths(rules):
        if not carried or arrays[path].any():
            raise UserError(
                f"Adam's {what} of {path} cannot be written for {family.name}, which computes this "
                "parameter from others: save without adam"
            )
    moved = [rule for rule in rules if rule.rearranges]
    return carried | _to_theirs(moved, config, arrays)


def _step(adam: AdamState) -> int | np.ndarray:
    """The number of steps, in the type that PyTorch keeps it in."""
    step_type = adam.settings.get("step_type", "float32")
    return adam.step if step_type == "int" else np.array(adam.step, step_type)
