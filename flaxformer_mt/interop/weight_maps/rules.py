"""Rules of a weight map: one or more of our parameters and the tensors that they correspond to.

A weight map is a list of `TensorRule`s, built with the functions below, and with `Layers` from the
names of the modules in the layers. `family.py` adds what else is needed to read a family's
checkpoints.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint

ArrayTuple = tuple[np.ndarray, ...]
"""The arrays on one side of a rule, in the order of its names."""


class TensorRule(NamedTuple):
    """A conversion between some of our parameters and the reference's equivalent tensors.

    Below `encoder/layers` and `decoder/layers` a rule is applied once per layer: our arrays are
    slices without the axis L, and "{layer}" in a name is the layer's index from 0 ("{number}":
    from 1).
    """

    ours: tuple[str, ...]
    """Paths in our parameter tree."""
    theirs: tuple[str, ...]
    """Names in the reference's state dict."""
    to_ours: Callable[..., ArrayTuple]
    """From the tensors of `theirs`, in order, to those of `ours`: numpy arrays or JAX tracers."""
    to_theirs: Callable[..., ArrayTuple]
    """A right inverse: to_ours(to_theirs(x)) = x."""
    tied: bool = False
    """Whether `theirs` are several names of one tensor."""
    rearranges: bool = True
    """Whether every number of ours is one of theirs and occurs once. If so, an optimizer's moments
    are converted as the parameters are."""
    unread: tuple[str, ...] = ()
    """Those of `theirs` that the reference has but never reads: they get no gradient."""


class AppliedRule(NamedTuple):
    """A rule where it is applied: in one layer, or outside of the layers."""

    rule: TensorRule
    layer: int | None
    """The index into the leading axis of our arrays; None if these are not stacked."""
    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def own(self, arrays: Mapping[str, Any]) -> ArrayTuple:
        """Returns our arrays, given those of all paths; of stacked ones the layer's."""
        found = (arrays[path] for path in self.ours)
        return tuple(found if self.layer is None else (stack[self.layer] for stack in found))

    def written(self, arrays: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields names and values of the tensors that are written for our arrays."""
        return zip(self.theirs, self.rule.to_theirs(*self.own(arrays)), strict=True)


def to_ours(rules: Iterable[AppliedRule], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our arrays by path, given the reference's by name: numpy arrays or JAX tracers.

    Of tied tensors, one name is enough.
    """
    arrays: dict[str, Any] = {}
    layers: dict[str, list[Any]] = collections.defaultdict(list)
    for rule, layer, ours, theirs in rules:
        present = next((tensors[name] for name in theirs if name in tensors), None)
        given = [tensors.get(name, present) if rule.tied else tensors[name] for name in theirs]
        for path, array in zip(ours, rule.to_ours(*given), strict=True):
            if layer is None:
                arrays[path] = array
            else:
                layers[path].append(array)
    return arrays | {
        path: slices[0].__array_namespace__().stack(slices) for path, slices in layers.items()
    }


def same(ours: str, theirs: str) -> TensorRule:
    """Returns the rule for one tensor that is equal on both sides.

    Args:
      ours: path of the parameter, such as "encoder/final_norm/scale"; below "encoder/layers" and
        "decoder/layers" its first axis, L, is that of the layers.
      theirs: name of the tensor; "{layer}" is the index of the layer, whose tensor has no axis L.
    """
    return tied(ours, theirs)


def tied(ours: str, *theirs: str) -> TensorRule:
    """Returns the rule for one parameter that the reference has under several names."""
    return TensorRule(
        (ours,),
        theirs,
        lambda *tensors: tensors[:1],
        lambda array: (array,) * len(theirs),
        tied=True,
    )


def transposed(ours: str, theirs: str) -> TensorRule:
    """Returns the rule for a kernel [in, out] that the reference stores as [out, in]."""

    def transpose(matrix: np.ndarray) -> ArrayTuple:
        return (matrix.T,)

    return TensorRule((ours,), (theirs,), transpose, transpose)


def row(ours: str, theirs: str) -> TensorRule:
    """Returns the rule for a vector [D] that the reference stores as [1, D]."""
    return TensorRule(
        (ours,),
        (theirs,),
        lambda row: (row.reshape(-1),),
        lambda vector: (vector.reshape(1, -1),),
    )


def packed(
    ours: Sequence[str], theirs: str, rule: Callable[[str, str], TensorRule], axis: int = 0
) -> TensorRule:
    """Returns the rule for parameters of one shape that the reference concatenates in one tensor.

    `rule` is `same` or `transposed`, applied to each part; `axis` is that of the tensor.
    """
    part = rule(ours[0], theirs)

    def to_ours(tensor: np.ndarray) -> ArrayTuple:
        first = tensor.swapaxes(0, axis)
        parts = first.reshape(len(ours), -1, *first.shape[1:])
        return tuple(part.to_ours(rows.swapaxes(0, axis))[0] for rows in parts)

    def to_theirs(*arrays: np.ndarray) -> ArrayTuple:
        return (np.concatenate([part.to_theirs(array)[0] for array in arrays], axis),)

    return TensorRule(tuple(ours), (theirs,), to_ours, to_theirs)


def used_twice(rule: TensorRule, also_ours: str) -> TensorRule:
    """Returns `rule` extended to a second parameter of ours that uses the same tensor.

    `to_theirs` reads the first parameter only: use it only where both are equal.
    """
    (ours,) = rule.ours
    return TensorRule(
        (ours, also_ours),
        rule.theirs,
        lambda tensor: rule.to_ours(tensor) * 2,
        lambda array, _: rule.to_theirs(array),
        rearranges=False,
    )


def unused(rule: TensorRule, also_theirs: str) -> TensorRule:
    """Returns `rule` extended to a tensor of equal shape that the reference never reads."""
    (theirs,) = rule.theirs
    return TensorRule(
        rule.ours,
        (theirs, also_theirs),
        lambda tensor, _: rule.to_ours(tensor),
        lambda array: rule.to_theirs(array) * 2,
        unread=(also_theirs,),
    )


def linear(ours: str, theirs: str, bias: bool = True) -> list[TensorRule]:
    """Returns the rules for a `torch.nn.Linear`.

    Args:
      ours: path of the module, which has a kernel [in, out] and perhaps a bias [out]; see `same`.
      theirs: name of the module, which has a weight [out, in] and perhaps a bias [out].
      bias: whether there is one.
    """
    rules = [transposed(f"{ours}/kernel", f"{theirs}.weight")]
    if bias:
        rules.append(same(f"{ours}/bias", f"{theirs}.bias"))
    return rules


def norm(ours: str, theirs: str, scale: str = "weight", bias: str = "bias") -> list[TensorRule]:
    """Returns the rules for a layer norm with a scale [D] and a bias [D].

    `scale` and `bias` are the names of its two tensors.
    """
    return [
        same(f"{ours}/scale", f"{theirs}.{scale}"),
        same(f"{ours}/bias", f"{theirs}.{bias}"),
    ]


def embeddings(
    config: TransformerConfig, source: str | None, target: str, output: str | None
) -> list[TensorRule]:
    """Returns the rules for the three [V, D] tables, tied as in `config`.

    `source` is None if the reference has no source embedding, `output` if it has no table of its
    own.
    """
    rules, names = [], [target]
    if source and config.shares_source_and_target:
        names.append(source)
    elif source:
        rules.append(same("source_embedding/embedding", source))
    if output and config.shares_target_and_output:
        names.append(output)
    elif output:
        rules.append(transposed("output/kernel", output))
    return [*rules, tied("target_embedding/embedding", *names)]


STACKS = ("encoder", "decoder")
PROJECTIONS = ("query", "key", "value", "output")


@dataclasses.dataclass(frozen=True)
class Layers:
    """The names of the layers of both stacks.

    Projections are `torch.nn.Linear`s, by default.
    """

    encoder: str
    """What the names in an encoder layer begin with: "encoder.layers.{layer}."."""
    decoder: str
    """The same in a decoder layer."""
    modules: Mapping[str, str]
    """The names of our modules in a layer, such as {"self_attention": "self_attn"}; of attention,
    whatever the names of its projections begin with."""
    encoder_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Those that are named otherwise in an encoder layer."""
    stack_norms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The names of the norms below and above the layers, such as {"final_norm": "{stack}.norm"}."""
    projections: tuple[str, ...] = ()
    """The ends of the names of an attention's projections, in the order of `PROJECTIONS`."""
    linear: Callable[[str, str], list[TensorRule]] = linear
    """Returns the rules of a projection, given our path and its name."""
    norm: Callable[[str, str], list[TensorRule]] = norm
    """Returns the rules of a norm, given our path and its name."""
    attention: Callable[[TransformerConfig, str, str], list[TensorRule]] | None = None
    """Returns the rules of an attention whose projections are not separate modules."""

    def names(self, stack: str) -> dict[str, str]:
        """Returns the names of our modules in a layer of "encoder" or "decoder", with "{layer}"."""
        own = self.encoder_modules if stack == "encoder" else {}
        names = {**self.modules, **own}
        return {ours: getattr(self, stack) + theirs for ours, theirs in names.items()}

    def rules(self, config: TransformerConfig) -> list[TensorRule]:
        """Returns the rules of all modules in both stacks, also of those that a model lacks."""
        names = {
            f"{stack}/layers/{module}": theirs
            for stack in STACKS
            for module, theirs in self.names(stack).items()
        } | {
            f"{stack}/{module}": theirs.format(stack=stack)
            for stack in STACKS
            for module, theirs in self.stack_norms.items()
        }
        return [
            rule
            for ours, theirs in names.items()
            for rule in self._module_rules(config, ours, theirs)
        ]

    def sizes(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        """Returns the fields that follow from the feed-forward network and the layers' numbers."""
        hidden, output = (self._first(f"feed_forward/{part}") for part in ("hidden", "output"))
        scale = self.norm("", self._first("feed_forward_norm"))[0].theirs[0]
        return {
            "d_model": checkpoint.size(
                (f"{hidden}.weight", 1), (f"{output}.weight", 0), (scale, 0)
            ),
            "d_ff": checkpoint.size(*_rows(hidden), (f"{output}.weight", 1)),
            "num_encoder_layers": checkpoint.num_layers(self.encoder.partition("{")[0]),
            "num_decoder_layers": checkpoint.num_layers(self.decoder.partition("{")[0]),
        }

    def sizes_of_model(
        self, source: Sequence[str], target: Sequence[str], free_heads: bool = False
    ) -> Callable[[PublishedCheckpoint, int], dict[str, Any]]:
        """Returns `Family.sizes` of a model: `sizes`, those of vocabularies, and of free heads.

        `source` and `target` are tensors with one row per token, of which a file may omit some.
        """

        def found(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
            fields = self.sizes(checkpoint)
            for side, names in (("source", source), ("target", target)):
                fields[f"{side}_vocab_size"] = checkpoint.size(*((name, 0) for name in names))
            if free_heads:
                fields["head_dim"] = self.key_width(checkpoint, num_heads)
                fields["value_dim"] = self.value_width(checkpoint, num_heads)
            return fields

        return found

    def key_width(self, checkpoint: PublishedCheckpoint, num_heads: int) -> int:
        """Returns the width of a head's queries and keys."""
        query, key, _, _ = self._first_projections()
        return head_width(checkpoint.size(*_rows(query), (f"{key}.weight", 0)), num_heads)

    def value_width(self, checkpoint: PublishedCheckpoint, num_heads: int) -> int:
        """Returns the width of a head's values."""
        *_, value, output = self._first_projections()
        return head_width(checkpoint.size(*_rows(value), (f"{output}.weight", 1)), num_heads)

    def _module_rules(self, config: TransformerConfig, ours: str, theirs: str) -> list[TensorRule]:
        if ours.endswith("norm"):
            return self.norm(ours, theirs)
        if not ours.endswith("attention"):
            return self.linear(ours, theirs)
        if self.attention is not None:
            return self.attention(config, ours, theirs)
        return [
            rule
            for part, name in zip(PROJECTIONS, self.projections, strict=True)
            for rule in self.linear(f"{ours}/{part}", theirs + name)
        ]

    def _first(self, module: str) -> str:
        return self.decoder.format(layer=0) + self.modules[module]

    def _first_projections(self) -> list[str]:
        return [self._first("self_attention") + name for name in self.projections]


def _rows(name: str) -> list[tuple[str, int]]:
    """Returns the tensors of a `torch.nn.Linear` that tell the number of its outputs."""
    return [(f"{name}.weight", 0), (f"{name}.bias", 0)]


def head_width(features: int, num_heads: int) -> int:
    """Returns the width of one of `num_heads` heads, which have to divide the features."""
    if features % num_heads:
        raise UserError(f"num_heads={num_heads} does not divide the {features} rows of the heads")
    return features // num_heads
