"""Averaging of checkpoints, which often translates better than each of them.

Source: Vaswani et al. 2017, section 6.1, who average the last 5 (base) or 20 (big).
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError
from flaxformer_mt.run_layout import CONFIG, DATA, ORIGIN, TOKENIZER
from flaxformer_mt.runs import step_folders
from flaxformer_mt.runs.checkpoint import restore_params, whole_checkpoints, write_params
from flaxformer_mt.runs.data_file import check_files
from flaxformer_mt.runs.folder import read_config
from flaxformer_mt.runs.step_folders import validated_steps


def average_run(
    run_folder: str | Path,
    output: str | Path,
    count: int,
    which: Literal["last", "best"],
    announce: Callable[[str], None] = print,
) -> list[int]:
    """Writes a run folder whose only checkpoint is the mean of checkpoints of another run.

    Its checkpoint has the step of the newest one averaged. They are the last, or the best by the
    run's `train.best_metric`; `announce` is called with one line for each damaged one, which is
    left out.

    Returns:
      The steps that were averaged.

    Raises:
      UserError: there are too few intact checkpoints, `run_folder` is not a run folder or damaged,
        or the output exists or cannot be written.
    """
    run_folder, output = Path(run_folder), Path(output)
    if output.exists():
        raise UserError(f"{output} exists: remove it, or give another output")
    read_config(run_folder)
    check_files(run_folder)
    with _chosen(run_folder, count, which, announce) as steps:
        params = average(run_folder, steps)

    with atomic.new_folder(output) as partial:
        for name in (CONFIG, DATA):
            if (run_folder / name).is_file():
                shutil.copy(run_folder / name, partial)
        for name in (TOKENIZER, ORIGIN):
            if (run_folder / name).is_dir():
                shutil.copytree(run_folder / name, partial / name)
        write_params(partial, max(steps), params)
    return steps


def average(run_folder: str | Path, steps: Sequence[int]) -> dict[str, Any]:
    """Returns the unweighted mean of the parameters of checkpoints, summed in float64.

    If the run kept a moving average, it is the mean of that.
    """
    total: dict[str, Any] = {}
    for step in steps:
        params = jax.device_get(restore_params(run_folder, step)[1])
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
        total = jax.tree.map(np.add, total, wide) if total else wide
    return jax.tree.map(lambda leaf, like: (leaf / len(steps)).astype(like.dtype), total, params)


@contextlib.contextmanager
def _chosen(
    run_folder: Path, count: int, which: Literal["last", "best"], announce: Callable[[str], None]
) -> Iterator[list[int]]:
    """Chooses checkpoints that a training in progress does not remove while the block runs."""
    if count < 1:
        raise UserError(f"--{which} {count}: must be at least 1")
    while True:
        scores = whole_checkpoints(run_folder, announce)
        candidates = sorted(scores, reverse=True) if which == "last" else validated_steps(scores)
        if len(candidates) < count:
            kind = "intact" if which == "last" else "validated"
            raise UserError(
                f"{run_folder} holds {len(candidates)} {kind} checkpoints, fewer than --{which} "
                f"{count}: train with train.keep_{which}={count}"
            )
        steps = sorted(candidates[:count])
        with step_folders.in_use(step_folders.folder_of(run_folder), steps) as are_there:
            if are_there:
                yield steps
                return
