"""The folders in `checkpoints/`: which there are, which are in use, which are kept or removed.

`<step>` holds a complete checkpoint; the folder may be a link to another disk. `<step>.damaged` was
set aside. A reader holds a shared lock on the folder that it reads, and what is held is not
removed. Only complete checkpoints are removed, and what this program left unfinished.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax

from flaxformer_mt import atomic, run_layout
from flaxformer_mt.config import ValidationMetric
from flaxformer_mt.distributed import BARRIER_SECONDS
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import Finite, read_json
from flaxformer_mt.run_layout import CheckpointSelector
from flaxformer_mt.runs.manifest import damage, entries, write_manifest

_OWN_FILES = "**/ocdbt.process_{}/**/*"
"""The files that a process writes to a checkpoint of Orbax, by its number."""
_LOWER_IS_BETTER = {"loss", "cross_entropy", "perplexity"}
_DAMAGED = ".damaged"


def folder_of(run_folder: str | Path) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(run_folder).absolute() / run_layout.CHECKPOINTS


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints, intact or damaged, in ascending order."""
    return sorted(
        int(path.name)
        for path in folder.glob("*")
        if path.name.isdecimal() and path.name == str(int(path.name)) and path.is_dir()
    )


def _recovered_steps_in(folder: Path) -> list[int]:
    # A process may have been killed while it replaced a checkpoint, which then has no name.
    atomic.remove_leftovers(folder)
    return steps_in(folder)


def has_any(run_folder: str | Path) -> bool:
    """Returns whether a run has checkpoints, counting those that were set aside as damaged."""
    folder = folder_of(run_folder)
    return bool(_recovered_steps_in(folder)) or any(folder.glob(f"*{_DAMAGED}*"))


@contextlib.contextmanager
def held(folder: Path, *, exclusive: bool = False, wait: bool = True) -> Iterator[bool]:
    """Locks a folder, which keeps it from being removed while the block runs.

    The lock is on the folder itself, so that a folder that may only be read can be locked as well.

    Several processes may hold it, but only one if `exclusive`. Yields whether the folder exists
    and, unless this waits for them, no other process holds it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        try:
            atomic.lock(descriptor, wait, shared=not exclusive)
            # It may have lost its name while this process waited.
            is_held = os.path.samestat(os.fstat(descriptor), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def in_use(folder: Path, steps: Sequence[int]) -> Iterator[bool]:
    """Keeps checkpoints from being removed while the block runs; yields whether all exist."""
    with contextlib.ExitStack() as stack:
        yield all(stack.enter_context(held(folder / str(step))) for step in steps)


def remove(folder: Path, step: int) -> bool:
    """Removes a complete checkpoint (of a link not the target) unless it is in use."""
    path = folder / str(step)
    with held(path, exclusive=True, wait=False) as is_free:
        if is_free:
            # Moved first, so that it is never incomplete under its name.
            with atomic.workspace(folder) as workspace:
                path.replace(workspace / path.name)
                atomic.sync(folder)
    return not os.path.lexists(path)


def set_aside(folder: Path, step: int) -> Path:
    """Renames a damaged checkpoint to `<step>.damaged`, or to the next name that is free."""
    number = 1
    aside = folder / f"{step}{_DAMAGED}"
    while os.path.lexists(aside):
        number += 1
        aside = folder / f"{step}{_DAMAGED}-{number}"
    return atomic.rename(folder / str(step), aside)


def choose(folder: Path, checkpoint: CheckpointSelector) -> int:
    """Returns the selected step; `UserError` if there is none, or a damaged one may be the best."""
    steps = _recovered_steps_in(folder)
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
    scores, damaged = verified(folder, names=[run_layout.PROGRESS])
    for step in damaged:
        path = folder / str(step)
        raise UserError(
            f"{path / run_layout.PROGRESS} is missing or damaged, so the best checkpoint is "
            f"unknown; {advice(path)}"
        )
    best = best_step(scores)
    return steps[-1] if best is None else best


def advice(damaged: Path) -> str:
    """Returns advice for the user of a damaged checkpoint."""
    steps = [str(step) for step in steps_in(damaged.parent)]
    others = [step for step in steps if step != damaged.name]
    if others:
        return f"give another checkpoint ({', '.join(others)}), or continue training"
    return "train again"


def verified(
    folder: Path, names: Sequence[str] | None = None, metric: str | None = None
) -> tuple[dict[int, float], dict[int, str]]:
    """Verifies all checkpoints, or only the files `names` of each.

    `metric` ranks them, by default that of the newest; those that another one ranked have no score.

    Returns:
      The scores of intact ones, and the damage of others. One that training has removed in the
      meantime is neither.
    """
    records: dict[int, dict[str, Any]] = {}
    causes = {}
    for step in steps_in(folder):
        path = folder / str(step)
        with in_use(folder, [step]) as is_there:
            cause = damage(path, names=names) if is_there else None
            if cause and path.is_dir():
                causes[step] = cause
            elif is_there and not cause:
                records[step] = read_record(path)
    if not records:
        return {}, causes
    metric = metric or records[max(records)]["best_metric"]
    return {step: ranking_score(metric, own["metrics"]) for step, own in records.items()}, causes


def check_run(record: Mapping[str, Any], path: Path, run_id: str | None) -> None:
    """Raises `UserError` unless a checkpoint is of the run in whose folder it is."""
    if record["run"] != run_id:
        data = path.parent.parent / run_layout.DATA
        if run_id is None:
            raise UserError(f"{data} of the run that wrote {path} is missing: restore it")
        raise UserError(
            f"{path} is not of the run that {data} describes: restore that file, or remove the "
            "checkpoint"
        )


def leave_hashes(partial: Path) -> None:
    """Hashes the files of a partial checkpoint that this process has written, for `commit`.

    It does so after all processes have written theirs.
    """
    files = entries(partial, pattern=_OWN_FILES.format(jax.process_index()))
    # In one step: the first process looks for it.
    atomic.write_text(_hashes_of(partial, jax.process_index()), json.dumps(files))


def _hashes_of(partial: Path, process: int) -> Path:
    return partial.with_name(f"hashes-{process}.json")


def _left_hashes(partial: Path, processes: int) -> dict[str, Any]:
    """Waits for the entries that `leave_hashes` leaves in all processes but the first."""
    known: dict[str, Any] = {}
    end = time.monotonic() + BARRIER_SECONDS
    for process in range(1, processes):
        path = _hashes_of(partial, process)
        while not path.exists():
            if time.monotonic() > end:
                raise UserError(f"process {process} has not written {path}")
            time.sleep(0.02)
        known |= read_json(path, dict[str, Any])
    return known


def commit(folder: Path, partial: Path, record: Mapping[str, Any], processes: int = 1) -> None:
    """Completes a partial checkpoint and gives it its name, durably.

    If several processes have written it, the others call `leave_hashes`, so that each file is read
    where it was written. It replaces a checkpoint of the same step, which is deleted with the
    workspace.
    """
    (partial / run_layout.PROGRESS).write_text(json.dumps(record) + "\n", encoding="utf-8")
    write_manifest(partial, _left_hashes(partial, processes))
    path = folder / partial.name
    # Nothing else that has the name is replaced.
    give_name = atomic.put if (path / run_layout.PROGRESS).exists() else atomic.rename
    give_name(partial, path)


def make_record(
    best_metric: str,
    metrics: Mapping[str, Any],
    progress: Mapping[str, Any],
    run_id: str | None,
    identity: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Returns the content of `progress.json`.

    Args:
      best_metric: the metric that ranks checkpoints.
      metrics: of the validation, if there was one.
      progress: the position in the data, or the progress of a run.
      run_id: of `data.json`, or None.
      identity: of the state and its optimizer; `states.py`.
    """
    value = metrics.get(best_metric, math.nan)
    metrics = {best_metric: value} if math.isfinite(value) else {}
    return {
        "best_metric": best_metric,
        "metrics": metrics,
        "progress": progress,
        "run": run_id,
        "identity": {**identity},
    }


class _Record(TypedDict):
    best_metric: str
    metrics: dict[str, Finite]
    progress: Any
    run: str | None
    identity: dict[str, Any]


def read_record(path: Path) -> dict[str, Any]:
    """Returns the content of `progress.json` of an intact checkpoint."""
    return read_json(path / run_layout.PROGRESS, _Record)


def ranking_score(metric: str, metrics: Mapping[str, Any]) -> float:
    """Returns the score of a validation by one of its metrics; higher is better.

    It is the metric, negated if lower is better; -inf if it is missing or not finite.
    """
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return -math.inf
    return -value if metric in _LOWER_IS_BETTER else value


def metric_of(metric: ValidationMetric, score: float) -> float:
    """Returns the metric of a finite `ranking_score`."""
    return -score if metric in _LOWER_IS_BETTER else score


def validated_steps(scores: Mapping[int, float]) -> list[int]:
    """Returns the steps with a finite score, best first; of equal ones the earlier first."""
    finite = (step for step in scores if math.isfinite(scores[step]))
    return sorted(finite, key=lambda step: (-scores[step], step))


def best_step(scores: Mapping[int, float]) -> int | None:
    """Returns the best step, the newest if none was validated; None if there is none."""
    return next(iter(validated_steps(scores)), max(scores, default=None))


def kept_steps(scores: Mapping[int, float], keep_last: int, keep_best: int) -> set[int]:
    """Returns the steps to keep: the newest, and the best by their ranking scores."""
    return {*sorted(scores)[-keep_last:], *validated_steps(scores)[:keep_best]}
