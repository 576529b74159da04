"""Checkpoints of any training state, written by Orbax.

`checkpoints/<step>/` holds the Orbax items `params`, `ema` (if there is a moving average) and
`training` (the rest of the state), all independent of the devices that wrote them; `progress.json`,
the position in the data or the state of the training loop; and `manifest.json`, against which the
other files are verified.

A checkpoint is written in a workspace (`atomic.py`), and gets its name once everything is on
disk, the manifest last. Only then are older checkpoints removed, unless another process is reading
them; they are moved to a workspace first. So a process may be killed at any moment: a folder whose
name is a number was complete once, and there is always one.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.args import Composite, StandardRestore, StandardSave

from flaxformer_mt import atomic, distributed
from flaxformer_mt.config import ValidationMetric
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.memory_limits import fits_on_a_device
from flaxformer_mt.run_layout import EMA, PARAMS, PROGRESS, TRAINING, CheckpointSelector
from flaxformer_mt.runs import data_file, orbax_errors, states, step_folders
from flaxformer_mt.runs.manifest import damage
from flaxformer_mt.runs.states import Shapes
from flaxformer_mt.runs.step_folders import kept_steps

State = TypeVar("State")
Position = TypeVar("Position")


class Checkpoints:
    """Writes checkpoints of any pytree in the background, and restores the newest one.

        with fmt.Checkpoints("runs/mine", optimizer=optimizer) as checkpoints:
            state, position = checkpoints.restore_or(state, data.start)
            ...
            checkpoints.save(position.step, state, position)

    A context manager: leaving it waits until everything is written. If several processes train
    together, each has `Checkpoints` of the same folder, and all call the same methods. A state that
    is a dict or a dataclass with the member "params" can be used by everything that reads the
    parameters of a run, such as `average` and `train.init_from`; of "ema", too, if it is not None.

    A script continues only what it began. Each checkpoint records the shapes and dtypes of the
    state, the types of its containers, the functions and constants of the optimizer, and, with the
    position, everything that the batches depend on. A checkpoint is restored if all are the same.
    The code of your step is not recorded, and neither is the seed of `compile_step`.
    """

    def __init__(
        self,
        run_folder: str | Path,
        keep_last: int = 2,
        keep_best: int = 1,
        best_metric: ValidationMetric = "loss",
        announce: Callable[[str], None] = print,
        *,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        """Opens or creates the run's folder of checkpoints.

        Removes what an unfinished save left behind. Verifies the newest checkpoint, and others
        before they are kept in place of those that are removed. Renames each damaged checkpoint to
        `<step>.damaged`, so that training can write that step again. `data.json`, if the folder has
        one, identifies the run to which the checkpoints belong.

        Args:
          run_folder: the run folder.
          keep_last: number of newest checkpoints to keep.
          keep_best: number of best checkpoints to keep, by `best_metric`.
          best_metric: the validation metric that ranks checkpoints.
          announce: called with one line for each damaged checkpoint.
          optimizer: the optimizer of the state. Its state alone does not tell Adam from Adamax, nor
            one learning rate from another. None = the one that the function of `compile_step`
            names: it is then compared before the first step. Give it if several `Checkpoints` are
            open, or if a step finds its optimizer in an object.

        Raises:
          UserError: the folder cannot be written to, or a checkpoint or `data.json` cannot be read.
        """
        self.run_folder = Path(run_folder)
        self._folder = step_folders.folder_of(run_folder)
        self._announce = announce
        self._run_id = data_file.run_id(run_folder)
        self._workspaces = contextlib.ExitStack()
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._optimizer = {} if optimizer is None else states.of_optimizer(optimizer.update)
        self._began_with: dict[str, Any] = {}
        """The optimizer of the restored checkpoint, until it is compared."""
        states.open_checkpoints.add(self)
        self._scores: dict[int, float] = {}
        """Ranking scores of checkpoints that are not known to be damaged; only in process 0."""
        self._unverified: set[int] = set()
        """Those of earlier processes that were not hashed yet, which takes time."""
        if distributed.is_main():
            orbax_errors.require_writable_name(self._folder)
            problem = f"{self._folder} cannot be written to:"
            with orbax_errors.explained(problem):
                atomic.make_folder(self._folder)
                atomic.remove_leftovers(self._folder)
                with atomic.workspace(self._folder):
                    pass  # Fails now rather than at the first save.
            self._scores, damaged = step_folders.verified(
                self._folder, names=[PROGRESS], metric=best_metric
            )
            self._unverified = set(self._scores)
            with orbax_errors.explained(problem):
                for step, cause in damaged.items():
                    self._set_aside(step, cause)
                while self._scores and not self._is_intact(max(self._scores)):
                    pass  # The one before may be.
            if self._scores:
                data_file.mark_trained(self.run_folder)
        newest = int(_from_first_process(np.int32(max(self._scores, default=-1))))
        self._latest = self._complete = None if newest < 0 else newest
        """The newest checkpoint, and the newest one of which everything is written."""

        # Folders are created before the threads start: if creation failed, these would wait for
        # them forever and keep the process from exiting.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.options.MultiprocessingOptions()
        self._items = {name: _Item(multiprocessing_options=options) for name in _ITEMS}
        self._orbax = ocp.AsyncCheckpointer(_handler(options, self._items), async_options=at_once)
        # One thread, which completes a checkpoint once Orbax has written its part.
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._unfinished: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close()
        if kind is None:  # Otherwise the other processes may never reach the barrier.
            distributed.barrier("checkpoints are written")

    def save(
        self,
        step: int,
        state: Any,
        position: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts writing the checkpoint of a step, after waiting for the previous one.

        Args:
          step: the number of training steps made.
          state: a pytree of arrays; copied before this returns, so the next training step may
            donate it.
          position: JSON values, a named tuple or a dataclass of them, or an object with `to_json`
            and `from_json`, such as the position in the data; returned by `restore_or`.
          metrics: of the validation after this step, if there was one. A checkpoint without a
            finite `best_metric` ranks below all that have one.

        Raises:
          UserError: this or the previous checkpoint cannot be written, for example because the disk
            is full.
        """
        self.wait()
        items = states.divided(states.as_arrays(state))
        record = step_folders.make_record(
            self._best_metric,
            metrics or {},
            states.to_json(position),
            self._run_id,
            {**states.of_state(state), **self._optimizer},
        )
        with self._explained(step):
            partial = self._new_workspace() / str(step)
            self._orbax.save(
                partial,
                args=Composite(**{name: _Save(item) for name, item in items.items()}),
            )
            self._unfinished = self._finisher.submit(self._finish, partial, record)
        self._latest = step

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._latest

    def restore_or(
        self, state: State, position: Position, *, accept_changes: bool = False
    ) -> tuple[State, Position]:
        """Restores the newest checkpoint, or returns the arguments if there is none.

        Args:
          state: a state with the shapes, dtypes and shardings to restore to, concrete or abstract.
          position: of the type that was saved, such as `data.start`.
          accept_changes: whether to go on if optimizer, dtypes, model or data have changed. No
            uninterrupted training equals that one: arrays are converted to the new dtypes, the
            numbers of one optimizer are read as those of another, and changed data begin with the
            next epoch.

        Raises:
          UserError: the checkpoint is of another optimizer, model or stream of batches, which is
            named; or it holds another kind of state or position, or parameters only, or is of
            another run.
        """
        if self._latest is None:
            return state, position
        self.wait()
        path = self._folder / str(self._latest)
        record = step_folders.read_record(path)
        step_folders.check_run(record, path, self._run_id)
        items = states.divided(states.like(state))
        if TRAINING in items and not (path / TRAINING).is_dir():
            raise UserError(
                f"{path} holds parameters only and cannot be continued: start a run in another "
                f"workdir with train.init_from={self.run_folder}"
            )
        changes: list[str] = []
        wanted: Any = position
        try:
            saved = states.from_json(record["progress"], wanted)
            if hasattr(wanted, "continued_in"):  # A position in a stream of batches.
                changes = states.differences(saved.identity, wanted.identity)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} holds another kind of position than {type(position).__name__}: "
                f"{record['progress']}"
            ) from error
        with orbax_errors.reading(path):
            stored = self._orbax.metadata(path).item_metadata
            with prefixed(f"{path} holds "):
                dtypes = states.changed_dtypes(stored, items)
            there = dict(record["identity"])
            if not self._optimizer:
                names = [name for name in there if name.startswith(f"{states.OPTIMIZER}/")]
                began_with = {name: there.pop(name) for name in names}
                self._began_with = {} if accept_changes else began_with
            here = {**states.of_state(state), **self._optimizer}
            if not accept_changes:
                _require_unchanged(path, [*changes, *states.differences(there, here), *dtypes])
            states.check_chunks(path, {name: stored[name].tree for name in items})
            restored = self._orbax.restore(
                path,
                args=Composite(**{name: _Restore(item) for name, item in items.items()}),
            )
        state = states.owned(states.joined(state, restored))
        return state, saved.continued_in(position) if changes else saved

    def compare_optimizer(self, found: dict[str, Any]) -> None:
        """Compares the optimizer of a step with that of the restored checkpoint, if none was given.

        Raises:
          UserError: it is another one.
        """
        if found and self._began_with and not self._optimizer:
            path = self._folder / str(self._latest)
            _require_unchanged(path, states.differences(self._began_with, found))
        self._optimizer = self._optimizer or found
        self._began_with = {}

    def wait(self) -> None:
        """Waits until everything is written; `UserError` if the newest checkpoint cannot be."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            try:
                unfinished.result()
            except BaseException:
                self._latest = self._complete
                raise

    def wait_for_all(self) -> None:
        """As `wait`, in all processes: the first one completes checkpoints, the others wait for it.

        All have to call it before they end: JAX aborts the first one if it still writes
        `SHUTDOWN_SECONDS` later.
        """
        self.wait()
        distributed.barrier("the checkpoint is complete")

    def close(self) -> None:
        """Waits and stops the writing threads."""
        states.open_checkpoints.discard(self)
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            self._orbax.close()

    def _new_workspace(self) -> Path:
        name = ""
        if distributed.is_main():
            name = self._workspaces.enter_context(atomic.workspace(self._folder)).name
        letters = np.frombuffer(name.encode().ljust(64), np.uint8)
        return self._folder / _from_first_process(letters).tobytes().decode().strip()

    def _finish(self, partial: Path, record: Mapping[str, Any]) -> None:
        step = int(partial.name)
        with self._explained(step):
            self._orbax.wait_until_finished()
            if distributed.is_main():
                step_folders.commit(self._folder, partial, record, jax.process_count())
                self._workspaces.close()
                data_file.mark_trained(self.run_folder)
                self._scores[step] = step_folders.ranking_score(
                    self._best_metric, record["metrics"]
                )
            else:
                step_folders.leave_hashes(partial)
        self._complete = step
        for superfluous in self._scores.keys() - self._kept_steps():
            with orbax_errors.explained(
                f"{self._folder / str(superfluous)} could not be removed:",
                "; all checkpoints are intact",
            ):
                # One that is being read is removed after a later save.
                if step_folders.remove(self._folder, superfluous):
                    del self._scores[superfluous]

    def _kept_steps(self) -> set[int]:
        """Returns the intact checkpoints to keep, which are verified before others are removed."""
        while True:
            kept = kept_steps(self._scores, self._keep_last, self._keep_best)
            if all(self._is_intact(step) for step in kept):
                return kept

    def _is_intact(self, step: int) -> bool:
        """Verifies a checkpoint, unless that was done, and sets a damaged one aside."""
        cause = damage(self._folder / str(step)) if step in self._unverified else None
        self._unverified.discard(step)
        if cause:
            self._set_aside(step, cause)
            del self._scores[step]
        return not cause

    def _set_aside(self, step: int, cause: str) -> None:
        aside = step_folders.set_aside(self._folder, step)
        self._announce(f"{self._folder / str(step)} is damaged: {cause}; moved to {aside}")

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            with orbax_errors.explained(
                f"the checkpoint of step {step} could not be written to {self._folder}:",
                "" if self._complete is None else "; earlier checkpoints are intact",
            ):
                yield
        except BaseException:
            for item in self._items.values():
                item.stop()
            with contextlib.suppress(OSError):
                self._workspaces.close()
            raise


def _require_unchanged(path: Path, changes: Sequence[str]) -> None:
    if changes:
        raise UserError(
            f"{path} was not begun with this script ({states.listed(changes)}): go back to what "
            "it was begun with, give another folder, or continue with "
            "restore_or(..., accept_changes=True), which no uninterrupted training equals"
        )


def restore_params(
    run_folder: str | Path,
    checkpoint: CheckpointSelector = "best",
    check: Callable[[Shapes], None] | None = None,
    item: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """Restores parameters only, onto one device; of a run with a moving average, that.

    Parameters that one device can hardly hold are returned as NumPy arrays.

    The best checkpoint is the newest if none was validated. Each process may call this
    independently of the others.

    Args:
      run_folder: the run folder.
      checkpoint: which of its checkpoints.
      check: raises `UserError` if the shapes of the parameters, by path, are not those of the
        model. Without it they may be any that files of such a size can have.
      item: another item of the checkpoint to restore instead, such as `TRAINING`.

    Returns:
      The checkpoint's step, and its parameters as nested dicts of arrays.

    Raises:
      UserError: there is no such checkpoint, or it is damaged.
    """
    folder = step_folders.folder_of(run_folder)
    run_id = data_file.run_id(run_folder)
    while True:
        step = step_folders.choose(folder, checkpoint)
        path = folder / str(step)
        with step_folders.in_use(folder, [step]) as is_there:
            if not is_there:
                continue  # Training has removed it in the meantime.
            try:
                return step, _restore_params(path, run_id, check, item)
            except Exception:
                # So has it here, on a file system without locks.
                if path.is_dir():
                    raise


def _restore_params(
    path: Path, run_id: str | None, check: Callable[[Shapes], None] | None, item: str | None = None
) -> dict[str, Any]:
    cause = damage(path)
    if cause:
        raise UserError(f"{path} is damaged: {cause}; {step_folders.advice(path)}")
    step_folders.check_run(step_folders.read_record(path), path, run_id)
    name = item or (EMA if (path / EMA).is_dir() else PARAMS)
    if not (path / name).is_dir():
        missing = "parameters" if name == PARAMS else "state of an optimizer"
        raise UserError(f"{path} has no {missing}: its state has no member {name!r}")
    with orbax_errors.reading(path), _own_checkpointer() as orbax:
        stored = orbax.metadata(path).item_metadata[name].tree
        with prefixed(f"{path}: "):
            (check or functools.partial(states.check_size, path / name))(states.shapes(stored))
        states.check_chunks(path, stored)
        for each, leaf in states.named(stored):
            if not item and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise UserError(f"{path}: damaged: {each} has values of {leaf.dtype}")
        devices, leaves = jax.local_devices(), jax.tree.leaves(stored)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        is_small = fits_on_a_device(size, devices)
        # Whoever uses a larger model shards it.
        device = devices[0] if is_small else jax.local_devices(backend="cpu")[0]
        sharding = SingleDeviceSharding(device)
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), stored
        )
        items = orbax.restore(path, args=Composite(**{name: _Restore(template)}))
    return items[name] if is_small else jax.device_get(items[name])


def write_params(run_folder: str | Path, step: int, params: Mapping[str, Any]) -> None:
    """Writes the first checkpoint of a run, of parameters only, which cannot be continued."""
    folder = step_folders.folder_of(run_folder)
    orbax_errors.require_writable_name(folder)
    atomic.make_folder(folder)
    with (
        orbax_errors.explained(f"{folder} cannot be written:"),
        atomic.workspace(folder) as workspace,
    ):
        partial = workspace / str(step)
        with _own_checkpointer() as orbax:
            orbax.save(partial, args=Composite(**{PARAMS: _Save(params)}))
        step_folders.commit(
            folder, partial, step_folders.make_record("loss", {}, {}, data_file.run_id(run_folder))
        )


def on_this_host(tree: Any) -> Any:
    """Copies arrays to the memory of this process; of several processes, all have to call this."""
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def whole_checkpoints(
    run_folder: str | Path, announce: Callable[[str], None] = print
) -> dict[int, float]:
    """Returns the `ranking_score` of each intact checkpoint, and announces damaged ones.

    A training in progress may remove any of them that is not in use (`step_folders.in_use`).
    """
    folder = step_folders.folder_of(run_folder)
    scores, damaged = step_folders.verified(folder)
    for step, cause in damaged.items():
        announce(f"{folder / str(step)} is damaged: {cause}")
    return scores


_ITEMS = (PARAMS, EMA, TRAINING)


class _Item(ocp.StandardCheckpointHandler):
    """Writes an item, in threads that go on when another item fails, unless they are stopped."""

    _writes: Sequence[Any] = ()

    async def async_save(self, *arguments: Any, **options: Any) -> list[Any] | None:
        self._writes = ()
        writes = await super().async_save(*arguments, **options)
        self._writes = writes or ()
        return writes

    def stop(self) -> None:
        """Cancels what is being written, and waits until that has ended."""
        for write in self._writes:
            with contextlib.suppress(Exception):  # The checkpoint's own error is raised.
                write.cancel()
                write.result()


@ocp.args.register_with_handler(_Item, for_save=True)
class _Save(StandardSave):
    pass


@ocp.args.register_with_handler(_Item, for_restore=True)
class _Restore(StandardRestore):
    pass


def _handler(
    options: ocp.options.MultiprocessingOptions, items: Mapping[str, _Item]
) -> ocp.CompositeCheckpointHandler:
    composite = ocp.CompositeOptions(multiprocessing_options=options)
    return ocp.CompositeCheckpointHandler(composite_options=composite, **items)


def _own_checkpointer() -> ocp.Checkpointer:
    process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"{process}"
    )
    items = {name: _Item(multiprocessing_options=options) for name in _ITEMS}
    return ocp.Checkpointer(_handler(options, items), multiprocessing_options=options)


def _from_first_process(value: Any) -> Any:
    if jax.process_count() == 1:
        return value
    return multihost_utils.broadcast_one_to_all(value)
