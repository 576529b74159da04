"""The vocabulary of weight maps: what a family's file is written in.

A map is a list of `Rule`s: which of our parameters, which of the reference's tensors, and how to
get from each side to the other. `Family` adds what a checkpoint tells about its configuration. What
is done with a map, `weights.py` knows.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import Checkpoint, Tensors
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.presets import check_fields, preset

Arrays = tuple[np.ndarray, ...]

# float32 tables of 5000 positions are off by that much where their angles were float32, too.
BUFFER_TOLERANCE = 5e-3


class Rule(NamedTuple):
    """Some of our parameters, the reference's tensors that say the same, and the maps between.

    Below `encoder/layers` and `decoder/layers` a rule is applied once a layer: our arrays are
    slices without the axis L, and "{layer}" in a name is the layer's index ("{number}": from 1).
    """

    ours: tuple[str, ...]
    """Paths in our parameter tree."""
    theirs: tuple[str, ...]
    """Names in the reference's state dict."""
    to_ours: Callable[..., Arrays]
    """From the tensors of `theirs`, in order, to those of `ours`: numpy arrays, or JAX's while
    they are traced."""
    to_theirs: Callable[..., Arrays]
    """A right inverse: to_ours(to_theirs(x)) = x."""
    tied: bool = False
    """Whether `theirs` are names of one tensor."""
    rearranges: bool = True
    """Whether every number of ours is one of theirs, and used nowhere else. Then what an optimizer
    has noted about a number moves with it."""
    unread: tuple[str, ...] = ()
    """Those of `theirs` that the reference has but never reads: no gradient reaches them."""


class Buffer(NamedTuple):
    """A tensor of the reference that is computed, not learned, and so needs no place in ours."""

    name: str
    table: Callable[[int], np.ndarray]
    """Its values for a number of rows."""
    rows: int
    """As many as the published code has by default."""
    axis: int = 0
    """The axis along which the rows stand."""
    exact: bool = True
    """False: it says nothing that the model reads, so any values in any dtype will do."""
    is_parameter: bool = False
    """Whether PyTorch counts it among the parameters, as one that gets no gradient."""

    def fits(self, tensor: np.ndarray) -> bool:
        """Whether `tensor` is this buffer, with whatever number of rows."""
        if tensor.ndim <= self.axis:
            return False
        table = self.table(tensor.shape[self.axis])
        return table.shape == tensor.shape and (
            not self.exact or np.allclose(table, tensor, rtol=0, atol=BUFFER_TOLERANCE)
        )


def _no_guess(checkpoint: Checkpoint) -> dict[str, Any]:
    return {}


def _no_buffers(config: TransformerConfig) -> list[Buffer]:
    return []


def _one_layout(*of: Collection[str]) -> str:
    return ""


def _nothing_omitted(config: TransformerConfig) -> frozenset[str]:
    return frozenset()


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's checkpoints are read and written."""

    name: str
    sizes: Callable[[Checkpoint, int], dict[str, Any]]
    """The configuration fields that names and shapes tell, given the number of heads."""
    rules: Callable[[TransformerConfig, str], list[Rule]]
    """The map, for a configuration and a layout."""
    guess: Callable[[Checkpoint], dict[str, Any]] = _no_guess
    """Fields that the checkpoint suggests otherwise: by its settings, by tensors being equal."""
    buffers: Callable[[TransformerConfig], list[Buffer]] = _no_buffers
    """The computed tensors."""
    open_switches: frozenset[str] = frozenset()
    """Fields of the mathematics that the published code lets its user choose."""
    head_widths: Literal["even", "rounded", "free"] = "even"
    """How wide a head's queries, keys and values are. even: D / H; rounded: D / H, rounded down;
    free: anything."""
    layout_of_tensors: Callable[[Collection[str]], str] = _one_layout
    """Which of several published arrangements a checkpoint with these names has."""
    layout_of_params: Callable[[Tensors, Tensors], str] = _one_layout
    """Which of them our parameters (by path), with what they carry, are written in."""
    order: tuple[str, ...] = ()
    """The parts of names, in the order in which the published modules define them. PyTorch counts
    parameters in this order, and optimizer states go by that count."""
    omitted: Callable[[TransformerConfig], frozenset[str]] = _nothing_omitted
    """Names that published writers may leave out: of buffers, and all but one of tied tensors."""
    constants: frozenset[str] = frozenset()
    """Names in `rules` that PyTorch does not count among the parameters: zero unless a checkpoint
    says otherwise, and never trained."""
    parts: tuple[str, ...] = ()
    """First parts of names whose tensors a training checkpoint keeps beside the other tensors."""
    optimizer_key: str = "optimizer"
    """Where a training checkpoint keeps the optimizer's state."""
    preset: Callable[..., TransformerConfig] | None = None
    """The published configuration, given fields with other values: that of `name` in `presets.py`,
    unless the family brings its own (`functools.partial(TransformerConfig, ...)` will do)."""

    def configuration(self, **fields: Any) -> TransformerConfig:
        """The published configuration, but for `fields`."""
        if self.preset is None:
            return preset(self.name, **fields)
        check_fields(fields)
        return self.preset(**fields)


# The vocabulary of maps.


def same(ours: str, theirs: str) -> Rule:
    """One tensor, as it is."""
    return tied(ours, theirs)


def tied(ours: str, *theirs: str) -> Rule:
    """One parameter that the reference has under several names."""
    return Rule(
        (ours,),
        theirs,
        lambda *tensors: tensors[:1],
        lambda array: (array,) * len(theirs),
        tied=True,
    )


def transposed(ours: str, theirs: str) -> Rule:
    """A kernel [in, out] that the reference has as [out, in]."""

    def transpose(matrix: np.ndarray) -> Arrays:
        return (matrix.T,)

    return Rule((ours,), (theirs,), transpose, transpose)


def packed(ours: Sequence[str], theirs: str, rule: Callable[[str, str], Rule]) -> Rule:
    """Parameters that the reference has in one tensor, one under the other.

    Args:
      ours: paths, all of one shape.
      theirs: the name.
      rule: `same` or `transposed`, what to do with each part.
    """
    part = rule(ours[0], theirs)

    def to_ours(tensor: np.ndarray) -> Arrays:
        parts = tensor.reshape(len(ours), -1, *tensor.shape[1:])
        return tuple(part.to_ours(rows)[0] for rows in parts)

    def to_theirs(*arrays: np.ndarray) -> Arrays:
        return (np.concatenate([part.to_theirs(array)[0] for array in arrays]),)

    return Rule(tuple(ours), (theirs,), to_ours, to_theirs)


def used_twice(rule: Rule, also_ours: str) -> Rule:
    """`rule`, for a tensor that does the work of two of our parameters.

    On the way back the first one counts: write only parameters so that are equal.
    """
    (ours,) = rule.ours
    return Rule(
        (ours, also_ours),
        rule.theirs,
        lambda tensor: rule.to_ours(tensor) * 2,
        lambda array, _: rule.to_theirs(array),
        rearranges=False,
    )


def unused(rule: Rule, also_theirs: str) -> Rule:
    """`rule`, and a tensor of the same shape that the reference has but never reads."""
    (theirs,) = rule.theirs
    return Rule(
        rule.ours,
        (theirs, also_theirs),
        lambda tensor, _: rule.to_ours(tensor),
        lambda array: rule.to_theirs(array) * 2,
        unread=(also_theirs,),
    )


def linear(ours: str, theirs: str, bias: bool) -> list[Rule]:
    """A `torch.nn.Linear`."""
    rules = [transposed(f"{ours}/kernel", f"{theirs}.weight")]
    if bias:
        rules.append(same(f"{ours}/bias", f"{theirs}.bias"))
    return rules


def norm(ours: str, theirs: str, scale: str = "weight", bias: str = "bias") -> list[Rule]:
    """A layer norm, by default a `torch.nn.LayerNorm`."""
    return [
        same(f"{ours}/scale", f"{theirs}.{scale}"),
        same(f"{ours}/bias", f"{theirs}.{bias}"),
    ]


def embeddings(
    config: TransformerConfig, source: str | None, target: str, output: str | None
) -> list[Rule]:
    """The three [V, D] tables, tied as `config` says.

    Args:
      config: says what is tied.
      source: name of the source embedding; None if the reference has none.
      target: name of the target embedding.
      output: name of the output projection; None if the reference has none of its own.
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


def sinusoids(config: TransformerConfig) -> Callable[[int], np.ndarray]:
    """The function that gives the table [rows, D] of the configuration's position encoding."""
    return functools.partial(
        sinusoidal_table,
        d_model=config.d_model,
        base=config.position_base,
        layout=config.position_layout,
        exponent=config.position_exponent,
        offset=config.position_offset,
    )


# What a checkpoint says about its configuration.


def guess_tying(
    checkpoint: Checkpoint, source: str | None, target: str, output: str | None
) -> dict[str, str]:
    """`tie_embeddings`, from which tables are equal; an output of None is always the target's."""
    ties_source = source is not None and checkpoint.same(source, target)
    ties_output = output is None or checkpoint.same(output, target)
    tied_tables = {
        (True, True): "all",
        (True, False): "source_target",
        (False, True): "target_output",
        (False, False): "none",
    }
    return {"tie_embeddings": tied_tables[ties_source, ties_output]}


def fields_of_settings(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Configuration fields that settings have under other names: {theirs: ours}."""
    return {ours: settings[theirs] for theirs, ours in names.items() if theirs in settings}


def activation_of_settings(
    settings: Mapping[str, Any], name: str, activations: Mapping[str, str]
) -> dict[str, str]:
    """`activation`, if the settings have it under `name`, which says it in words of its own.

    Raises:
      UserError: it is none of these words.
    """
    if name not in settings:
        return {}
    if settings[name] not in activations:
        raise UserError(f"the model cannot have {name}={settings[name]}, only {[*activations]}")
    return {"activation": activations[settings[name]]}


def head_width(features: int, num_heads: int) -> int:
    """The width of one of `num_heads` heads whose projection has `features` rows."""
    if features % num_heads:
        raise UserError(f"num_heads={num_heads} does not divide the {features} rows of the heads")
    return features // num_heads
