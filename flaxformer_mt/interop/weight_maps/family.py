"""A family's description: its rules, and how its checkpoints determine a configuration."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import checked
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint, Tensors
from flaxformer_mt.interop.weight_maps.rules import TensorRule
from flaxformer_mt.model import positions
from flaxformer_mt.presets import check_fields, preset

# The error of float32 tables of 5000 positions whose angles were computed in float32, too.
BUFFER_TOLERANCE = 5e-3

TYINGS = {
    (True, True): "all",
    (True, False): "source_target",
    (False, True): "target_output",
    (False, False): "none",
}
"""`tie_embeddings` where the target embedding is tied to that of the source, and to the output."""


class Buffer(NamedTuple):
    """A tensor of the reference that is computed, not learned, and has no counterpart in ours."""

    name: str
    table: Callable[[int], np.ndarray]
    """Returns its values for a number of rows."""
    rows: int
    """The number of rows that the published code has by default."""
    axis: int = 0
    """The axis of the rows."""
    exact: bool = True
    """False: the model reads nothing from it, so any values in any dtype are accepted."""
    is_parameter: bool = False
    """Whether PyTorch lists it among the parameters, as one without gradient."""

    def fits(self, tensor: np.ndarray) -> bool:
        """Returns whether `tensor` is this buffer, with any number of rows."""
        if tensor.ndim <= self.axis:
            return False
        table = self.table(tensor.shape[self.axis])
        return table.shape == tensor.shape and (
            not self.exact or np.allclose(table, tensor, rtol=0, atol=BUFFER_TOLERANCE)
        )


def _no_fields(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    """Returns nothing: no field follows from settings or from equal tensors."""
    return {}


def _no_buffers(config: TransformerConfig) -> list[Buffer]:
    """Returns nothing: no tensor is computed."""
    return []


def _one_layout(names: Collection[str]) -> str:
    """Returns the name of the only layout."""
    return ""


def _one_layout_of_params(arrays: Tensors, carried: Tensors) -> str:
    """Returns the name of the only layout."""
    return ""


def _none_omitted(config: TransformerConfig) -> frozenset[str]:
    """Returns nothing: writers omit no tensor."""
    return frozenset()


@dataclasses.dataclass(frozen=True)
class Family:
    """The weight map of a published model, and how its checkpoints are interpreted."""

    name: str
    sizes: Callable[[PublishedCheckpoint, int], dict[str, Any]]
    """Returns the configuration fields that follow from names and shapes, given the number of
    heads."""
    rules: Callable[[TransformerConfig, str], list[TensorRule]]
    """Returns the rules for a configuration and a layout. Those for parameters that a model of the
    configuration does not have, such as biases and norms, do not apply."""
    guess: Callable[[PublishedCheckpoint], dict[str, Any]] = _no_fields
    """Returns the fields that follow from the checkpoint's settings or from equal tensors."""
    buffers: Callable[[TransformerConfig], list[Buffer]] = _no_buffers
    """Returns the computed tensors."""
    open_switches: frozenset[str] = frozenset()
    """Fields of the mathematics that users of the published code can choose."""
    head_widths: Literal["even", "rounded", "equal", "free"] = "even"
    """Width of a head's queries, keys and values. even: D / H; rounded: D / H, rounded down; equal:
    any, but the same for all; free: any."""
    layout_of_tensors: Callable[[Collection[str]], str] = _one_layout
    """Returns which of several published layouts a checkpoint with these names has."""
    layout_of_params: Callable[[Tensors, Tensors], str] = _one_layout_of_params
    """Returns the layout in which our parameters (by path), with their carried tensors, are
    written."""
    order: tuple[str, ...] = ()
    """The components of names, in the order in which the published modules define them. PyTorch
    numbers parameters in this order, and optimizer states refer to these numbers."""
    omitted: Callable[[TransformerConfig], frozenset[str]] = _none_omitted
    """Returns the names that published writers may omit: buffers, and all but one of tied
    tensors."""
    constants: frozenset[str] = frozenset()
    """Names in `rules` that PyTorch does not list among the parameters: never trained, and zero
    unless present in the checkpoint."""
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Why tensors are left out that libraries write, but the published module does not have, by the
    last component of their names, wherever they are."""
    base: str = ""
    """What names begin with only if the module was saved with its output layer."""
    parts: tuple[str, ...] = ()
    """First components of names whose tensors a training checkpoint stores in separate dicts."""
    optimizer_key: str = "optimizer"
    """Key of the optimizer's state in a training checkpoint."""
    also_reads: str = ""
    """What the published program reads beside the tensors, and `interop.save` does not write, in
    words; "" = nothing."""
    preset: Callable[..., TransformerConfig] | None = None
    """Returns the published configuration with the given fields replaced. None: the preset called
    `name` in `presets.py`. For another family `functools.partial(TransformerConfig, ...)` is
    enough."""

    def ignores(self, name: Any) -> bool:
        """Returns whether a tensor of this name is left out, see `ignored`."""
        return str(name).rpartition(".")[2] in self.ignored

    def configuration(self, **fields: object) -> TransformerConfig:
        """Returns the published configuration with `fields` replaced."""
        if self.preset is None:
            return preset(self.name, **fields)
        check_fields(fields)
        return self.preset(**fields)


def sinusoids(config: TransformerConfig) -> Callable[[int], np.ndarray]:
    """Returns the function from a number of rows to the position table [rows, D] of `config`."""
    return functools.partial(positions.sinusoids, config)


def sinusoid_buffers(
    config: TransformerConfig, *names: str, rows: int = 5000, axis: int = 0
) -> list[Buffer]:
    """Returns tables of sinusoids [rows, 1, D], or [1, rows, D] with `axis` 1."""
    table = sinusoids(config)
    return [
        Buffer(name, lambda rows: np.expand_dims(table(rows), 1 - axis), rows, axis)
        for name in names
    ]


def guess_tying(
    checkpoint: PublishedCheckpoint, source: str | None, target: str, output: str | None
) -> dict[str, str]:
    """Returns `tie_embeddings` for a checkpoint, depending on which tables are equal.

    `source` is None if the reference has no source embedding, `output` if it has no table of its
    own.
    """
    ties_source = source is not None and checkpoint.same(source, target)
    ties_output = output is None or checkpoint.same(output, target)
    return {"tie_embeddings": TYINGS[ties_source, ties_output]}


def check_kinds(
    settings: Mapping[str, Any], kinds: Mapping[str, Any], subject: str = "its settings are"
) -> None:
    """Raises UserError if a setting is neither missing, nor None, nor of its kind, a type."""
    optional = {setting: kind | None for setting, kind in kinds.items()}
    checked(dict(settings), subject, TypedDict("Settings", optional, total=False))  # type: ignore[operator]


def fields_of_settings(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that are configuration fields, renamed by `names` ({theirs: ours})."""
    return {ours: settings[theirs] for theirs, ours in names.items() if theirs in settings}


def activation_of_settings(
    settings: Mapping[str, Any], name: str, activations: Mapping[str, str]
) -> dict[str, str]:
    """Returns `activation` if the settings contain it as `name`, else an empty dict.

    Raises:
      UserError: its value is not a key of `activations`, which maps their names to ours.
    """
    if name not in settings:
        return {}
    if not isinstance(settings[name], str) or settings[name] not in activations:
        raise UserError(f"the model cannot have {name}={settings[name]}, only {[*activations]}")
    return {"activation": activations[settings[name]]}


def check_supported(
    settings: Mapping[str, Any],
    supported: Mapping[str, tuple[Any, ...]],
    spelled: Callable[[Any], str] = str,
) -> None:
    """Checks settings that no tensor shows, but that change what is computed.

    `supported` are the values of each setting that our model has, the default first; `spelled`
    writes a value as the program does.

    Raises:
      UserError: a setting has another value.
    """
    for name, values in supported.items():
        if settings.get(name, values[0]) not in values:
            choices = " or ".join(map(spelled, values))
            raise UserError(
                f"the model cannot have {name}: {spelled(settings[name])}, only {choices}"
            )
