"""What a run takes from trained models: initial parameters, their vocabulary, a teacher."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.config.fields import FieldRole, names_with
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, read_tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import open_regular
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.remote.reading import local
from flaxformer_mt.runs import parameter_file
from flaxformer_mt.runs.checkpoint import restore_params
from flaxformer_mt.runs.folder import read_config, require_run
from flaxformer_mt.runs.layout import TRAINING
from flaxformer_mt.trained_model import load_run
from flaxformer_mt.training.devices import Rules, place
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.sharding import path_name
from flaxformer_mt.training.state import TrainState

# Trained parameters fit, and mean the same, only where these fields are equal.
_FIXED_FIELDS = names_with(
    TransformerConfig, FieldRole.SHAPES, FieldRole.VOCABULARY, FieldRole.ARCHITECTURE
)


def tokenizer_path(config: ExperimentConfig) -> str:
    """Returns the folder of the vocabulary for a new run; "" if it is to be learned.

    It is `data.tokenizer_path` if given, else the run folder that `train.init_from` names.
    """
    given, start = config.data.tokenizer_path, config.train.init_from
    if given or not start or local(start).is_dir():
        return given or start
    raise UserError(
        f"train.init_from={start} has no vocabulary: give the folder that has it as "
        "data.tokenizer_path"
    )


def require_vocabulary(init_from: str, tokenizers: Tokenizers) -> None:
    """Raises `UserError` if parameters of a run are of another vocabulary."""
    if local(init_from).is_dir():
        _check_same(
            read_tokenizers(local(init_from)),
            tokenizers,
            f"train.init_from={init_from}",
            " than data.tokenizer_path: leave the latter out",
        )


def load_teacher(folder: str, tokenizers: Tokenizers) -> tuple[Transformer | None, Params | None]:
    """Loads the model of `train.teacher`, if any, and its best parameters onto the host."""
    if not folder:
        return None, None
    with prefixed(f"train.teacher={folder}: "):
        run = load_run(local(folder))
    advice = f": train the student with --data.tokenizer-path={folder}"
    _check_same(run.tokenizers, tokenizers, f"train.teacher={folder}", advice)
    return Transformer(run.model), run.params


def _check_same(theirs: Tokenizers, ours: Tokenizers, option: str, advice: str) -> None:
    for side in ("source", "target"):
        if getattr(theirs, side).fingerprint != getattr(ours, side).fingerprint:
            raise UserError(f"{option} has another {side} vocabulary{advice}")


def require_parameters(init_from: str, model: TransformerConfig) -> None:
    """Checks what `train.init_from` names, if anything, as far as this takes no time.

    Vocabulary sizes of `model` may still be 0.
    """
    if not init_from:
        return
    try:
        path = local(init_from)
        if path.is_dir():
            require_run(path)
        else:
            open_regular(path).close()
    except UserError as error:
        raise UserError(
            f"train.init_from={init_from}: {error}; give a run folder, or a .safetensors file that "
            "`flaxformer-mt convert` wrote"
        ) from error
    if path.is_dir():
        with prefixed(f"train.init_from={init_from}: "):
            model = read_tokenizers(path).with_ids(model)
            _check_fields(read_config(path).model, model)


def load_parameters(init_from: str, model: TransformerConfig, template: Params) -> Params:
    """Loads the parameters that `train.init_from` names.

    Args:
      init_from: a run folder, whose best checkpoint is used (the moving average, if there is one),
        or a file that `flaxformer-mt convert --to flaxformer_mt` wrote.
      model: the model to initialize, with its vocabulary sizes.
      template: the shapes and dtypes of its parameters, which the result has as NumPy arrays.

    Raises:
      UserError: the parameters cannot be read, or belong to another model.
    """
    path = local(init_from)
    with prefixed(f"train.init_from={init_from}: "):
        if path.is_dir():
            config = read_config(path).model
            arrays = flatten_dict(restore_params(path, "best")[1], sep="/")
        else:
            content = parameter_file.read(path)
            config, arrays = content.config, content.parameters
        _check_fields(config, model)
        _check_shapes(arrays, flatten_dict(template, sep="/"))
    return jax.tree.map(
        lambda leaf, array: np.asarray(array, leaf.dtype), template, unflatten_dict(arrays, sep="/")
    )


def start_from(state: TrainState, params: Params, mesh: Mesh, rules: Rules = ()) -> TrainState:
    """Returns an initial state with other parameters, also as the start of the moving average.

    `params` are the same in every process; they are placed on the mesh.
    """
    # Placed twice: a step donates its arguments, so the average needs its own arrays.
    average = None if state.ema is None else place(params, mesh, rules)
    return dataclasses.replace(state, params=place(params, mesh, rules), ema=average)


def load_moments(init_from: str) -> dict[str, np.ndarray]:
    """Loads the optimizer's state of the run that `train.init_from` names, by `_moment_name`.

    Raises:
      UserError: its best checkpoint cannot be read, or holds parameters only.
    """
    with prefixed(f"train.init_optimizer, of {init_from}: "):
        state = restore_params(local(init_from), "best", item=TRAINING)[1]
    leaves = jax.tree_util.tree_leaves_with_path(state.get("opt_state"))
    return {_moment_name(path): np.asarray(leaf) for path, leaf in leaves}


def with_moments(
    opt_state: optax.OptState, moments: Mapping[str, np.ndarray]
) -> tuple[optax.OptState, list[str]]:
    """Returns a placed initial state of an optimizer with other moments where the shapes agree.

    The count of Adam's bias correction is one of them; that of the schedule begins anew. Also
    returns the names and shapes of what differs, and begins anew as well.
    """

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    differing: list[str] = []

    def choose(path: Any, leaf: Any) -> Any:
        name = _moment_name(path)
        there = moments.get(name)
        if is_schedule(leaf):
            return leaf
        if there is None or there.shape != leaf.shape:
            differing.append(f"{name} ({_shape(there)} there, {_shape(leaf)} here)")
            return leaf
        own = np.array(there, leaf.dtype)
        return jax.make_array_from_callback(own.shape, leaf.sharding, lambda index: own[index])

    chosen = jax.tree_util.tree_map_with_path(choose, opt_state, is_leaf=is_schedule)
    return chosen, differing


def _moment_name(path: Any) -> str:
    """Names a leaf by its path without the positions in chains of transformations: "mu/..."."""
    return "/".join(part for part in path_name(path).split("/") if not part.isdigit())


def _check_fields(theirs: TransformerConfig, ours: TransformerConfig) -> None:
    there, here = _facts(theirs), _facts(ours)
    differing = [
        f"model.{name}: {there[name]} there, {here[name]} here"
        for name in here
        if name in there
        and there[name] != here[name]
        # 0 means: as many as the vocabulary has.
        and not (name.endswith("vocab_size") and 0 in (there[name], here[name]))
    ]
    if differing:
        raise UserError(f"another model ({'; '.join(differing)}): give the values from there")


def _facts(config: TransformerConfig) -> dict[str, Any]:
    """The fields that parameters depend on, with derived defaults resolved."""
    fields = dataclasses.asdict(config)
    fields |= {"head_dim": config.key_width, "value_dim": config.value_width}
    if config.position_kind != "learned":
        del fields["max_length"]
    return {name: value for name, value in fields.items() if name in _FIXED_FIELDS}


def _check_shapes(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    differing = [
        f"{path}: {_shape(theirs.get(path))} there, {_shape(ours.get(path))} here"
        for path in sorted(theirs.keys() | ours.keys())
        if _shape(theirs.get(path)) != _shape(ours.get(path))
    ]
    if differing:
        raise UserError(
            f"other parameters ({'; '.join(differing)}): use the vocabulary from there, and the "
            "same model"
        )


def _shape(array: Any) -> str:
    return "none" if array is None else str(list(array.shape))
