"""Checkpoints in a run folder, and the only import of orbax.

`checkpoints/<step>/` holds two items: `params`, all that translating needs, and `training`, the
rest of the state. Neither depends on the devices that it was written from.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.args import Composite, StandardRestore, StandardSave
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.state import Params, TrainState

Which: TypeAlias = Literal["best", "last"] | int
"""A checkpoint: the best by validation, the newest, or that of a step."""

_PARAMS, _TRAINING = "params", "training"


class Checkpointer:
    """Writes checkpoints while training goes on, and reads the newest when it starts again.

    A context manager: leaving it waits until everything is written.
    """

    def __init__(
        self,
        run_folder: str | Path,
        keep_last: int = 2,
        keep_best: int = 1,
        best_metric: Literal["loss", "bleu", "chrf"] = "loss",
    ) -> None:
        """Opens the run's folder of checkpoints, or makes it.

        Args:
          run_folder: where `checkpoints` is.
          keep_last: checkpoints kept because they are the newest.
          keep_best: checkpoints kept because they are the best by `best_metric`.
          best_metric: the validation figure that ranks them; of "loss", the least is the best.
        """
        self._best_metric = best_metric
        self._manager = _manager(
            run_folder,
            preservation_policy=AnyPreservationPolicy(
                [LatestN(keep_last), BestN(get_metric_fn=_merit, n=keep_best)]
            ),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpointer":
        """Nothing to do."""
        return self

    def __exit__(self, *error: object) -> None:
        """Waits and closes, whatever happened."""
        self.close()

    def save(self, step: int, state: TrainState, figures: Mapping[str, Any] | None = None) -> None:
        """Begins to write a checkpoint.

        Args:
          step: its name; updates made.
          state: copied before this returns, so the next training step may donate it.
          figures: of the validation after this step, if there was one. A checkpoint without a
            finite `best_metric` among them ranks below all that have one.
        """
        params, training = _items(state)
        figure = (figures or {}).get(self._best_metric, math.nan)
        self._manager.save(
            step,
            args=Composite(**{_PARAMS: StandardSave(params), _TRAINING: StandardSave(training)}),
            metrics={self._best_metric: figure} if math.isfinite(figure) else {},
        )

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def restore(self, template: TrainState) -> TrainState:
        """The newest checkpoint, which must exist.

        Args:
          template: a state of the same shapes and dtypes. Its arrays are on the devices that the
            restored ones shall be on, which need not be those that the checkpoint was written from.
        """
        params, training = _items(jax.tree.map(_like, template))
        items = self._manager.restore(
            self._manager.latest_step(),
            args=Composite(
                **{_PARAMS: StandardRestore(params), _TRAINING: StandardRestore(training)}
            ),
        )
        return TrainState(params=items[_PARAMS], **items[_TRAINING])

    def wait(self) -> None:
        """Returns when everything is written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads that write."""
        self._manager.close()


def restore_params(run_folder: str | Path, checkpoint: Which = "best") -> tuple[int, Params]:
    """Reads parameters only, to one device, whatever devices they were trained on.

    Args:
      run_folder: where `checkpoints` is.
      checkpoint: the best by the run's `train.best_metric` (the newest, if none was validated),
        the newest, or that of a step.

    Returns:
      The checkpoint's step and its parameters.

    Raises:
      UserError: there is no such checkpoint.
    """
    if not _folder(run_folder).is_dir():
        raise _no_checkpoint(run_folder)
    with _manager(run_folder, create=False) as manager:
        step = _choose(manager, run_folder, checkpoint)
        sharding = SingleDeviceSharding(jax.devices()[0])
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            manager.item_metadata(step)[_PARAMS].tree,
        )
        items = manager.restore(step, args=Composite(**{_PARAMS: StandardRestore(template)}))
    return step, items[_PARAMS]


def _choose(manager: ocp.CheckpointManager, run_folder: str | Path, checkpoint: Which) -> int:
    """The step of a checkpoint that exists; arguments and errors as in `restore_params`."""
    steps = sorted(manager.all_steps())
    if not steps:
        raise _no_checkpoint(run_folder)
    if checkpoint == "best":
        return manager.best_step()
    if checkpoint == "last":
        return steps[-1]
    if checkpoint not in steps:
        raise UserError(
            f"{_folder(run_folder)} holds no checkpoint of step {checkpoint}, only of "
            f"{', '.join(map(str, steps))}"
        )
    return checkpoint


def _no_checkpoint(run_folder: str | Path) -> UserError:
    return UserError(f"{_folder(run_folder)} holds no checkpoint: train until one is written")


def _folder(run_folder: str | Path) -> Path:
    return Path(run_folder).absolute() / "checkpoints"


def _manager(run_folder: str | Path, **options: Any) -> ocp.CheckpointManager:
    # Orbax stores figures only if it also has a function that ranks by them.
    return ocp.CheckpointManager(
        _folder(run_folder),
        options=ocp.CheckpointManagerOptions(best_fn=_merit, best_mode="max", **options),
        item_handlers={
            _PARAMS: ocp.StandardCheckpointHandler(),
            _TRAINING: ocp.StandardCheckpointHandler(),
        },
    )


def _merit(metrics: Mapping[str, float]) -> float:
    """How good a checkpoint is by the one figure, or none, that was saved with it."""
    for name, value in metrics.items():
        return -value if name == "loss" else value
    return -math.inf


def _items(state: TrainState) -> tuple[Params, dict[str, Any]]:
    """The state, divided as it is in a checkpoint."""
    training = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.name != _PARAMS
    }
    return state.params, training


def _like(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
