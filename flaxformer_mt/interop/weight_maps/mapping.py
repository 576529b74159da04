"""Applies a family's weight map, in both directions.

Carried tensors
---------------
Some tensors of a reference have no counterpart in our model: buffers, a second linear map that is
folded into the first, an attention that is never used. `interop.load` keeps them in a subtree of
the parameters,

    params["carried"]["<name in the reference>"]

which the model does not read. `interop.save` writes them back, so that reference -> ours ->
reference is byte-identical. A carried tensor that is no longer consistent with the parameters,
because they have been trained since, is ignored: `save` then writes values equivalent to the new
weights, as it does when nothing is carried. An empty array stands for a tensor that the file
omitted, as its writer may (`Family.omitted`); `save` omits it again. Train on
`model_params(params)`, which excludes this subtree.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from flax.traverse_util import flatten_dict

from flaxformer_mt.config import TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import Tensors, identical
from flaxformer_mt.interop.weight_maps import rules
from flaxformer_mt.interop.weight_maps.family import Family
from flaxformer_mt.interop.weight_maps.rules import AppliedRule, TensorRule
from flaxformer_mt.model.functional import parameter_shapes

CARRIED = "carried"
"""Name of the subtree of the parameters that holds carried tensors."""


def by_path(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the model's parameters as numpy arrays by path, without carried tensors."""
    return {
        path: np.asarray(array)
        for path, array in flatten_dict(model_params(params), sep="/").items()
    }


def model_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that the model reads: all but the subtree `carried`."""
    return {name: tree for name, tree in params.items() if name != CARRIED}


@dataclasses.dataclass(frozen=True)
class WeightMap:
    """The rules between the parameters of a configuration and a family's tensors."""

    family: Family
    config: TransformerConfig
    rules: Sequence[TensorRule]

    @classmethod
    def of_tensors(cls, family: Family, config: TransformerConfig, names: Collection[str]) -> Self:
        """Returns the map for a checkpoint with tensors of these names."""
        return cls(family, config, rules_of(family, config, family.layout_of_tensors(names)))

    @property
    def rearranging(self) -> Self:
        """The part of the map by which an optimizer's moments are converted."""
        return dataclasses.replace(self, rules=[rule for rule in self.rules if rule.rearranges])

    @property
    def mixed(self) -> list[str]:
        """Our parameters that are computed from several tensors, or from one that is used twice."""
        return [path for rule in self.rules if not rule.rearranges for path in rule.ours]

    @property
    def unread(self) -> set[str]:
        """The names of tensors that the reference never reads."""
        return {
            name
            for rule, _, _, theirs in self.applications()
            for name, template in zip(theirs, rule.theirs, strict=True)
            if template in rule.unread
        }

    def applications(self) -> Iterator[AppliedRule]:
        """Yields each rule, below the stacks for each layer."""
        depths = {
            "encoder/layers": self.config.num_encoder_layers,
            "decoder/layers": self.config.num_decoder_layers,
        }
        for rule in self.rules:
            stack = "/".join(rule.ours[0].split("/")[:2])
            if stack not in depths:
                yield AppliedRule(rule, None, rule.ours, rule.theirs)
                continue
            for layer in range(depths[stack]):
                names = (name.format(layer=layer, number=layer + 1) for name in rule.theirs)
                yield AppliedRule(rule, layer, rule.ours, tuple(names))

    def with_ties(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `tensors` completed with the omitted names of tied tensors."""
        complete = dict(tensors)
        for rule, _, _, theirs in self.applications():
            present = [name for name in theirs if name in tensors]
            if rule.tied and present:
                complete |= {name: tensors[present[0]] for name in theirs if name not in tensors}
        return complete

    def to_ours(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns our arrays by path, see `rules.to_ours`."""
        return rules.to_ours(self.applications(), tensors)

    def to_theirs(self, arrays: Tensors) -> Iterator[tuple[str, np.ndarray]]:
        """Yields names and values of the tensors that the rules write for our arrays."""
        for applied in self.applications():
            yield from applied.written(arrays)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor that the rules write, by name; buffers are excluded."""
        # Broadcast zeros take no memory; only their shapes matter.
        zeros = {
            path: np.broadcast_to(np.float32(0), shape)
            for path, shape in parameter_shapes(self.config).items()
        }
        return {name: tensor.shape for name, tensor in self.to_theirs(zeros)}


def rules_of(family: Family, config: TransformerConfig, layout: str) -> list[TensorRule]:
    """Returns the rules of a family for the parameters of a model.

    Layers alone, whose vocabularies have size 0, lack parameters that most families need: their
    rules stay.
    """
    own = parameter_shapes(with_vocabulary_sizes(config, 1, 1)).keys()
    return [rule for rule in family.rules(config, layout) if own >= {*rule.ours}]


def to_reference(
    family: Family, config: TransformerConfig, arrays: Tensors, carried: Tensors
) -> dict[str, np.ndarray]:
    """Returns the reference's tensors by name, given ours by path.

    A carried tensor is used if it is consistent with `arrays`. UserError if the family has no
    counterpart for one of our parameters, or needs one that is missing.
    """
    tensors: dict[str, np.ndarray] = {}
    own_rules = rules_of(family, config, family.layout_of_params(arrays, carried))
    mapped = {path for rule in own_rules for path in rule.ours}
    for path in sorted(arrays.keys() - mapped):
        raise UserError(f"{family.name} has no counterpart for parameter {path}")
    for path in sorted(mapped - arrays.keys()):
        raise UserError(f"{family.name} needs parameter {path}, which is missing")
    omitted = {name for name, tensor in carried.items() if not tensor.size}
    kept_tensors = {name: tensor for name, tensor in carried.items() if tensor.size}
    for applied in WeightMap(family, config, own_rules).applications():
        new = dict(applied.written(arrays))
        kept = {name: kept_tensors.get(name, tensor) for name, tensor in new.items()}
        again = applied.rule.to_ours(*kept.values())
        tensors |= kept if all(map(identical, again, applied.own(arrays))) else new
    dtype = next(iter(arrays.values())).dtype
    for buffer in family.buffers(config):
        tensor = kept_tensors.get(buffer.name)
        if tensor is None or not buffer.fits(tensor):
            tensor = buffer.table(buffer.rows).astype(dtype)
        tensors[buffer.name] = tensor
    # A constant that the file omitted may have been trained.
    omitted -= {name for name in family.constants & omitted if tensors[name].any()}
    return {name: tensors[name] for name in in_order(family, tensors) if name not in omitted}


def in_order(family: Family, names: Collection[str]) -> list[str]:
    """Returns names sorted as PyTorch lists them: a module's own tensors, then its submodules'."""
    ranks = {part: rank for rank, part in enumerate(family.order)}

    def rank(part: str) -> int:
        return int(part) if part.isdigit() else ranks.get(part, len(ranks))

    def key(name: str) -> list[tuple[bool, int]]:
        *modules, tensor = name.split(".")
        return [*((True, rank(part)) for part in modules), (False, rank(tensor))]

    return sorted(names, key=key)
