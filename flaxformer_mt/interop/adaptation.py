"""Adapts parameters to the mathematics of another family.

Where the two differ in a switch, either equivalent weights exist (a missing bias is a bias of
zeros), or the conversion is rejected: it never changes what the model computes. The exception is
`norm_epsilon`, if the caller accepts it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.model import DOT_PRODUCT
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps import mapping, validation
from flaxformer_mt.interop.weight_maps.adam_state import TrainingState
from flaxformer_mt.interop.weight_maps.family import Family, sinusoids
from flaxformer_mt.interop.weight_maps.mapping import CARRIED
from flaxformer_mt.model.functional import parameter_shapes
from flaxformer_mt.model.positions import POSITION_KINDS
from flaxformer_mt.model.transformer import ZERO_VECTOR

ArraysByPath = dict[str, np.ndarray]
Change = Callable[[ArraysByPath], ArraysByPath]

EMBEDDINGS = ("source_embedding/embedding", "target_embedding/embedding")
POSITIONS = ("source_positions/embedding", "target_positions/embedding")
OUTPUT, BIAS = "output/kernel", "output/bias"

SINUSOID_SWITCHES = ("position_layout", "position_exponent", "position_base", "position_offset")
BIAS_SWITCHES = ("qkv_bias", "attention_output_bias", "feed_forward_bias", "output_bias")
# Switches without meaning for layers without embeddings (V = 0).
OUTSIDE_OF_LAYERS = {
    "position_kind", *SINUSOID_SWITCHES, "scale_embeddings", "scale_logits", "tie_embeddings",
    "zero_pad_embeddings", "mask_target_padding", "output_bias",
}  # fmt: skip
ADAPTABLE = OUTSIDE_OF_LAYERS | {"norm_epsilon", *BIAS_SWITCHES}


class AdaptationStep(NamedTuple):
    """One change of the parameters."""

    note: str
    """What is changed, in one line."""
    change: Change = lambda arrays: arrays
    change_moments: Change | None = lambda moments: moments
    """The same for Adam's moments; None if there are no equivalent moments."""


class Conversion(NamedTuple):
    """The two configurations of a conversion."""

    ours: TransformerConfig
    """The configuration of the parameters."""
    theirs: TransformerConfig
    """The closest configuration of `family`."""
    family: Family
    accepted: Collection[str]
    """See `adapt`."""

    def differ_in(self, name: str) -> bool:
        """Returns whether the configurations differ in this switch."""
        return getattr(self.ours, name) != getattr(self.theirs, name)

    def note(self, name: str, rest: str) -> str:
        """Returns a note on a switch: "qkv_bias=False becomes True: ..."."""
        return f"{name}={getattr(self.ours, name)} becomes {getattr(self.theirs, name)}: {rest}"

    def error(self, name: str, rest: str) -> UserError:
        """Returns the error for a switch: "norm_position=post cannot be converted to pre: ..."."""
        ours, theirs = getattr(self.ours, name), getattr(self.theirs, name)
        return UserError(f"{name}={ours} cannot be converted to {theirs}: {rest}")

    @property
    def sinusoids_differ(self) -> bool:
        """Whether both configurations have sinusoids, but different ones."""
        return self.ours.position_kind == self.theirs.position_kind == "sinusoidal" and any(
            map(self.differ_in, SINUSOID_SWITCHES)
        )


def check_adaptable(config: TransformerConfig, family: Family) -> None:
    """Checks what `adapt` requires of a configuration, assuming that no tables are equal.

    Raises:
      UserError: the families differ in a switch, and no equivalent weights exist.
    """
    conversion = _closest_configuration(config, family, ())
    _check_compatible(conversion)
    for tie in ("shares_source_and_target", "shares_target_and_output"):
        if getattr(conversion.theirs, tie) and not getattr(config, tie):
            raise conversion.error("tie_embeddings", "its tables are not equal")
    for find_steps in (_epsilon, _scales):
        list(find_steps(conversion, {}))


def adapt(state: TrainingState, family: Family, accepted: Collection[str] = ()) -> TrainingState:
    """Converts parameters to equivalent parameters of another family, without carried tensors.

    `accepted` are switches in which the result may differ slightly: "norm_epsilon" or nothing.

    Returns:
      The other family's configuration and parameters, Adam's state if its moments can be converted,
      and one-line notes on the changes.

    Raises:
      UserError: the families differ in a switch, and no equivalent weights exist.
    """
    arrays = mapping.by_path(state.params)
    validation.check_params(state.config, arrays)
    conversion = _closest_configuration(state.config, family, accepted)
    _check_compatible(conversion)
    steps: list[AdaptationStep] = []
    for find_steps in (_epsilon, _ties, _scales, _positions, _biases, _padding, _start):
        for step in find_steps(conversion, arrays):
            arrays = step.change(arrays)
            steps.append(step)
    notes = tuple(step.note for step in steps)
    rules = mapping.rules_of(family, conversion.theirs, family.layout_of_params(arrays, {}))
    obstacles = [step.note for step in steps if step.change_moments is None]
    if not all(rule.rearranges for rule in rules):
        obstacles.append(f"{family.name} computes some parameters from others")
    if state.adam is not None and CARRIED in state.adam.mean:
        obstacles.append("some of them are carried")
    adam = None
    if state.adam is not None and obstacles:
        notes += (f"Adam's state is dropped, its moments cannot be converted: {obstacles[0]}",)
    elif state.adam is not None:
        moments = (state.adam.mean, state.adam.variance)
        mean, variance = (_changed_moments(steps, tree) for tree in moments)
        adam = state.adam._replace(mean=mean, variance=variance)
    return TrainingState(conversion.theirs, unflatten_dict(arrays, sep="/"), adam, notes)


def _changed_moments(steps: Sequence[AdaptationStep], tree: Mapping[str, Any]) -> dict[str, Any]:
    moments = mapping.by_path(tree)
    for step in steps:
        moments = step.change_moments(moments) if step.change_moments else moments
    return unflatten_dict(moments, sep="/")


def _closest_configuration(
    config: TransformerConfig, family: Family, accepted: Collection[str]
) -> Conversion:
    config = validation.without_groups_of_one(config)
    fields = {name: getattr(config, name) for name in validation.FREE_FIELDS | family.open_switches}
    conversion = Conversion(config, family.configuration(**fields), family, accepted)
    if not config.target_vocab_size:
        outside = {name: getattr(conversion.theirs, name) for name in OUTSIDE_OF_LAYERS}
        # Positions in attention are a part of the layers.
        if POSITION_KINDS[config.position_kind].acts_in_attention:
            del outside["position_kind"]
        return conversion._replace(ours=dataclasses.replace(config, **outside))
    if conversion.sinusoids_differ and "position_kind" in family.open_switches:
        # If the family has no learned positions, the difference is rejected later.
        with contextlib.suppress(UserError):
            learned = family.configuration(**fields | {"position_kind": "learned"})
            return conversion._replace(theirs=learned)
    return conversion


def _check_compatible(conversion: Conversion) -> None:
    names = [field.name for field in dataclasses.fields(conversion.ours)]
    fixed = [name for name in names if name not in ADAPTABLE | validation.FREE_FIELDS]
    if conversion.sinusoids_differ:
        fixed += SINUSOID_SWITCHES
    # Tables can hold sinusoids or zeros, but no positions of self-attention.
    as_tables = conversion.ours.position_kind in ("sinusoidal", "learned", "none")
    if not as_tables or conversion.theirs.position_kind != "learned":
        fixed.append("position_kind")
    for name in fixed:
        if conversion.differ_in(name):
            raise conversion.error(name, "no weight transformation makes them equivalent")
    validation.check_heads(conversion.family, conversion.ours)


def _adding(new: ArraysByPath) -> Change:
    return lambda arrays: arrays | new


def _adding_zeros(config: TransformerConfig, paths: Collection[str]) -> Change:
    shapes = parameter_shapes(config)
    return _adding({path: np.zeros(shapes[path], config.param_dtype) for path in paths})


def _removing(paths: Collection[str]) -> Change:
    return lambda arrays: {path: a for path, a in arrays.items() if path not in paths}


def _epsilon(conversion: Conversion, arrays: ArraysByPath) -> Iterator[AdaptationStep]:
    name = "norm_epsilon"
    if not conversion.differ_in(name):
        return
    if name not in conversion.accepted:
        rest = "results would differ slightly; to convert anyway, give --accept norm_epsilon"
        raise conversion.error(name, rest)
    yield AdaptationStep(conversion.note(name, "accepted, results differ slightly"))


def _ties(conversion: Conversion, arrays: ArraysByPath) -> Iterator[AdaptationStep]:
    """Unties tables by copying, and ties equal tables."""
    source, table = EMBEDDINGS
    if table not in arrays:
        return
    for path, equal, tie in (
        (source, arrays[table], "shares_source_and_target"),
        (OUTPUT, arrays[table].T, "shares_target_and_output"),
    ):
        is_tied, will_be_tied = getattr(conversion.ours, tie), getattr(conversion.theirs, tie)
        if is_tied and not will_be_tied:
            note = conversion.note("tie_embeddings", f"{path} is a copy of {table}")
            yield AdaptationStep(note, _adding({path: equal.copy()}), None)
        elif will_be_tied and not is_tied:
            if not np.array_equal(arrays[path], equal):
                raise conversion.error("tie_embeddings", f"{path} and {table} are not equal")
            note = conversion.note("tie_embeddings", f"{path}, which equals {table}, is removed")
            yield AdaptationStep(note, _removing([path]), None)


def _scales(conversion: Conversion, arrays: ArraysByPath) -> Iterator[AdaptationStep]:
    root = conversion.ours.d_model**0.5
    moves = (
        ("scale_embeddings", EMBEDDINGS, root if conversion.ours.scale_embeddings else 1 / root),
        ("scale_logits", (OUTPUT, BIAS), 1 / root if conversion.ours.scale_logits else root),
    )
    for name, paths, factor in moves:
        if not conversion.differ_in(name):
            continue
        if conversion.theirs.shares_target_and_output:
            rest = "the table is both target embedding and output projection"
            raise conversion.error(name, rest)
        scaled = {
            path: (arrays[path] * factor).astype(arrays[path].dtype)
            for path in paths
            if path in arrays
        }
        note = conversion.note(name, f"multiplied by {factor:.6g}: {', '.join(scaled)}")
        yield AdaptationStep(note, _adding(scaled), None)


def _positions(conversion: Conversion, arrays: ArraysByPath) -> Iterator[AdaptationStep]:
    """Writes sinusoids, or no positions, as learned tables."""
    ours, theirs = conversion.ours, conversion.theirs
    if theirs.position_kind != "learned":
        return
    unused = np.zeros((theirs.position_offset, theirs.d_model), theirs.param_dtype)
    if conversion.differ_in("position_kind"):
        rows = np.zeros((theirs.max_length, theirs.d_model))
        if ours.position_kind == "sinusoidal":
            rows = sinusoids(ours)(theirs.max_length)
        table = np.concatenate([unused, rows.astype(theirs.param_dtype)])
        rest = f"tables of {theirs.max_length} positions are written, the maximum length"
        yield AdaptationStep(
            conversion.note("position_kind", rest),
            _adding({path: table.copy() for path in POSITIONS}),
            _adding_zeros(theirs, POSITIONS),
        )
    elif conversion.differ_in("position_offset"):

        def shift(arrays: ArraysByPath) -> ArraysByPath:
            tables = {path: arrays[path][ours.position_offset :] for path in POSITIONS}
            return arrays | {path: np.concatenate([unused, t]) for path, t in tables.items()}

        note = conversion.note("position_offset", "the rows of the tables are shifted")
        yield AdaptationStep(note, shift, shift)


def _switch_of(bias: str) -> str:
    *_, module, projection, _ = ("", *bias.split("/"))
    if projection in ("query", "key", "value"):
        return "qkv_bias"
    if module == "feed_forward":
        return "feed_forward_bias"
    return "attention_output_bias" if module else "output_bias"


def _biases(conversion: Conversion, arrays: ArraysByPath) -> Iterator[AdaptationStep]:
    """Adds missing biases as zeros, and removes zero biases and key biases.

    A key bias adds the same number to all scores of a query, which has no effect on the softmax.
    """
    wanted = {path for path in parameter_shapes(conversion.theirs) if _is_switched_bias(path)}
    present = {path for path in arrays if _is_switched_bias(path)}
    for name in BIAS_SWITCHES:
        missing = [path for path in sorted(wanted - present) if _switch_of(path) == name]
        extra = [path for path in sorted(present - wanted) if _switch_of(path) == name]
        for path in extra:
            if _has_effect(conversion.ours, path) and arrays[path].any():
                rest = f"{path} is not zero, and {conversion.family.name} has no such bias"
                raise conversion.error(name, rest)
        if missing:
            add = _adding_zeros(conversion.theirs, missing)
            yield AdaptationStep(conversion.note(name, "zeros are written"), add, add)
        if extra:
            remove = _removing(extra)
            note = conversion.note(name, "biases without effect are removed")
            yield AdaptationStep(note, remove, remove)


def _has_effect(config: TransformerConfig, path: str) -> bool:
    """Returns whether a bias can change the results.

    That of keys cannot, unless they are transformed or `attention_kind` is not the dot product.
    """
    is_transformed = "self_attention" in path and POSITION_KINDS[config.position_kind].rotates
    is_own = config.attention_kind != DOT_PRODUCT
    return is_transformed or is_own or not path.endswith("/key/bias")


def _is_switched_bias(path: str) -> bool:
    return path.endswith("/bias") and "norm/" not in path


def _padding(conversion: Conversion, arrays: ArraysByPath) -> Iterator[AdaptationStep]:
    """Ignores how padding is computed, unless decoding starts from padding."""
    pad_id = conversion.ours.pad_id
    starts_decoding = conversion.ours.bos_id == pad_id
    rest = "no effect on the tokens of right-padded rows"
    if conversion.differ_in("mask_target_padding"):
        exception = ", if decoding does not start from padding" if starts_decoding else ""
        yield AdaptationStep(conversion.note("mask_target_padding", rest + exception))
    if conversion.differ_in("zero_pad_embeddings"):
        # A slice, since not every vocabulary has padding.
        rows = [arrays[path][pad_id : pad_id + 1] for path in EMBEDDINGS if path in arrays]
        if starts_decoding and any(row.any() for row in rows):
            raise conversion.error("zero_pad_embeddings", "decoding starts from padding")
        yield AdaptationStep(conversion.note("zero_pad_embeddings", rest))


def _start(conversion: Conversion, arrays: ArraysByPath) -> Iterator[AdaptationStep]:
    # These ids occur nowhere else, so they identify the family's start token.
    published = conversion.family.configuration(pad_id=101, eos_id=102)
    ours, theirs = _start_token(conversion.ours), _start_token(published)
    if conversion.ours.target_vocab_size and ours != theirs:
        note = f"decoding starts from {ours}; {conversion.family.name}'s code starts from {theirs}"
        yield AdaptationStep(note)


def _start_token(config: TransformerConfig) -> str:
    tokens = {
        ZERO_VECTOR: "a zero vector",
        config.pad_id: "the padding token",
        config.eos_id: "the end token",
    }
    return tokens.get(config.bos_id, "the start token")
