"""Turns the checkpoint of one family into that of another, through our parameters.

Where the two differ in a switch, either the weights can say the same without it (a missing bias is
a bias of zeros), or the conversion is refused: it never changes what the model computes. The
exception is `norm_epsilon`, for those who accept it.

Beside the published families there is `OWN`, our parameters as a file: a .safetensors with their
paths as names, the configuration as JSON in its metadata, and Adam's state under "adam/".
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig, to_dict
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import adam as adam_state
from flaxformer_mt.interop import checkpoint_files as files
from flaxformer_mt.interop import weights
from flaxformer_mt.interop.adam import AdamState, TrainingState
from flaxformer_mt.interop.checkpoint_files import Tensors
from flaxformer_mt.interop.rules import Family, sinusoids
from flaxformer_mt.interop.weights import CARRIED
from flaxformer_mt.model.transformer import ZERO_VECTOR
from flaxformer_mt.presets import canonical_family
from flaxformer_mt.runs import parameter_file
from flaxformer_mt.runs.parameter_file import ADAM

OWN = parameter_file.FORMAT

Arrays = dict[str, np.ndarray]

EMBEDDINGS = ("source_embedding/embedding", "target_embedding/embedding")
POSITIONS = ("source_positions/embedding", "target_positions/embedding")
OUTPUT, BIAS = "output/kernel", "output/bias"

SINUSOID_SWITCHES = ("position_layout", "position_exponent", "position_base", "position_offset")
BIAS_SWITCHES = ("qkv_bias", "attention_output_bias", "feed_forward_bias", "output_bias")
# Of layers without embeddings (V = 0), these say nothing.
OUTSIDE_OF_LAYERS = {
    "position_kind", *SINUSOID_SWITCHES, "scale_embeddings", "scale_logits", "tie_embeddings",
    "zero_pad_embeddings", "mask_target_padding", "output_bias",
}  # fmt: skip
ADAPTABLE = OUTSIDE_OF_LAYERS | {"norm_epsilon", *BIAS_SWITCHES}


Change = Callable[[Arrays], Arrays]
"""From arrays by path to arrays by path."""


class Step(NamedTuple):
    """One thing to be done to parameters."""

    note: str
    change: Change
    change_moments: Change | None
    """The same for moments of Adam; None if they cannot follow."""


class Pair(NamedTuple):
    """What differs."""

    ours: TransformerConfig
    """What the parameters are the parameters of."""
    theirs: TransformerConfig
    """The nearest configuration of `family`."""
    family: Family
    accepted: Collection[str]
    """See `convert`."""

    def differ_in(self, name: str) -> bool:
        """Whether the switch has two values."""
        return getattr(self.ours, name) != getattr(self.theirs, name)

    def becomes(self, name: str, rest: str) -> str:
        """What is done about a switch: "qkv_bias=False becomes True: ..."."""
        return f"{name}={getattr(self.ours, name)} becomes {getattr(self.theirs, name)}: {rest}"

    def refusal(self, name: str, rest: str) -> UserError:
        """Why nothing can be done: "norm_position=post cannot become pre: ..."."""
        ours, theirs = getattr(self.ours, name), getattr(self.theirs, name)
        return UserError(f"{name}={ours} cannot become {theirs}: {rest}")

    @property
    def sinusoids_differ(self) -> bool:
        """Whether both have sinusoids, but not the same."""
        return self.ours.position_kind == self.theirs.position_kind == "sinusoidal" and any(
            map(self.differ_in, SINUSOID_SWITCHES)
        )


def convert(
    source_family: str,
    target_family: str,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    overrides: Mapping[str, Any] = {},
    accepted: Collection[str] = (),
) -> tuple[str, ...]:
    """Writes the checkpoint `source` of one family as the checkpoint `target` of another.

    Args:
      source_family: a key of `interop.FAMILIES`, or `OWN`.
      target_family: the same.
      source: a file.
      target: the file to write: .safetensors or .pt; for `OWN`, .safetensors.
      overrides: configuration fields that the source cannot tell, see `interop.load`.
      accepted: switches in which the result may compute something slightly else: "norm_epsilon".

    Returns:
      What was done to the weights, and what got lost beside them, a line each.

    Raises:
      UserError: the source cannot be read; the families differ in a switch that weights cannot
        make up for; the target cannot be written, or is the source.
    """
    source_family, target_family = canonical_family(source_family), canonical_family(target_family)
    for family in (source_family, target_family):
        if family not in (OWN, *interop.FAMILIES):
            choices = ", ".join([*interop.FAMILIES, OWN])
            raise UserError(f"unknown family {family!r}: choose one of {choices}")
    for name in accepted:
        if name != "norm_epsilon":
            raise UserError(f"{name} cannot be accepted, only norm_epsilon can")
    if Path(source).resolve() == Path(target).resolve():
        raise UserError(f"{target}: choose another file for the output than the input")
    if source_family == OWN:
        state, origin = read_own(Path(source), overrides)
    else:
        state, origin = interop.load_training(source_family, source, **overrides), source_family
    try:
        return write(state, origin, target_family, Path(target), accepted)
    except UserError as error:
        raise UserError(f"{source} cannot become {target_family}: {error}") from error


def write(
    state: TrainingState, origin: str, target_family: str, target: Path, accepted: Collection[str]
) -> tuple[str, ...]:
    """Writes a training state as the checkpoint of a family, adapted to it.

    Args:
      state: what to write.
      origin: the family whose tensors it carries.
      target_family: see `convert`.
      target: see `convert`.
      accepted: see `convert`.

    Returns:
      See `convert`.

    Raises:
      UserError: see `convert`.
    """
    if target_family == OWN:
        write_own(target, state, origin)
        return state.notes
    if target_family != origin:
        state = adapt_training(state, interop.FAMILIES[target_family], accepted)
    if state.adam is not None and target.suffix == ".safetensors":
        note = "Adam's state is left out: PyTorch reads it from .pt files only"
        state = state._replace(adam=None, notes=(*state.notes, note))
    interop.save(target_family, state.config, state.params, target, state.adam)
    return state.notes


# Adapting parameters.


def adapt(
    config: TransformerConfig,
    params: Mapping[str, Any],
    family: Family,
    accepted: Collection[str] = (),
) -> tuple[TransformerConfig, dict[str, Any], tuple[str, ...]]:
    """Makes parameters compute the same within the mathematics of another family.

    Args:
      config: what `params` are the parameters of.
      params: nested dicts. What they carry is the first family's, and is left behind.
      family: the other family.
      accepted: see `convert`.

    Returns:
      The other family's configuration and parameters, and what was done, a line each.

    Raises:
      UserError: a switch differs that weights cannot make up for.
    """
    state = adapt_training(TrainingState(config, dict(params), None), family, accepted)
    return state.config, state.params, state.notes


def adapt_training(
    state: TrainingState, family: Family, accepted: Collection[str] = ()
) -> TrainingState:
    """`adapt`, with Adam's state where its moments can follow. New notes replace the old."""
    arrays = weights.by_path(state.params)
    weights.check_params(state.config, arrays)
    pair = _pair(state.config, family, accepted)
    _check_compatible(pair)
    steps: list[Step] = []
    for find_steps in (_epsilon, _ties, _scales, _positions, _biases, _padding, _start):
        for step in find_steps(pair, arrays):
            arrays = step.change(arrays)
            steps.append(step)
    notes = tuple(step.note for step in steps)
    rules = family.rules(pair.theirs, family.layout_of_params(arrays, {}))
    obstacles = [step.note for step in steps if step.change_moments is None]
    if adam_state.unmoved_paths(rules):
        obstacles.append(f"{family.name} computes some parameters from others")
    if state.adam is not None and CARRIED in state.adam.mean:
        obstacles.append("some of them are carried")
    adam = None
    if state.adam is not None and obstacles:
        notes += (f"Adam's state is left out, its moments cannot follow: {obstacles[0]}",)
    elif state.adam is not None:
        mean, variance = (_follow(steps, tree) for tree in (state.adam.mean, state.adam.variance))
        adam = state.adam._replace(mean=mean, variance=variance)
    return TrainingState(pair.theirs, unflatten_dict(arrays, sep="/"), adam, notes)


def _follow(steps: Sequence[Step], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Moments after steps which all have a `change_moments`."""
    moments = weights.by_path(tree)
    for step in steps:
        moments = step.change_moments(moments) if step.change_moments else moments
    return unflatten_dict(moments, sep="/")


def _pair(config: TransformerConfig, family: Family, accepted: Collection[str]) -> Pair:
    """The configuration, and the nearest one of the family."""
    fields = {name: getattr(config, name) for name in weights.FREE_FIELDS | family.open_switches}
    pair = Pair(config, family.configuration(**fields), family, accepted)
    if not config.target_vocab_size:
        outside = {name: getattr(pair.theirs, name) for name in OUTSIDE_OF_LAYERS}
        return pair._replace(ours=dataclasses.replace(config, **outside))
    if pair.sinusoids_differ and "position_kind" in family.open_switches:
        # Where the family has no learned positions, the difference is refused later.
        with contextlib.suppress(UserError):
            learned = family.configuration(**fields | {"position_kind": "learned"})
            return pair._replace(theirs=learned)
    return pair


def _check_compatible(pair: Pair) -> None:
    """Refuses what no weights can make up for."""
    names = [field.name for field in dataclasses.fields(pair.ours)]
    fixed = [name for name in names if name not in ADAPTABLE | weights.FREE_FIELDS]
    if pair.sinusoids_differ:
        fixed += SINUSOID_SWITCHES
    if pair.theirs.position_kind != "learned":
        fixed.append("position_kind")
    for name in fixed:
        if pair.differ_in(name):
            raise pair.refusal(name, "no weights make up for that")
    weights.check_heads(pair.family, pair.ours)


def _unchanged(arrays: Arrays) -> Arrays:
    return arrays


def _adding(new: Arrays) -> Change:
    return lambda arrays: arrays | new


def _adding_zeros(config: TransformerConfig, paths: Collection[str]) -> Change:
    shapes = weights.parameter_shapes(config)
    return _adding({path: np.zeros(shapes[path], config.param_dtype) for path in paths})


def _removing(paths: Collection[str]) -> Change:
    return lambda arrays: {path: a for path, a in arrays.items() if path not in paths}


def _epsilon(pair: Pair, arrays: Arrays) -> Iterator[Step]:
    name = "norm_epsilon"
    if not pair.differ_in(name):
        return
    if name not in pair.accepted:
        rest = "results would differ a little; to convert all the same, give --accept norm_epsilon"
        raise pair.refusal(name, rest)
    yield Step(pair.becomes(name, "accepted, results differ a little"), _unchanged, _unchanged)


def _ties(pair: Pair, arrays: Arrays) -> Iterator[Step]:
    """A copy cuts a tie; equal tables can be tied."""
    source, table = EMBEDDINGS
    if table not in arrays:
        return
    for path, equal, tie in (
        (source, arrays[table], "shares_source_and_target"),
        (OUTPUT, arrays[table].T, "shares_target_and_output"),
    ):
        is_tied, will_be_tied = getattr(pair.ours, tie), getattr(pair.theirs, tie)
        if is_tied and not will_be_tied:
            note = pair.becomes("tie_embeddings", f"{path} is a copy of {table}")
            yield Step(note, _adding({path: equal.copy()}), None)
        elif will_be_tied and not is_tied:
            if not np.array_equal(arrays[path], equal):
                raise pair.refusal("tie_embeddings", f"{path} and {table} are not equal")
            note = pair.becomes("tie_embeddings", f"{path}, which equals {table}, is left out")
            yield Step(note, _removing([path]), None)


def _scales(pair: Pair, arrays: Arrays) -> Iterator[Step]:
    """A factor moves into tables that serve no other purpose."""
    root = pair.ours.d_model**0.5
    moves = (
        ("scale_embeddings", EMBEDDINGS, root if pair.ours.scale_embeddings else 1 / root),
        ("scale_logits", (OUTPUT, BIAS), 1 / root if pair.ours.scale_logits else root),
    )
    for name, paths, factor in moves:
        if not pair.differ_in(name):
            continue
        if pair.theirs.shares_target_and_output:
            rest = "the table serves as target embedding and as output projection"
            raise pair.refusal(name, rest)
        scaled = {
            path: (arrays[path] * factor).astype(arrays[path].dtype)
            for path in paths
            if path in arrays
        }
        note = pair.becomes(name, f"multiplied by {factor:.6g}: {', '.join(scaled)}")
        yield Step(note, _adding(scaled), None)


def _positions(pair: Pair, arrays: Arrays) -> Iterator[Step]:
    """Whatever is added to embeddings can be written into a learned table."""
    ours, theirs = pair.ours, pair.theirs
    if theirs.position_kind != "learned":
        return
    unused = np.zeros((theirs.position_offset, theirs.d_model), theirs.param_dtype)
    if pair.differ_in("position_kind"):
        rows = np.zeros((theirs.max_length, theirs.d_model))
        if ours.position_kind == "sinusoidal":
            rows = sinusoids(ours)(theirs.max_length)
        table = np.concatenate([unused, rows.astype(theirs.param_dtype)])
        rest = f"tables of {theirs.max_length} positions are written; no sentence may be longer"
        yield Step(
            pair.becomes("position_kind", rest),
            _adding({path: table.copy() for path in POSITIONS}),
            _adding_zeros(theirs, POSITIONS),
        )
    elif pair.differ_in("position_offset"):

        def shift(arrays: Arrays) -> Arrays:
            tables = {path: arrays[path][ours.position_offset :] for path in POSITIONS}
            return arrays | {path: np.concatenate([unused, t]) for path, t in tables.items()}

        note = pair.becomes("position_offset", "the rows of the tables are shifted")
        yield Step(note, shift, shift)


def _switch_of(bias: str) -> str:
    """The switch that says whether there is the bias with this path."""
    *_, module, projection, _ = ("", *bias.split("/"))
    if projection in ("query", "key", "value"):
        return "qkv_bias"
    if module == "feed_forward":
        return "feed_forward_bias"
    return "attention_output_bias" if module else "output_bias"


def _biases(pair: Pair, arrays: Arrays) -> Iterator[Step]:
    """A missing bias is one of zeros. A key's bias moves all scores of a query alike: no effect."""
    wanted = {path for path in weights.parameter_shapes(pair.theirs) if _is_switched_bias(path)}
    present = {path for path in arrays if _is_switched_bias(path)}
    for name in BIAS_SWITCHES:
        missing = [path for path in sorted(wanted - present) if _switch_of(path) == name]
        extra = [path for path in sorted(present - wanted) if _switch_of(path) == name]
        for path in extra:
            if not path.endswith("/key/bias") and arrays[path].any():
                rest = f"{path} is not zero, and {pair.family.name} has no place for it"
                raise pair.refusal(name, rest)
        if missing:
            add = _adding_zeros(pair.theirs, missing)
            yield Step(pair.becomes(name, "zeros are written"), add, add)
        if extra:
            remove = _removing(extra)
            note = pair.becomes(name, "biases without effect are left out")
            yield Step(note, remove, remove)


def _is_switched_bias(path: str) -> bool:
    return path.endswith("/bias") and "norm/" not in path


def _padding(pair: Pair, arrays: Arrays) -> Iterator[Step]:
    """What is computed for padding means nothing, unless padding starts decoding."""
    pad_id = pair.ours.pad_id
    starts_decoding = pair.ours.bos_id == pad_id
    rest = "no effect on the tokens of rows that are padded on the right"
    if pair.differ_in("mask_target_padding"):
        exception = ", if padding does not start decoding" if starts_decoding else ""
        yield Step(pair.becomes("mask_target_padding", rest + exception), _unchanged, _unchanged)
    if pair.differ_in("zero_pad_embeddings"):
        # A slice, because not every vocabulary has padding.
        rows = [arrays[path][pad_id : pad_id + 1] for path in EMBEDDINGS if path in arrays]
        if starts_decoding and any(row.any() for row in rows):
            raise pair.refusal("zero_pad_embeddings", "here decoding starts from padding")
        yield Step(pair.becomes("zero_pad_embeddings", rest), _unchanged, _unchanged)


def _start(pair: Pair, arrays: Arrays) -> Iterator[Step]:
    # These ids occur nowhere else, and so tell which token the family takes.
    published = pair.family.configuration(pad_id=101, eos_id=102)
    ours, theirs = _start_token(pair.ours), _start_token(published)
    if pair.ours.target_vocab_size and ours != theirs:
        note = f"decoding starts from {ours}; {pair.family.name}'s own code starts from {theirs}"
        yield Step(note, _unchanged, _unchanged)


def _start_token(config: TransformerConfig) -> str:
    tokens = {
        ZERO_VECTOR: "a zero vector",
        config.pad_id: "the padding token",
        config.eos_id: "the end token",
    }
    return tokens.get(config.bos_id, "the start token")


# Our own files.


def write_own(path: Path, state: TrainingState, origin: str) -> None:
    """Writes a training state with nothing lost.

    Args:
      path: ends in .safetensors.
      state: what to write.
      origin: the family whose tensors it carries.

    Raises:
      UserError: the file cannot be written.
    """
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: give it the suffix .safetensors")
    tensors = _flatten("", state.params)
    metadata = {"format": OWN, "config": json.dumps(to_dict(state.config)), "origin": origin}
    if state.adam is not None:
        tensors |= _flatten(f"{ADAM}mean/", state.adam.mean)
        tensors |= _flatten(f"{ADAM}variance/", state.adam.variance)
        # A learning rate may be a tensor.
        settings = json.dumps(dict(state.adam.settings), default=float)
        metadata |= {"adam_step": str(state.adam.step), "adam_settings": settings}
    files.write_safetensors(path, tensors, metadata)


def read_own(path: Path, overrides: Mapping[str, Any]) -> tuple[TrainingState, str]:
    """What `write_own` wrote: the state, and the family whose tensors it carries.

    Raises:
      UserError: it is damaged or another file, or there are overrides: it tells everything.
    """
    with weights.refusals_name(path, OWN):
        config, tensors, metadata = parameter_file.read(path)
        if overrides:
            raise UserError(f"it tells {next(iter(overrides))} itself: do not give any fields")
        with parameter_file.refusing_damaged_metadata():
            adam = _adam_of(metadata, tensors)
        params = _unflatten("", tensors)
        weights.check_params(config, weights.by_path(params))
        if adam is not None:
            weights.check_params(config, weights.by_path(adam.mean), "Adam's mean of")
            weights.check_params(config, weights.by_path(adam.variance), "Adam's variance of")
        return TrainingState(config, params, adam), canonical_family(metadata.get("origin", OWN))


def _adam_of(metadata: Mapping[str, str], tensors: Tensors) -> AdamState | None:
    if "adam_step" not in metadata:
        return None
    mean, variance = (_unflatten(f"{ADAM}{kind}/", tensors) for kind in ("mean", "variance"))
    settings = json.loads(metadata["adam_settings"])
    # JSON knows no tuples.
    groups = [
        group | {"betas": tuple(group["betas"])} if "betas" in group else group
        for group in settings.get("param_groups", [])
    ]
    settings |= {"param_groups": groups} if groups else {}
    return AdamState(int(metadata["adam_step"]), mean, variance, settings)


def _flatten(prefix: str, tree: Mapping[str, Any]) -> Arrays:
    """Arrays by path; the names of what is carried stay whole."""
    carried = {f"{CARRIED}/{name}": np.asarray(a) for name, a in tree.get(CARRIED, {}).items()}
    return {f"{prefix}{path}": a for path, a in (weights.by_path(tree) | carried).items()}


def _unflatten(prefix: str, tensors: Tensors) -> dict[str, Any]:
    """The inverse, for the tensors with this prefix."""
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and (prefix or not name.startswith(ADAM))
    }
    carried = {
        name.removeprefix(f"{CARRIED}/"): tensor
        for name, tensor in own.items()
        if name.startswith(f"{CARRIED}/")
    }
    arrays = {name: a for name, a in own.items() if not name.startswith(f"{CARRIED}/")}
    tree = unflatten_dict(arrays, sep="/")
    return tree | {CARRIED: carried} if carried else tree
