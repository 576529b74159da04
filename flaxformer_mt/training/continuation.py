"""Continues a run with options that were changed after its newest checkpoint.

The state and the progress of the checkpoint are adapted to them, as a function of the checkpoint
and the history of the run only: a run that is killed and continued again has the same bits.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import values_with
from flaxformer_mt.config.fields import FieldRole
from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.runs.folder import described_change
from flaxformer_mt.training.parameters import split
from flaxformer_mt.training.reporting.progress import BestSoFar, Interval, Progress
from flaxformer_mt.training.sharding import path_name
from flaxformer_mt.training.state import TrainState

_DATA_ROLES = FieldRole.TEXT, FieldRole.TOKENS, FieldRole.ROWS


def adapted(
    state: TrainState,
    progress: Progress,
    history: Sequence[Mapping[str, Any]],
    like: TrainState,
    optimizer: optax.GradientTransformation,
    freeze: Sequence[str],
    announce: Callable[[str], None] = print,
) -> tuple[TrainState, Progress]:
    """Adapts the state and the progress of a checkpoint to options that were changed after it.

    Args:
      state: the state of the checkpoint.
      progress: the progress that was saved with it.
      history: the entries of the history of the run that the checkpoint does not know.
      like: the shapes, dtypes and shardings that are wanted.
      optimizer: of the changed options.
      freeze: parameters that it does not train.
      announce: called with one line for each consequence.
    """
    for entry in history:
        announce(f"changed after step {entry['step']:,}: {described_change(entry)}")
    if history and not keeps_optimizer(state, like):
        announce("the optimizer's state begins anew, but for its count of updates")
    if begins_epoch(history):
        announce("the data begin with a new epoch")
    state = adapted_state(state, like, optimizer, freeze)
    return state, adapted_progress(progress, history) if history else progress


def keeps_optimizer(state: TrainState, like: TrainState) -> bool:
    """Returns whether an optimizer's state has the shapes of another."""
    return [each.shape for each in jax.tree.leaves(state.opt_state)] == [
        each.shape for each in jax.tree.leaves(like.opt_state)
    ]


def adapted_state(
    state: TrainState,
    like: TrainState,
    optimizer: optax.GradientTransformation,
    freeze: Sequence[str],
) -> TrainState:
    """Returns a state with the structure, dtypes and shardings of another.

    The state of the optimizer is kept if it has the same shapes (`keeps_optimizer`). Otherwise it
    begins anew, but for its count of updates, on which the learning rate depends. A moving average
    that there was none of begins with the parameters.

    Args:
      state: the state of a checkpoint.
      like: the shapes, dtypes and shardings that are wanted.
      optimizer: of the changed options.
      freeze: parameters that it does not train.
    """
    if [jax.tree.structure(state), _types(state)] == [jax.tree.structure(like), _types(like)]:
        return state

    def convert(state: TrainState) -> TrainState:
        params = _cast(state.params, like.params)
        fresh = optimizer.init(split(params, freeze)[0])
        if keeps_optimizer(state, like):
            leaves = jax.tree.leaves(state.opt_state)
            opt_state = _cast(jax.tree.unflatten(jax.tree.structure(fresh), leaves), fresh)
        else:
            named = jax.tree_util.tree_leaves_with_path(state.opt_state)
            # Adafactor has one for each layer; all are equal.
            counts = [leaf.ravel()[0] for path, leaf in named if _is_count(path)]
            opt_state = jax.tree_util.tree_map_with_path(
                lambda path, leaf: (
                    jnp.broadcast_to(counts[0], leaf.shape) if _is_count(path) else leaf
                ),
                fresh,
            )
        average = params if state.ema is None else _cast(state.ema, params)
        return dataclasses.replace(
            state, params=params, opt_state=opt_state, ema=None if like.ema is None else average
        )

    return jax.jit(convert, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(state)


def _is_count(path: Any) -> bool:
    return path_name(path).split("/")[-1] == "count"


def _types(tree: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def _cast(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), tree, like)


def begins_epoch(history: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether changes are of the data, so that a new epoch begins."""
    names = values_with(ExperimentConfig(), *_DATA_ROLES).keys()
    return any(names & entry["options"].keys() or entry["corpora"] for entry in history)


def adapted_progress(progress: Progress, history: Sequence[Mapping[str, Any]]) -> Progress:
    """Returns the progress of a checkpoint, from which a run goes on with changed options.

    Changed data begin with a new epoch. What another metric, or another text, was the best of does
    not count any more.
    """
    names = {name for entry in history for name in entry["options"]}
    position = progress.position
    if begins_epoch(history):
        position = DataPosition(epoch=position.epoch + 1, step=position.step)
    other_text = any("valid" in entry["corpora"] for entry in history)
    stopping = {"train.early_stopping_metric", "train.early_stopping_min_delta"}
    return dataclasses.replace(
        progress,
        position=position,
        interval=Interval(),
        best=BestSoFar() if other_text or "train.best_metric" in names else progress.best,
        stopping=BestSoFar() if other_text or names & stopping else progress.stopping,
        batch_shapes=(),
    )
