"""Checkpoints of a run, and the only import of Orbax.

`checkpoints/<step>/` holds the Orbax items `params`, `ema` (if there is a moving average) and
`training` (the rest of the state), all independent of the devices that wrote them; `progress.json`,
the state of the training loop; and `manifest.json`, against which the other files are verified.

A checkpoint is written to `<step>.partial`, which is renamed once everything is on disk, the
manifest last. Only then are older checkpoints removed, after being renamed to `.partial` as well.
So a process may be killed at any moment: a folder whose name is a number was complete once, and
there is always one.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.args import Composite, StandardRestore, StandardSave

from flaxformer_mt import distributed
from flaxformer_mt.config import ValidationMetric
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import (
    CHECKPOINTS,
    EMA,
    PARAMS,
    PROGRESS,
    TRAINING,
    CheckpointSelector,
)
from flaxformer_mt.runs.manifest import damage, write_manifest
from flaxformer_mt.runs.retention import best_step, kept_steps, ranking_score


class Checkpointable(Protocol):
    """A training state: a dataclass of arrays with at least these fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def params(self) -> Any:
        """Nested dicts of arrays."""

    @property
    def ema(self) -> Any:
        """The moving average of `params`, or None."""


State = TypeVar("State", bound=Checkpointable)


class Checkpointer:
    """Writes checkpoints in the background, and restores the newest one.

    A context manager: leaving it waits until everything is written. If several processes train
    together, each has a `Checkpointer` of the same folder, and all call the same methods.
    """

    def __init__(
        self,
        run_folder: str | Path,
        keep_last: int = 2,
        keep_best: int = 1,
        best_metric: ValidationMetric = "loss",
        announce: Callable[[str], None] = print,
    ) -> None:
        """Opens or creates the run's folder of checkpoints.

        Removes what an unfinished save left behind. Renames each damaged checkpoint to
        `<step>.damaged`, so that training can write that step again.

        Args:
          run_folder: the run folder.
          keep_last: number of newest checkpoints to keep.
          keep_best: number of best checkpoints to keep, by `best_metric`.
          best_metric: the validation metric that ranks checkpoints.
          announce: called with one line for each damaged checkpoint.

        Raises:
          UserError: the folder cannot be written to.
        """
        self.run_folder = Path(run_folder)
        self._folder = _folder(run_folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._scores: dict[int, float] = {}
        """Ranking scores of all intact checkpoints; kept by the first process only."""
        if distributed.is_main():
            with _explained(f"{self._folder} cannot be written to: {{}}"):
                self._folder.mkdir(parents=True, exist_ok=True)
                _remove_partial(self._folder)
                # Fails now rather than at the first save.
                _partial(self._folder, 0).mkdir()
                _partial(self._folder, 0).rmdir()
                self._scores, damaged = _verified(self._folder)
                for step, cause in damaged.items():
                    aside = _set_aside(self._folder, step)
                    announce(f"{self._folder / str(step)} is damaged: {cause}; moved to {aside}")
        newest = _from_first_process(max(self._scores, default=-1))
        self._latest = None if newest < 0 else newest

        logging.getLogger("absl").addFilter(_is_not_raised)
        # Folders are created before the threads start: if creation failed, these would wait for
        # them forever and keep the process from exiting.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(_handlers(), async_options=at_once)
        # One thread, which completes a checkpoint once Orbax has written its part.
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._unfinished: Future[None] | None = None

    def __enter__(self) -> "Checkpointer":
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits and closes, also after an exception."""
        self.close()
        if kind is None:  # Otherwise the other processes may never reach the barrier.
            distributed.barrier("checkpoints are written")

    def save(
        self,
        step: int,
        state: Checkpointable,
        progress: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts writing a checkpoint, after waiting for the previous one.

        Args:
          step: the number of training steps made; names the checkpoint.
          state: copied before this returns, so the next training step may donate it.
          progress: JSON values, returned by `restore`.
          metrics: of the validation after this step, if there was one. A checkpoint without a
            finite `best_metric` ranks below all that have one.

        Raises:
          UserError: this or the previous checkpoint cannot be written, for example because the disk
            is full.
        """
        self.wait()
        params, training = _divided(state)
        items = {PARAMS: params, TRAINING: training}
        if state.ema is not None:
            items[EMA] = state.ema
        with self._explained(step):
            self._orbax.save(
                _partial(self._folder, step),
                args=Composite(**{name: StandardSave(item) for name, item in items.items()}),
            )
        record = _record(self._best_metric, metrics or {}, progress or {})
        self._unfinished = self._finisher.submit(self._finish, step, record)
        self._latest = step

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._latest

    def restore(self, template: State) -> tuple[State, dict[str, Any]]:
        """Restores the newest checkpoint, which must exist.

        Args:
          template: a state with the shapes, dtypes and shardings to restore to; the shardings need
            not be those that the checkpoint was written with.

        Returns:
          The state, and the progress that was saved with it.

        Raises:
          UserError: the checkpoint holds parameters only, as an averaged one does.
        """
        self.wait()
        path = self._folder / str(self._latest)
        if not (path / TRAINING).is_dir():
            raise UserError(
                f"{path} holds parameters only and cannot be continued: start a run in another "
                f"--workdir with --train.init-from={self.run_folder}"
            )
        params, training = _divided(jax.tree.map(_like, template))
        items = {PARAMS: params, TRAINING: training}
        if template.ema is not None:
            items[EMA] = jax.tree.map(_like, template.ema)
        restored = self._orbax.restore(
            path, args=Composite(**{name: StandardRestore(item) for name, item in items.items()})
        )
        restored = {PARAMS: restored[PARAMS], EMA: restored.get(EMA), **restored[TRAINING]}
        return dataclasses.replace(template, **restored), _read_record(path)["progress"]

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
          UserError: the newest checkpoint could not be written; earlier ones are intact.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.result()

    def close(self) -> None:
        """Waits and stops the writing threads; errors as in `wait`."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            self._orbax.close()

    def _finish(self, step: int, record: Mapping[str, Any]) -> None:
        """Completes the checkpoint that Orbax is writing, then removes superfluous ones."""
        with self._explained(step):
            self._orbax.wait_until_finished()
            if distributed.is_main():
                _commit(self._folder, step, record)
                self._scores[step] = _score(record)
                kept = kept_steps(self._scores, self._keep_last, self._keep_best)
                for superfluous in self._scores.keys() - kept:
                    _remove(self._folder, superfluous)
                    del self._scores[superfluous]

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """As `_explained`, for a save; removes what a failed one has written."""
        try:
            with _explained(
                f"the checkpoint of step {step} could not be written to {self._folder}: {{}}; "
                "earlier checkpoints are intact"
            ):
                yield
        except UserError:
            if distributed.is_main():
                _remove_partial(self._folder, ignore_errors=True)
            raise


def restore_params(
    run_folder: str | Path, checkpoint: CheckpointSelector = "best"
) -> tuple[int, dict[str, Any]]:
    """Restores parameters only, onto one device.

    If training kept a moving average of the parameters, that is restored. Each process may call
    this independently of the others.

    Args:
      run_folder: the run folder.
      checkpoint: the best by the run's `train.best_metric` (the newest, if none was validated),
        the newest, or that of a step.

    Returns:
      The checkpoint's step, and its parameters as nested dicts of arrays.

    Raises:
      UserError: there is no such checkpoint, or it is damaged.
    """
    folder = _folder(run_folder)
    step = _choose(folder, checkpoint)
    path = folder / str(step)
    cause = damage(path)
    if cause:
        raise UserError(f"{path} is damaged: {cause}; {_advice(folder, step)}")
    name = EMA if (path / EMA).is_dir() else PARAMS
    with ocp.Checkpointer(_handlers(alone=True), multiprocessing_options=_alone()) as orbax:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            orbax.metadata(path).item_metadata[name].tree,
        )
        items = orbax.restore(path, args=Composite(**{name: StandardRestore(template)}))
    return step, items[name]


def write_params(run_folder: str | Path, step: int, params: Mapping[str, Any]) -> None:
    """Writes a checkpoint of parameters only, which cannot be continued.

    Args:
      run_folder: the run folder; must not have checkpoints.
      step: names the checkpoint.
      params: nested dicts of arrays.
    """
    folder = _folder(run_folder)
    folder.mkdir(parents=True)
    with ocp.Checkpointer(_handlers(alone=True), multiprocessing_options=_alone()) as orbax:
        orbax.save(_partial(folder, step), args=Composite(**{PARAMS: StandardSave(params)}))
    _commit(folder, step, _record("loss", {}, {}))


def whole_checkpoints(
    run_folder: str | Path, announce: Callable[[str], None] = print
) -> dict[int, float]:
    """Verifies all checkpoints and returns the ranking scores of those that are intact.

    Args:
      run_folder: the run folder.
      announce: called with one line for each damaged checkpoint.

    Returns:
      By step, the `ranking_score` by the run's `train.best_metric`; -inf without a validation.
    """
    folder = _folder(run_folder)
    scores, damaged = _verified(folder)
    for step, cause in damaged.items():
        announce(f"{folder / str(step)} is damaged: {cause}")
    return scores


def _choose(folder: Path, checkpoint: CheckpointSelector) -> int:
    """The step of the selected checkpoint; arguments and errors as in `restore_params`."""
    steps = _steps(folder)
    if not steps:
        raise UserError(f"{folder} holds no checkpoint: train until one is written")
    if checkpoint == "last":
        return steps[-1]
    if checkpoint != "best":
        if checkpoint not in steps:
            raise UserError(
                f"{folder} holds no checkpoint of step {checkpoint}, only of "
                f"{', '.join(map(str, steps))}"
            )
        return checkpoint
    scores = {}
    for step in steps:
        try:
            scores[step] = _score(_read_record(folder / str(step)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder / str(step) / PROGRESS} is missing or damaged, so the best checkpoint "
                f"is unknown; {_advice(folder, step)}"
            ) from error
    best = best_step(scores)
    return steps[-1] if best is None else best


def _advice(folder: Path, damaged: int) -> str:
    """Advice for the user of a damaged checkpoint."""
    others = [str(step) for step in _steps(folder) if step != damaged]
    if others:
        return f"give another --checkpoint ({', '.join(others)}), or continue training"
    return "train again"


def _verified(folder: Path) -> tuple[dict[int, float], dict[int, str]]:
    """By step, the score of each intact checkpoint, and the damage of each other one."""
    scores, causes = {}, {}
    for step in _steps(folder):
        cause = damage(folder / str(step))
        if cause:
            causes[step] = cause
        else:
            scores[step] = _score(_read_record(folder / str(step)))
    return scores, causes


def _set_aside(folder: Path, step: int) -> Path:
    """Renames a damaged checkpoint, replacing an earlier one of that step."""
    aside = folder / f"{step}.damaged"
    return atomic.rename(folder / str(step), aside, replace=True)


def _commit(folder: Path, step: int, record: Mapping[str, Any]) -> None:
    """Completes a partial checkpoint and renames it, durably."""
    partial = _partial(folder, step)
    (partial / PROGRESS).write_text(json.dumps(record) + "\n", encoding="utf-8")
    write_manifest(partial)
    atomic.rename(partial, folder / str(step))


def _remove(folder: Path, step: int) -> None:
    """Removes a checkpoint; renamed first, so that it is never incomplete under its name."""
    shutil.rmtree(atomic.rename(folder / str(step), _partial(folder, step)))


def _remove_partial(folder: Path, ignore_errors: bool = False) -> None:
    for path in folder.glob("*.partial*"):
        shutil.rmtree(path, ignore_errors=ignore_errors)


def _partial(folder: Path, step: int) -> Path:
    return atomic.partial_path(folder / str(step))


def _folder(run_folder: str | Path) -> Path:
    return Path(run_folder).absolute() / CHECKPOINTS


def _steps(folder: Path) -> list[int]:
    """The steps of all checkpoints, intact or damaged, in ascending order."""
    return sorted(
        int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()
    )


def _record(
    best_metric: str, metrics: Mapping[str, Any], progress: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `progress.json`."""
    value = metrics.get(best_metric, math.nan)
    metrics = {best_metric: value} if math.isfinite(value) else {}
    return {"best_metric": best_metric, "figures": metrics, "progress": progress}


def _read_record(path: Path) -> dict[str, Any]:
    return json.loads((path / PROGRESS).read_bytes())


def _score(record: Mapping[str, Any]) -> float:
    return ranking_score(record["best_metric"], record["figures"])


def _divided(state: Any) -> tuple[Any, dict[str, Any]]:
    """Splits a state into its parameters and all other fields but the moving average."""
    training = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.name not in (PARAMS, EMA)
    }
    return state.params, training


def _like(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _handlers(alone: bool = False) -> ocp.CompositeCheckpointHandler:
    options = _alone() if alone else ocp.options.MultiprocessingOptions()
    return ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        **{
            name: ocp.StandardCheckpointHandler(multiprocessing_options=options)
            for name in (PARAMS, EMA, TRAINING)
        },
    )


def _alone() -> ocp.options.MultiprocessingOptions:
    """Options for a process that reads or writes independently of the others."""
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"{process}"
    )


def _from_first_process(number: int) -> int:
    """Broadcasts a number from the first process to all."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


@contextlib.contextmanager
def _explained(message: str) -> Iterator[None]:
    """Converts errors of the operating system.

    Raises:
      UserError: `message`, with the reason in place of {}.
    """
    try:
        yield
    except Exception as error:
        reason = _system_error(error)
        if reason is None:
            raise
        raise UserError(message.format(reason)) from error


def _system_error(error: BaseException | None) -> str | None:
    """The operating system's error, such as "No space left on device"; None for other errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        # TensorStore, which writes for Orbax, has its own exceptions.
        number = re.search(r"os_error_code='(\d+)'", str(error))
        if number:
            return os.strerror(int(number[1]))
        error = error.__cause__ or error.__context__
    return None


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Filters the errors that Orbax logs, with a traceback, and raises as well."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
