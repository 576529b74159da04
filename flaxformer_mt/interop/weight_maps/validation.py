"""Checks configurations, published tensors and parameters against a family's weight map."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import Tensors, identical
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.mapping import WeightMap
from flaxformer_mt.model.functional import parameter_shapes

FREE_FIELDS = frozenset({
    "source_vocab_size", "target_vocab_size", "d_model", "num_heads", "head_dim", "value_dim",
    "d_ff", "num_encoder_layers", "num_decoder_layers", "max_length", "pad_id", "bos_id", "eos_id",
    "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate", "activation_dropout_rate",
    "kernel_init", "embedding_init", "bias_init", "dtype", "param_dtype", "scan_layers",
    "attention_backend", "norm_backend", "remat",
})  # fmt: skip
"""Fields that no published code fixes. A new field is fixed to its default until it is added."""


def without_groups_of_one(config: TransformerConfig) -> TransformerConfig:
    """Returns the same model with `num_kv_heads=0` if every query has its own key and value."""
    if config.kv_heads != config.num_heads:
        return config
    return dataclasses.replace(config, num_kv_heads=0)


def check_switches(family: Family, config: TransformerConfig) -> None:
    """Raises UserError if a switch has a value that the published code cannot have."""
    config = without_groups_of_one(config)
    published = family.configuration(
        **{name: getattr(config, name) for name in family.open_switches}
    )
    for field in dataclasses.fields(config):
        theirs, ours = getattr(published, field.name), getattr(config, field.name)
        # An open switch differs where its value does not go with those of others.
        if field.name not in FREE_FIELDS and ours != theirs:
            way = "" if family.preset is None else "; if it can, add it to Family.open_switches"
            raise UserError(f"{family.name} has {field.name}={theirs}, not {ours}{way}")
    check_heads(family, config)


def check_ids(config: TransformerConfig) -> None:
    """Raises UserError if a special token is outside the vocabularies, if there are any."""
    for name, given, size in ids_outside(config):
        raise UserError(f"{name}={given} is outside the vocabulary (0 to {size - 1})")


def ids_outside(config: TransformerConfig) -> Iterator[tuple[str, int, int]]:
    """Yields special tokens that a vocabulary lacks: the field, its id, and the vocabulary's size.

    Padding and end must be in both vocabularies. Without vocabularies (V = 0) there is nothing to
    be outside of.
    """
    target = config.target_vocab_size
    both = target
    if config.has_inputs and config.source_vocab_size:
        both = min(target, config.source_vocab_size)
    for name, size in {"pad_id": both, "bos_id": target, "eos_id": both}.items():
        given = getattr(config, name)
        if target and given >= size:
            yield name, given, size


def check_heads(family: Family, config: TransformerConfig) -> None:
    """Raises UserError if the published code cannot have heads of these widths."""
    if family.head_widths == "equal" and config.value_width != config.key_width:
        raise UserError(
            f"{family.name} has value_dim=head_dim, which is {config.key_width}, not "
            f"{config.value_width}"
        )
    width = config.d_model // config.num_heads
    divides = family.head_widths == "rounded" or width * config.num_heads == config.d_model
    for name, ours in (("head_dim", config.key_width), ("value_dim", config.value_width)):
        is_fixed = family.head_widths in ("even", "rounded")
        if is_fixed and not (divides and ours == width):
            raise UserError(
                f"{family.name} has {name}=d_model/num_heads, which is "
                f"{config.d_model}/{config.num_heads}, not {ours}"
            )


def check_tensors(weight_map: WeightMap, tensors: Tensors) -> None:
    """Raises UserError, naming a tensor, unless a checkpoint has exactly those of the map."""
    family, config, shapes = weight_map.family, weight_map.config, weight_map.shapes()
    buffers = {buffer.name: buffer for buffer in family.buffers(config)}
    # A tied tensor may be omitted only if one of the tensors it is tied to is present.
    omitted = family.omitted(config) & (weight_map.with_ties(tensors).keys() | buffers.keys())
    for name in [*shapes, *buffers]:
        if name not in tensors and name not in omitted:
            raise UserError(f"tensor {name} is missing")
    for name, tensor in tensors.items():
        if name not in shapes and name not in buffers:
            raise UserError(f"tensor {name} is unexpected: nothing in the model corresponds to it")
        if name in shapes and tensor.shape != shapes[name]:
            raise UserError(f"tensor {name} has shape {tensor.shape}, but must be {shapes[name]}")
        if name in shapes and not np.isfinite(tensor).all():
            raise UserError(f"tensor {name} has numbers that are not finite")
        exact = name in shapes or buffers[name].exact
        if exact and tensor.dtype != config.param_dtype:
            raise UserError(f"tensor {name} is {tensor.dtype}, the others are {config.param_dtype}")
        if name in buffers and not buffers[name].fits(tensor):
            raise UserError(
                f"tensor {name} is not the table of d_model={config.d_model} and "
                f"position_base={config.position_base}: give position_base=... if it has another"
            )
    for rule, _, _, theirs in weight_map.applications():
        present = [name for name in theirs if name in tensors] if rule.tied else []
        for name in present:
            if not identical(tensors[name], tensors[present[0]]):
                raise UserError(f"{present[0]} and {name} must be equal to be tied, but differ")


def check_sharing(family: Family, config: TransformerConfig, tensors: Mapping[str, Any]) -> None:
    """Raises UserError if a module shares a trained tensor where the family has several.

    A module whose layers are one object has one gradient for all of them; the family has one for
    each. `tensors` is the module's `state_dict(keep_vars=True)`, where a shared tensor is one
    object.
    """
    weight_map = WeightMap.of_tensors(family, config, tensors)
    tied = {
        name: (theirs if rule.tied else (name,))
        for rule, _, _, theirs in weight_map.applications()
        for name in theirs
    }
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name not in tied or not tensor.requires_grad:
            continue
        other = first.setdefault(id(tensor), name)
        if other not in tied[name]:
            raise UserError(
                f"the module's tensors {other} and {name} are one tensor (shared), but "
                f"{family.name} has one for each: give each its own"
            )


def check_params(config: TransformerConfig, arrays: Tensors, what: str = "parameter") -> None:
    """Raises UserError unless arrays are exactly the parameters of a configuration, and finite.

    `what` is what they are called in messages.
    """
    shapes = parameter_shapes(config)
    for path in sorted(shapes.keys() ^ arrays.keys()):
        state = "missing" if path in shapes else "unexpected"
        raise UserError(f"{what} {path} is {state}: these are not the parameters of the config")
    for path, array in arrays.items():
        if array.shape != shapes[path]:
            raise UserError(f"{what} {path} has shape {array.shape}, but must have {shapes[path]}")
        if array.dtype != config.param_dtype:
            raise UserError(f"{what} {path} is {array.dtype}, but must be {config.param_dtype}")
        if not np.isfinite(array).all():
            raise UserError(f"{what} {path} has numbers that are not finite")
