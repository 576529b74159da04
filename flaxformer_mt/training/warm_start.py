"""What a run takes from trained models: initial parameters, their vocabulary, a teacher."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.fields import FieldRole, names_with
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, read_tokenizers
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import open_regular
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.remote.reading import local
from flaxformer_mt.run_layout import TRAINING
from flaxformer_mt.runs import parameter_file
from flaxformer_mt.runs.checkpoint import restore_params
from flaxformer_mt.runs.folder import read_config, require_run
from flaxformer_mt.runs.states import differences
from flaxformer_mt.trained_model import load_run
from flaxformer_mt.training.devices import Rules, place
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.sharding import path_name
from flaxformer_mt.training.state import TrainState

# Trained parameters fit, and mean the same, only where these fields are equal.
_FIXED_FIELDS = names_with(
    TransformerConfig, FieldRole.SHAPES, FieldRole.VOCABULARY, FieldRole.ARCHITECTURE
)


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """What `train.init_from` names: a run folder, or a file of parameters.

    Of a run, the best checkpoint counts, and its moving average if there is one. A file is what
    `flaxformer-mt convert --to flaxformer_mt` wrote. Vocabulary sizes of 0 fit any size.
    """

    given: str

    @functools.cached_property
    def _path(self) -> Path:
        return local(self.given)

    def check(self, model: TransformerConfig) -> None:
        """Checks that the parameters are there and fit a model, as far as this takes no time."""
        try:
            if self._path.is_dir():
                require_run(self._path)
            else:
                open_regular(self._path).close()
        except UserError as error:
            raise UserError(
                f"train.init_from={self.given}: {error}; give a run folder, or a .safetensors file "
                "that `flaxformer-mt convert` wrote"
            ) from error
        if self._path.is_dir():
            with self._prefixed():
                theirs = read_config(self._path).model
                _check_fields(theirs, read_tokenizers(self._path).with_ids(model))

    def tokenizer_path(self) -> str:
        """Returns the folder of the vocabulary of the parameters; `UserError` for a file."""
        if self._path.is_dir():
            return self.given
        raise UserError(
            f"train.init_from={self.given} has no vocabulary: give the folder that has it as "
            "data.tokenizer_path"
        )

    def check_vocabulary(self, tokenizers: Tokenizers) -> None:
        """Checks that parameters of a run are of this vocabulary."""
        if self._path.is_dir():
            _check_same(
                read_tokenizers(self._path),
                tokenizers,
                f"train.init_from={self.given}",
                " than data.tokenizer_path: leave the latter out",
            )

    def parameters(self, model: TransformerConfig, template: Params) -> Params:
        """Loads the parameters.

        Args:
          model: the model to initialize, with its vocabulary sizes.
          template: the shapes and dtypes of its parameters, which the result has as NumPy arrays.

        Raises:
          UserError: the parameters cannot be read, or belong to another model.
        """
        with self._prefixed():
            if self._path.is_dir():
                config = read_config(self._path).model
                arrays = flatten_dict(restore_params(self._path, "best")[1], sep="/")
            else:
                content = parameter_file.read(self._path)
                config, arrays = content.config, content.parameters
            _check_fields(config, model)
            _check_shapes(arrays, flatten_dict(template, sep="/"))
        nested = unflatten_dict(arrays, sep="/")
        return jax.tree.map(lambda leaf, array: np.asarray(array, leaf.dtype), template, nested)

    def moments(self) -> dict[str, np.ndarray]:
        """Loads the optimizer's state of a run, by `_moment_name`.

        Raises:
          UserError: its best checkpoint cannot be read, or holds parameters only.
        """
        with prefixed(f"train.init_optimizer, of {self.given}: "):
            state = restore_params(self._path, "best", item=TRAINING)[1]
        leaves = jax.tree_util.tree_leaves_with_path(state.get("opt_state"))
        return {_moment_name(path): np.asarray(leaf) for path, leaf in leaves}

    def _prefixed(self) -> contextlib.AbstractContextManager[None]:
        return prefixed(f"train.init_from={self.given}: ")


def load_teacher(folder: str, tokenizers: Tokenizers) -> tuple[Transformer | None, Params | None]:
    """Loads the model of `train.teacher`, if any, and its best parameters onto the host."""
    if not folder:
        return None, None
    with prefixed(f"train.teacher={folder}: "):
        run = load_run(local(folder))
    advice = f": train the student with data.tokenizer_path={folder}"
    _check_same(run.tokenizers, tokenizers, f"train.teacher={folder}", advice)
    return Transformer(run.model), run.params


def _check_same(theirs: Tokenizers, ours: Tokenizers, option: str, advice: str) -> None:
    for side in ("source", "target"):
        if getattr(theirs, side).fingerprint != getattr(ours, side).fingerprint:
            raise UserError(f"{option} has another {side} vocabulary{advice}")


def start_from(state: TrainState, params: Params, mesh: Mesh, rules: Rules = ()) -> TrainState:
    """Returns an initial state with other parameters, also as the start of the moving average.

    `params` are the same in every process; they are placed on the mesh.
    """

    def placed() -> Params:
        return place(params, mesh, rules)

    # Placed twice: a step donates its arguments, so the average needs its own arrays.
    average = None if state.ema is None else placed()
    return dataclasses.replace(state, params=placed(), ema=average)


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
    names = [
        name
        for name in here
        if name in there
        # A vocabulary size of 0 means: as many tokens as the vocabulary has.
        and not (name.endswith("vocab_size") and 0 in (there[name], here[name]))
    ]
    differing = differences(*({name: each[name] for name in names} for each in (there, here)))
    if differing:
        raise UserError(f"another model ({'; '.join(differing)}): give the values from there")


def _facts(config: TransformerConfig) -> dict[str, Any]:
    """The fields that parameters depend on, with derived defaults resolved."""
    fields = dataclasses.asdict(config)
    fields |= {"head_dim": config.key_width, "value_dim": config.value_width}
    if config.position_kind != "learned":
        del fields["max_length"]
    return {f"model.{name}": value for name, value in fields.items() if name in _FIXED_FIELDS}


def _check_shapes(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    there, here = (
        {path: _shape(array) for path, array in sorted(arrays.items())} for arrays in (theirs, ours)
    )
    if differing := differences(there, here):
        raise UserError(
            f"other parameters ({'; '.join(differing)}): use the vocabulary from there, and the "
            "same model"
        )


def _shape(array: Any) -> str:
    return "none" if array is None else str(list(array.shape))
