"""Checkpoints in a run folder, and the only import of orbax.

`checkpoints/<step>/` holds the items `params`, `ema` (where there is a moving average) and
`training`, the rest of the state, none of which depends on the devices that it was written from;
`progress.json`, what the loop has to remember; and `manifest.json`, by which it is known to be
whole.

A checkpoint is written to `<step>.partial`, which gets its name when everything, the manifest last,
is on the disk. Only then are older ones removed, under that same name. So whatever happens, and
whenever, a folder whose name is a number was whole once, and there is no moment without one.
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
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.args import Composite, StandardRestore, StandardSave

from flaxformer_mt.config import ValidationMetric
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.manifest import damage, write_manifest
from flaxformer_mt.training import distributed
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.progress import merit
from flaxformer_mt.training.state import TrainState

Which: TypeAlias = Literal["best", "last"] | int
"""A checkpoint: the best by validation, the newest, or that of a step."""

_PARAMS, _EMA, _TRAINING = "params", "ema", "training"
_PROGRESS = "progress.json"


class Checkpointer:
    """Writes checkpoints while training goes on, and reads the newest when it starts again.

    A context manager: leaving it waits until everything is written. Under several processes, which
    share the folder, each has one, and all call the same methods.
    """

    def __init__(
        self,
        run_folder: str | Path,
        keep_last: int = 2,
        keep_best: int = 1,
        best_metric: ValidationMetric = "loss",
        announce: Callable[[str], None] = print,
    ) -> None:
        """Opens the run's folder of checkpoints, or makes it.

        What an unfinished save left behind is removed. Each damaged checkpoint is announced and
        moved aside, to `<step>.damaged`, so that training can write that step again.

        Args:
          run_folder: where `checkpoints` is.
          keep_last: checkpoints kept because they are the newest.
          keep_best: checkpoints kept because they are the best by `best_metric`.
          best_metric: the validation figure that ranks them.
          announce: is told in one line what was found damaged, and why.

        Raises:
          UserError: the folder cannot be written to.
        """
        self.run_folder = Path(run_folder)
        self._folder = _folder(run_folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._merits: dict[int, float] = {}
        """Of all checkpoints that are whole; kept by the first process only, which writes them."""
        if distributed.is_main():
            with _explained(f"{self._folder} cannot be written to: {{}}"):
                self._folder.mkdir(parents=True, exist_ok=True)
                _remove_partial(self._folder)
                # Better refused now than when there is something to save.
                _partial(self._folder, 0).mkdir()
                _partial(self._folder, 0).rmdir()
                self._merits, damaged = _verified(self._folder)
                for step, cause in damaged.items():
                    aside = _set_aside(self._folder, step)
                    announce(f"{self._folder / str(step)} is damaged: {cause}; moved to {aside}")
        newest = _from_first_process(max(self._merits, default=-1))
        self._latest = None if newest < 0 else newest

        logging.getLogger("absl").addFilter(_is_not_raised)
        # Folders are made before the threads start: these would wait for them, and keep the process
        # from ending, if they could not be made.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(_handlers(), async_options=at_once)
        # One thread, in which a checkpoint becomes whole once Orbax has written its part.
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._unfinished: Future[None] | None = None

    def __enter__(self) -> "Checkpointer":
        """Nothing to do."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits and closes, whatever happened."""
        self.close()
        if kind is None:  # else the other processes may be anywhere
            distributed.barrier("checkpoints are written")

    def save(
        self,
        step: int,
        state: TrainState,
        progress: Mapping[str, Any] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to write a checkpoint, once the one before is written.

        Args:
          step: its name; steps made.
          state: copied before this returns, so the next training step may donate it.
          progress: JSON values that `restore` gives back.
          figures: of the validation after this step, if there was one. A checkpoint without a
            finite `best_metric` among them ranks below all that have one.

        Raises:
          UserError: this or the one before cannot be written, as the disk is full or the like.
        """
        self.wait()
        params, training = _divided(state)
        items = {_PARAMS: params, _TRAINING: training}
        if state.ema is not None:
            items[_EMA] = state.ema
        with self._explained(step):
            self._orbax.save(
                _partial(self._folder, step),
                args=Composite(**{name: StandardSave(item) for name, item in items.items()}),
            )
        record = _record(self._best_metric, figures or {}, progress or {})
        self._unfinished = self._finisher.submit(self._finish, step, record)
        self._latest = step

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._latest

    def restore(self, template: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, which must exist.

        Args:
          template: a state of the same shapes and dtypes. Its arrays are on the devices that the
            restored ones shall be on, which need not be those that the checkpoint was written from.

        Returns:
          The state, and the progress that was saved with it.

        Raises:
          UserError: it holds parameters only, as an averaged one does.
        """
        self.wait()
        path = self._folder / str(self._latest)
        if not (path / _TRAINING).is_dir():
            raise UserError(
                f"{path} holds parameters only, which cannot be trained on: start a run in another "
                f"--workdir with --train.init-from={self.run_folder}"
            )
        params, training = _divided(jax.tree.map(_like, template))
        items = {_PARAMS: params, _TRAINING: training}
        if template.ema is not None:
            items[_EMA] = jax.tree.map(_like, template.ema)
        restored = self._orbax.restore(
            path, args=Composite(**{name: StandardRestore(item) for name, item in items.items()})
        )
        state = TrainState(params=restored[_PARAMS], ema=restored.get(_EMA), **restored[_TRAINING])
        return state, _read_record(path)["progress"]

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
          UserError: the newest checkpoint could not be written. Those before it are whole.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.result()

    def close(self) -> None:
        """Waits, and ends the threads that write; errors as in `wait`."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            self._orbax.close()

    def _finish(self, step: int, record: Mapping[str, Any]) -> None:
        """Makes a checkpoint whole that Orbax is writing, then removes what need not be kept."""
        with self._explained(step):
            self._orbax.wait_until_finished()
            if distributed.is_main():
                _commit(self._folder, step, record)
                self._merits[step] = _merit(record)
                for superfluous in self._merits.keys() - self._kept():
                    _remove(self._folder, superfluous)
                    del self._merits[superfluous]

    def _kept(self) -> set[int]:
        best = [step for step in ranked(self._merits) if math.isfinite(self._merits[step])]
        return {*sorted(self._merits)[-self._keep_last :], *best[: self._keep_best]}

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """As `_explained`, of a failed save; frees the space that it has taken."""
        try:
            with _explained(
                f"the checkpoint of step {step} could not be written to {self._folder}: {{}}; "
                "earlier checkpoints are whole"
            ):
                yield
        except UserError:
            if distributed.is_main():
                _remove_partial(self._folder, ignore_errors=True)
            raise


def restore_params(run_folder: str | Path, checkpoint: Which = "best") -> tuple[int, Params]:
    """Reads parameters only, to one device, whatever devices they were trained on.

    Where training has kept a moving average of them, that is what is read. Each process may call
    this by itself.

    Args:
      run_folder: where `checkpoints` is.
      checkpoint: the best by the run's `train.best_metric` (the newest, if none was validated),
        the newest, or that of a step.

    Returns:
      The checkpoint's step and its parameters.

    Raises:
      UserError: there is no such checkpoint, or it is damaged.
    """
    folder = _folder(run_folder)
    step = _choose(folder, checkpoint)
    path = folder / str(step)
    cause = damage(path)
    if cause:
        raise UserError(f"{path} is damaged: {cause}; {_advice(folder, step)}")
    name = _EMA if (path / _EMA).is_dir() else _PARAMS
    with ocp.Checkpointer(_handlers(alone=True), multiprocessing_options=_alone()) as orbax:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            orbax.metadata(path).item_metadata[name].tree,
        )
        items = orbax.restore(path, args=Composite(**{name: StandardRestore(template)}))
    return step, items[name]


def write_params(run_folder: str | Path, step: int, params: Params) -> None:
    """Writes a checkpoint of parameters alone, which can be used but not trained on.

    Args:
      run_folder: where `checkpoints` is, or will be.
      step: its name.
      params: to be used for translating.
    """
    folder = _folder(run_folder)
    folder.mkdir(parents=True)
    with ocp.Checkpointer(_handlers(alone=True), multiprocessing_options=_alone()) as orbax:
        orbax.save(_partial(folder, step), args=Composite(**{_PARAMS: StandardSave(params)}))
    _commit(folder, step, _record("loss", {}, {}))


def whole_checkpoints(
    run_folder: str | Path, announce: Callable[[str], None] = print
) -> dict[int, float]:
    """The steps of all checkpoints that are as they were written, each with its merit.

    Args:
      run_folder: where `checkpoints` is.
      announce: is told in one line of each that is damaged.

    Returns:
      By step, how good the checkpoint is by the run's `train.best_metric`, more being better;
      -inf where there was no validation.
    """
    folder = _folder(run_folder)
    merits, damaged = _verified(folder)
    for step, cause in damaged.items():
        announce(f"{folder / str(step)} is damaged: {cause}")
    return merits


def ranked(merits: Mapping[int, float]) -> list[int]:
    """Steps by merit, the best first; of equal ones the earliest, as a later one was no better."""
    return sorted(merits, key=lambda step: (-merits[step], step))


def _choose(folder: Path, checkpoint: Which) -> int:
    """The step of a checkpoint that exists; arguments and errors as in `restore_params`."""
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
    merits = {}
    for step in steps:
        try:
            merits[step] = _merit(_read_record(folder / str(step)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder / str(step) / _PROGRESS} is missing or damaged, so it is not known which "
                f"checkpoint is the best; {_advice(folder, step)}"
            ) from error
    best = ranked(merits)[0]
    return best if math.isfinite(merits[best]) else steps[-1]


def _advice(folder: Path, damaged: int) -> str:
    """What can be done about a damaged checkpoint."""
    others = [str(step) for step in _steps(folder) if step != damaged]
    if others:
        return f"give another --checkpoint ({', '.join(others)}), or continue training"
    return "train again"


def _verified(folder: Path) -> tuple[dict[int, float], dict[int, str]]:
    """By step, the merit of each whole checkpoint, and what is wrong with each damaged one."""
    merits, causes = {}, {}
    for step in _steps(folder):
        cause = damage(folder / str(step))
        if cause:
            causes[step] = cause
        else:
            merits[step] = _merit(_read_record(folder / str(step)))
    return merits, causes


def _set_aside(folder: Path, step: int) -> Path:
    """Renames a damaged checkpoint; an earlier one of that step gives way."""
    aside = folder / f"{step}.damaged"
    return atomic.rename(folder / str(step), aside, replace=True)


def _commit(folder: Path, step: int, record: Mapping[str, Any]) -> None:
    """Completes a partial checkpoint and gives it its name, durably."""
    partial = _partial(folder, step)
    (partial / _PROGRESS).write_text(json.dumps(record) + "\n", encoding="utf-8")
    write_manifest(partial)
    atomic.rename(partial, folder / str(step))


def _remove(folder: Path, step: int) -> None:
    """Removes a checkpoint so that no half of it is ever seen under its name."""
    shutil.rmtree(atomic.rename(folder / str(step), _partial(folder, step)))


def _remove_partial(folder: Path, ignore_errors: bool = False) -> None:
    for path in folder.glob("*.partial*"):
        shutil.rmtree(path, ignore_errors=ignore_errors)


def _partial(folder: Path, step: int) -> Path:
    return atomic.partial_path(folder / str(step))


def _folder(run_folder: str | Path) -> Path:
    return Path(run_folder).absolute() / "checkpoints"


def _steps(folder: Path) -> list[int]:
    """The steps of all checkpoints, whole or damaged, in order."""
    return sorted(
        int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()
    )


def _record(
    best_metric: str, figures: Mapping[str, Any], progress: Mapping[str, Any]
) -> dict[str, Any]:
    """What `progress.json` holds."""
    value = figures.get(best_metric, math.nan)
    figures = {best_metric: value} if math.isfinite(value) else {}
    return {"best_metric": best_metric, "figures": figures, "progress": progress}


def _read_record(path: Path) -> dict[str, Any]:
    return json.loads((path / _PROGRESS).read_bytes())


def _merit(record: Mapping[str, Any]) -> float:
    return merit(record["best_metric"], record["figures"])


def _divided(state: TrainState) -> tuple[Params, dict[str, Any]]:
    """The parameters of a state, and all else but their average."""
    training = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.name not in (_PARAMS, _EMA)
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
            for name in (_PARAMS, _EMA, _TRAINING)
        },
    )


def _alone() -> ocp.options.MultiprocessingOptions:
    """Lets a process read or write without waiting for the others."""
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"{process}"
    )


def _from_first_process(number: int) -> int:
    """What the first of several processes knows, to all of them."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


@contextlib.contextmanager
def _explained(message: str) -> Iterator[None]:
    """Tells the user of what the operating system refuses.

    Raises:
      UserError: `message`, with the reason for {}.
    """
    try:
        yield
    except Exception as error:
        reason = _refusal(error)
        if reason is None:
            raise
        raise UserError(message.format(reason)) from error


def _refusal(error: BaseException | None) -> str | None:
    """What the operating system refused, such as "No space left on device"; None if nothing."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        # TensorStore, which writes for Orbax, has errors of its own.
        number = re.search(r"os_error_code='(\d+)'", str(error))
        if number:
            return os.strerror(int(number[1]))
        error = error.__cause__ or error.__context__
    return None


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Keeps Orbax from logging, with a traceback, the errors that it also raises."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
