"""Checkpoints of any training state, written by Orbax.

`checkpoints/<step>/` holds the Orbax items `params`, `ema` (if there is a moving average) and
`training` (the rest of the state), all independent of the devices that wrote them; `progress.json`,
the position in the data or the state of the training loop; and `manifest.json`, against which the
other files are verified.

A checkpoint is written in a workspace (`runs/atomic.py`), and gets its name once everything is on
disk, the manifest last. Only then are older checkpoints removed, unless another process is reading
them; they are moved to a workspace first. So a process may be killed at any moment: a folder whose
name is a number was complete once, and there is always one.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import errno
import functools
import logging
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.args import Composite, StandardRestore, StandardSave

from flaxformer_mt import distributed
from flaxformer_mt.config import ValidationMetric
from flaxformer_mt.errors import UserError, first_line, prefixed
from flaxformer_mt.input_files import max_content
from flaxformer_mt.runs import atomic, data_file, step_folders
from flaxformer_mt.runs.layout import EMA, PARAMS, PROGRESS, TRAINING, CheckpointSelector
from flaxformer_mt.runs.manifest import damage
from flaxformer_mt.runs.step_folders import kept_steps

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by path."""
_is_reading = contextvars.ContextVar("_is_reading", default=False)
State = TypeVar("State")
Position = TypeVar("Position")


class Checkpoints:
    """Writes checkpoints of any pytree in the background, and restores the newest one.

        with fmt.Checkpoints("runs/mine") as checkpoints:
            state, position = checkpoints.restore_or(state, data.start)
            ...
            checkpoints.save(position.step, state, position)

    A context manager: leaving it waits until everything is written. If several processes train
    together, each has `Checkpoints` of the same folder, and all call the same methods. A state that
    is a dict or a dataclass with the member "params" can be used by everything that reads the
    parameters of a run, such as `average` and `train.init_from`; of "ema", too, if it is not None.
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
        self._scores: dict[int, float] = {}
        """Ranking scores of checkpoints that are not known to be damaged; only in process 0."""
        self._unverified: set[int] = set()
        """Those of earlier processes that were not hashed yet, which takes time."""
        if distributed.is_main():
            _require_writable_name(self._folder)
            problem = f"{self._folder} cannot be written to:"
            with _explained(problem):
                atomic.make_folder(self._folder)
                atomic.remove_leftovers(self._folder)
                with atomic.workspace(self._folder):
                    pass  # Fails now rather than at the first save.
            self._scores, damaged = step_folders.verified(
                self._folder, names=[PROGRESS], metric=best_metric
            )
            self._unverified = set(self._scores)
            with _explained(problem):
                for step, cause in damaged.items():
                    self._set_aside(step, cause)
                while self._scores and not self._is_intact(max(self._scores)):
                    pass  # The one before may be.
            if self._scores:
                data_file.mark_trained(self.run_folder)
        newest = int(_from_first_process(np.int32(max(self._scores, default=-1))))
        self._latest = None if newest < 0 else newest

        _complete_all_tasks()
        # Folders are created before the threads start: if creation failed, these would wait for
        # them forever and keep the process from exiting.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        handlers = _handlers(ocp.options.MultiprocessingOptions())
        self._orbax = ocp.AsyncCheckpointer(handlers, async_options=at_once)
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
        items = _divided(jax.tree.map(_as_array, state))
        with self._explained(step):
            partial = self._new_workspace() / str(step)
            self._orbax.save(
                partial,
                args=Composite(**{name: StandardSave(item) for name, item in items.items()}),
            )
        record = step_folders.make_record(
            self._best_metric, metrics or {}, _to_json(position), self._run_id
        )
        self._unfinished = self._finisher.submit(self._finish, partial, record)
        self._latest = step

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._latest

    def restore_or(self, state: State, position: Position) -> tuple[State, Position]:
        """Restores the newest checkpoint, or returns the arguments if there is none.

        Args:
          state: a state with the shapes, dtypes and shardings to restore to, concrete or abstract.
          position: of the type that was saved.

        Raises:
          UserError: the checkpoint holds another kind of state or position, or parameters only, or
            is of another run.
        """
        if self._latest is None:
            return state, position
        state, saved = self.restore(state)
        try:
            return state, _from_json(saved, position)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self._folder / str(self._latest)} holds another kind of position than "
                f"{type(position).__name__}: {saved}"
            ) from error

    def restore(self, template: State) -> tuple[State, Any]:
        """Restores the newest checkpoint, which must exist.

        The shardings of the template need not be those that the checkpoint was written with.

        Returns:
          The state, and the JSON values of the position that was saved with it.
        """
        self.wait()
        path = self._folder / str(self._latest)
        record = step_folders.read_record(path)
        step_folders.check_run(record, path, self._run_id)
        items = _divided(jax.tree.map(_like, template))
        if TRAINING in items and not (path / TRAINING).is_dir():
            raise UserError(
                f"{path} holds parameters only and cannot be continued: start a run in another "
                f"--workdir with --train.init-from={self.run_folder}"
            )
        with _reading(path):
            stored = self._orbax.metadata(path).item_metadata
            _check_same_kind(path, stored, items)
            _check_chunks(path, {name: stored[name].tree for name in items})
            restored = self._orbax.restore(
                path,
                args=Composite(**{name: StandardRestore(item) for name, item in items.items()}),
            )
        return _joined(template, restored), record["progress"]

    def wait(self) -> None:
        """Waits until everything is written; `UserError` if the newest checkpoint cannot be."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.result()

    def wait_for_all(self) -> None:
        """As `wait`, in all processes: the first one completes checkpoints, the others wait for it.

        All have to call it before they end: JAX aborts the first one if it still writes
        `SHUTDOWN_SECONDS` later.
        """
        self.wait()
        distributed.barrier("the checkpoint is complete")

    def close(self) -> None:
        """Waits and stops the writing threads."""
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
        for superfluous in self._scores.keys() - self._kept_steps():
            with _explained(
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
            with _explained(
                f"the checkpoint of step {step} could not be written to {self._folder}:",
                "; earlier checkpoints are intact",
            ):
                yield
        except UserError:
            _wait_for_writes()
            with contextlib.suppress(OSError):
                self._workspaces.close()
            raise


def restore_params(
    run_folder: str | Path,
    checkpoint: CheckpointSelector = "best",
    check: Callable[[Shapes], None] | None = None,
    item: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """Restores parameters only, onto one device; of a run with a moving average, that.

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
    with _reading(path), _own_checkpointer() as orbax:
        stored = orbax.metadata(path).item_metadata[name].tree
        with prefixed(f"{path}: "):
            (check or functools.partial(_check_size, path / name))(_shapes(stored))
        _check_chunks(path, stored)
        for each, leaf in _named(stored):
            if not item and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise UserError(f"{path}: damaged: {each} has values of {leaf.dtype}")
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), stored
        )
        items = orbax.restore(path, args=Composite(**{name: StandardRestore(template)}))
    return items[name]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns errors of Orbax into `UserError`: a manifest may fit files that are not its own."""
    _complete_all_tasks()
    token = _is_reading.set(True)
    try:
        yield
    except (UserError, jax.errors.JaxRuntimeError):  # The latter: there is not enough memory.
        raise
    except Exception as error:
        reason = _system_error(error)
        if reason:
            raise UserError(f"{path} cannot be read: {reason}") from error
        raise UserError(
            f"{path} is damaged, or not a checkpoint ({first_line(error)}); "
            f"{step_folders.advice(path)}"
        ) from error
    finally:
        _is_reading.reset(token)


def _check_size(folder: Path, shapes: Shapes) -> None:
    there = sum(file.stat().st_size for file in folder.rglob("*"))
    if 4 * sum(map(math.prod, shapes.values())) > max_content(there):
        raise UserError("damaged: its arrays are far larger than its files")


def _check_chunks(path: Path, stored: Any) -> None:
    """Checks that no array is read in chunks that are larger than itself."""
    for name, leaf in _named(stored):
        chunk = leaf.storage.chunk_shape if leaf.storage else leaf.shape
        if any(ours > max(size, 1) for ours, size in zip(chunk, leaf.shape, strict=True)):
            raise UserError(
                f"{path}: damaged: {name} is an array {list(leaf.shape)} in chunks {list(chunk)}"
            )


def write_params(run_folder: str | Path, step: int, params: Mapping[str, Any]) -> None:
    """Writes the first checkpoint of a run, of parameters only, which cannot be continued."""
    folder = step_folders.folder_of(run_folder)
    _require_writable_name(folder)
    atomic.make_folder(folder)
    _complete_all_tasks()
    with (
        _explained(f"{folder} cannot be written:"),
        atomic.workspace(folder) as workspace,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(_wait_for_writes)
        partial = workspace / str(step)
        with _own_checkpointer() as orbax:
            orbax.save(partial, args=Composite(**{PARAMS: StandardSave(params)}))
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


def _members(state: Any) -> dict[str, Any] | None:
    if isinstance(state, Mapping):
        # Not its own items: a frozen dict wraps them when they are read.
        items, _ = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda node: node is not state
        )
        return {str(path[0].key): value for path, value in items}
    if dataclasses.is_dataclass(state):
        return {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.metadata.get("pytree_node", True)  # Flax marks what is not an array so.
        }
    return None


def _divided(state: Any) -> dict[str, Any]:
    """Divides a state into the items of a checkpoint: parameters, moving average, and the rest."""
    members = _members(state)
    if members is None:
        return {TRAINING: {_WHOLE: state}}
    items = {
        name: members.pop(name)
        for name in (PARAMS, EMA)
        if name in members and (name == PARAMS or members[name] is not None)
    }
    members.pop(EMA, None)
    return {**items, TRAINING: members} if members else items


def _joined(template: Any, items: Mapping[str, Any]) -> Any:
    training = items.get(TRAINING) or {}
    members = _members(template)
    if members is None:
        return training[_WHOLE]
    found = {name: items[name] for name in (PARAMS, EMA) if items.get(name) is not None} | training
    if not isinstance(template, Mapping):
        return dataclasses.replace(template, **found)
    # Also of a frozen or an ordered dict. A moving average may be None.
    structure = jax.tree.structure(template, is_leaf=lambda node: node is not template)
    return jax.tree.unflatten(structure, map(found.get, members))


_WHOLE = "state"  # The name of a state that is neither a dict nor a dataclass.


def _check_same_kind(path: Path, stored: Any, wanted: Mapping[str, Any]) -> None:
    there: dict[str, Any] = {}
    here: dict[str, Any] = {}
    for name in (PARAMS, EMA, TRAINING):
        item = stored.get(name)
        prefix = "" if name == TRAINING else f"{name}/"
        there |= {prefix + leaf: _kind(each) for leaf, each in _named(item and item.tree)}
        here |= {prefix + leaf: _kind(each) for leaf, each in _named(wanted.get(name))}
    for leaf in sorted(there.keys() | here.keys()):
        theirs, ours = there.get(leaf, "nothing"), here.get(leaf, "nothing")
        if theirs != ours:
            raise UserError(
                f"{path} holds another kind of state: {leaf} is {theirs} there, and {ours} here; "
                "restore into the state that was saved, or give another folder"
            )


def _kind(leaf: Any) -> str:
    numbers = " of integers" if jnp.issubdtype(leaf.dtype, jnp.integer) else ""
    return f"an array {list(leaf.shape)}{numbers}"


def _shapes(tree: Any) -> Shapes:
    return {name: tuple(leaf.shape) for name, leaf in _named(tree)}


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _like(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if not hasattr(leaf, "shape"):
        leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _to_json(position: Any) -> Any:
    if hasattr(position, "to_json"):
        return position.to_json()
    if hasattr(position, "_asdict"):
        return position._asdict()
    if dataclasses.is_dataclass(position) and not isinstance(position, type):
        return dataclasses.asdict(position)
    return position


def _from_json(values: Any, like: Any) -> Any:
    if hasattr(like, "from_json"):
        return type(like).from_json(values)
    if hasattr(like, "_asdict") or dataclasses.is_dataclass(like):
        return type(like)(**values)
    return values


def _handlers(options: ocp.options.MultiprocessingOptions) -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        **{
            name: ocp.StandardCheckpointHandler(multiprocessing_options=options)
            for name in (PARAMS, EMA, TRAINING)
        },
    )


def _own_checkpointer() -> ocp.Checkpointer:
    process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"{process}"
    )
    return ocp.Checkpointer(_handlers(options), multiprocessing_options=options)


def _from_first_process(value: Any) -> Any:
    if jax.process_count() == 1:
        return value
    return multihost_utils.broadcast_one_to_all(value)


@contextlib.contextmanager
def _explained(problem: str, consequence: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = _system_error(error)
        if reason is None:
            raise
        raise UserError(f"{problem} {reason}{consequence}") from error


def _require_writable_name(folder: Path) -> None:
    """Orbax reads some names as patterns, and cannot write to such a folder."""
    atomic.require_utf8(folder)
    for name in folder.absolute().parts:
        if re.search(r"\[.*\]|\\", name):
            raise UserError(
                f"checkpoints cannot be written below {name!r}: use a name without brackets and "
                "backslashes"
            )


def _system_error(error: BaseException | None) -> str | None:
    """Returns "No space left on device" or the like; None for errors of other kinds."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        # TensorStore, which writes for Orbax, has its own exceptions.
        number = re.search(r"os_error_code='(\d+)'", str(error))
        if number:
            return os.strerror(int(number[1]))
        if isinstance(error, MemoryError) or "can't start new thread" in str(error):
            return os.strerror(errno.ENOMEM)
        error = error.__cause__ or error.__context__
    return None


def _is_not_raised(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


class _CompletingLoop(asyncio.SelectorEventLoop):
    """An event loop that completes its tasks before it is closed."""

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@functools.cache
def _complete_all_tasks() -> None:
    """Makes Orbax complete all reads and writes of a checkpoint, also if one of them fails.

    By default it closes their event loop, and TensorStore prints a traceback at the end of each of
    the others, whose files appear after those of the checkpoint were removed. Orbax logs the error,
    too, which is raised anyway.
    """
    logging.getLogger("absl").addFilter(_is_not_raised)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Of Python 3.14.
        policy: Any = asyncio.get_event_loop_policy()
    make_loop = policy.new_event_loop

    def new_event_loop() -> asyncio.AbstractEventLoop:
        is_own = _is_reading.get() or _writes(threading.current_thread())
        return _CompletingLoop() if is_own else make_loop()

    policy.new_event_loop = new_event_loop


def _wait_for_writes() -> None:
    for thread in filter(_writes, threading.enumerate()):
        threading.Thread.join(thread)


def _writes(thread: threading.Thread) -> bool:
    return type(thread).__module__.startswith("orbax.")
