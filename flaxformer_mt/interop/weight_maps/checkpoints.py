"""Reads and writes whole checkpoints by a family's weight map."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.fields import bounds_of, check_value, type_hints
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.interop import checkpoint_files, families
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint, identical
from flaxformer_mt.interop.weight_maps import mapping, validation
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.mapping import CARRIED, WeightMap

WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.", "base_model.model.")
"""What wrappers of a module put before all names of its tensors: `torch.nn.DataParallel` and
`DistributedDataParallel`, `torch.compile`, usually a LightningModule, and PEFT."""

# What tensors and settings of unexpected kinds can raise.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def read(family: Family, source: str | os.PathLike[str] | Mapping[str, Any]) -> PublishedCheckpoint:
    """Reads a checkpoint by the family's names: see `checkpoint_files.read`, `unwrapped`."""
    return unwrapped(family, checkpoint_files.read(source, family.ignores))


def unwrapped(family: Family, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
    """Returns a checkpoint by the family's names.

    A prefix (`WRAPPER_PREFIXES`, possibly several) is removed, and `Family.base` added, if the
    names are the family's only then.
    """
    for prefix in _prefixes(checkpoint.tensors):
        inner = checkpoint.without_prefix(prefix)
        of_base = {family.base + name: tensor for name, tensor in inner.tensors.items()}
        for found in (inner, inner._replace(tensors=of_base)):
            if _has_names_of(family, found):
                return found
    return checkpoint


def _prefixes(names: Collection[str]) -> Iterator[str]:
    """Yields "", and then the prefixes that all names have and wrappers add, from the shortest."""
    prefix: str | None = ""
    while prefix is not None:
        yield prefix
        longer = [prefix + each for each in WRAPPER_PREFIXES]
        common = (each for each in longer if all(name.startswith(each) for name in names))
        prefix = next(common, None) if names else None


def _has_names_of(family: Family, checkpoint: PublishedCheckpoint) -> bool:
    try:
        # One head divides any width.
        family.sizes(checkpoint, 1)
    except (UserError, *_DAMAGE):
        return False
    return True


def error_context(source: Any, family: str) -> contextlib.AbstractContextManager[None]:
    """Prefixes the message of a `UserError` with the source and the family it is read as."""
    label = "the state dict" if isinstance(source, Mapping) else source
    return prefixed(f"{label} as {family}: ")


def from_checkpoint(
    family: Family, checkpoint: PublishedCheckpoint, overrides: dict[str, Any]
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Returns the configuration and the parameters, with carried tensors.

    Errors are those of `interop.load`.
    """
    config = configure(family, checkpoint, overrides)
    weight_map = WeightMap.of_tensors(family, config, checkpoint.tensors)
    shapes = weight_map.shapes()
    constants = {name: np.zeros(shapes[name], config.param_dtype) for name in family.constants}
    tensors = constants | dict(checkpoint.tensors)
    validation.check_tensors(weight_map, tensors)
    arrays = weight_map.to_ours(tensors)
    returned = mapping.to_reference(family, config, arrays, {})
    carried = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in returned or not identical(returned[name], tensor)
    }
    may_omit = family.omitted(config) | family.constants
    omitted = returned.keys() & may_omit - checkpoint.tensors.keys()
    carried |= {name: np.empty(0, config.param_dtype) for name in sorted(omitted)}
    params = unflatten_dict(arrays, sep="/")
    return config, params | {CARRIED: carried} if carried else params


def configure(
    family: Family, checkpoint: PublishedCheckpoint, overrides: dict[str, Any]
) -> TransformerConfig:
    """Returns the configuration of a checkpoint; errors as of `interop.load`.

    In decreasing precedence, fields come from the shapes of the tensors, the overrides, the
    checkpoint's settings, and the family's preset.
    """
    if not checkpoint.tensors:
        raise UserError("it contains no tensors")
    given = _guessed(family, checkpoint) | overrides
    _check_types(given)
    if given.get("num_heads", 0) < 1:
        raise UserError(
            "the number of heads cannot be read from the checkpoint: give num_heads=..."
        )
    # The most common dtype; tensors of any other are rejected by name later.
    dtypes = collections.Counter(tensor.dtype.name for tensor in checkpoint.tensors.values())
    dtype = dtypes.most_common(1)[0][0]
    read = {**family.sizes(checkpoint, given["num_heads"]), "param_dtype": dtype}
    for name in sorted(read.keys() & given.keys()):
        if read[name] != given[name]:
            raise UserError(f"{name}={given[name]} was given, but the tensors have {read[name]}")
    config = family.configuration(**{"dtype": dtype} | given | read)
    validation.check_switches(family, config)
    validation.check_ids(config)
    return config


def _guessed(family: Family, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    try:
        return family.guess(checkpoint)
    except _DAMAGE as error:
        raise UserError(f"its settings are damaged: {error!r}") from error


def _check_types(given: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(TransformerConfig):
        if field.name in given:
            hint = type_hints(TransformerConfig)[field.name]
            check_value(given[field.name], hint, bounds_of(field), field.name)


def differentiable(
    family: str | Family, config: TransformerConfig, names: Collection[str]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns our parameters as a differentiable function of a published model's parameters.

    Args:
      family: as for `load`.
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
    family = families.find(family)
    weight_map = WeightMap.of_tensors(family, config, names)
    shapes = weight_map.shapes()
    constants = {name: np.zeros(shapes[name], config.param_dtype) for name in family.constants}
    known = weight_map.with_ties(constants | dict.fromkeys(names))
    for name in shapes:
        if name not in known:
            raise _missing(family, name, shapes, names)

    def to_ours(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return unflatten_dict(weight_map.to_ours(constants | dict(tensors)), sep="/")

    return to_ours


def check_module(family: Family, config: TransformerConfig, tensors: Mapping[str, Any]) -> None:
    """Raises UserError if a module cannot be compared by its tensors' names, after `load`.

    It is a wrapper, or shares a trained tensor where the family has several. `tensors` is its
    `state_dict(keep_vars=True)`.
    """
    differentiable(family, config, tensors)
    validation.check_sharing(family, config, tensors)


def _missing(
    family: Family, name: str, expected: Collection[str], names: Collection[str]
) -> UserError:
    fitting = (
        prefix for prefix in _prefixes(names) if any(prefix + each in names for each in expected)
    )
    if prefix := next(fitting, ""):
        return UserError(
            f"the names of the module's tensors begin with {prefix!r}, which a wrapper adds: give "
            f"the module inside, module.{prefix.removesuffix('.')}"
        )
    return UserError(
        f"tensor {name} of {family.name} is missing from the names, which have a shared tensor "
        "once: if the module shares this one, give each layer its own"
    )


def to_state_dict(
    family: Family, config: TransformerConfig, params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the reference's state dict for our parameters, in the reference's order.

    Raises:
      UserError: the configuration or the parameters are not the family's.
    """
    validation.check_switches(family, config)
    validation.check_ids(config)
    arrays = mapping.by_path(params)
    validation.check_params(config, arrays)
    carried = {name: np.asarray(array) for name, array in params.get(CARRIED, {}).items()}
    return mapping.to_reference(family, config, arrays, carried)
