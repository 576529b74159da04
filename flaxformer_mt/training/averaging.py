"""The mean of several checkpoints of a run, which often translates better than each of them.

Source: Vaswani et al. 2017, section 6.1, who average the last 5 (base) or 20 (big).
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.checkpoint import (
    ranked,
    restore_params,
    whole_checkpoints,
    write_params,
)
from flaxformer_mt.training.parameters import Params


def average_run(
    run_folder: str | Path,
    output: str | Path,
    count: int,
    which: Literal["last", "best"],
    announce: Callable[[str], None] = print,
) -> list[int]:
    """Writes a run folder whose only checkpoint is the mean of some of another run's.

    It has all that using a model needs, and can be the `train.init_from` of another run. Its
    checkpoint is named after the newest that went into it.

    Args:
      run_folder: of a trained model.
      output: the folder to make.
      count: how many checkpoints.
      which: the newest, or the best by the run's `train.best_metric`.
      announce: is told in one line of each damaged checkpoint, which is left out.

    Returns:
      The steps that were averaged.

    Raises:
      UserError: there are fewer whole checkpoints, this is no run folder, or the output exists or
        cannot be written.
    """
    run_folder, output = Path(run_folder), Path(output)
    if not (run_folder / "config.json").is_file():
        raise UserError(f"{run_folder} is no run folder: it has no config.json")
    if output.exists():
        raise UserError(f"{output} exists: remove it, or give another --output")
    steps = _choose(run_folder, count, which, announce)
    params = average(run_folder, steps)

    with atomic.new_folder(output, parents=True) as partial:
        for name in ("config.json", "data.json"):
            if (run_folder / name).is_file():
                shutil.copy(run_folder / name, partial)
        shutil.copytree(run_folder / "tokenizer", partial / "tokenizer")
        write_params(partial, max(steps), params)
    return steps


def average(run_folder: str | Path, steps: Sequence[int]) -> Params:
    """The mean of the parameters of some checkpoints, each of which weighs the same.

    Where the run has kept a moving average, it is the mean of that. Sums are taken in float64.
    """
    total: Params = {}
    for step in steps:
        params = jax.device_get(restore_params(run_folder, step)[1])
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
        total = jax.tree.map(np.add, total, wide) if total else wide
    return jax.tree.map(lambda leaf, like: (leaf / len(steps)).astype(like.dtype), total, params)


def _choose(
    run_folder: Path, count: int, which: Literal["last", "best"], announce: Callable[[str], None]
) -> list[int]:
    """The steps to average, in order; arguments and errors as in `average_run`."""
    if count < 1:
        raise UserError(f"--{which} {count}: at least one checkpoint has to be averaged")
    merits = whole_checkpoints(run_folder, announce)
    if which == "last":
        candidates = sorted(merits, reverse=True)
    else:
        candidates = [step for step in ranked(merits) if np.isfinite(merits[step])]
    if len(candidates) < count:
        kind = "whole" if which == "last" else "validated"
        raise UserError(
            f"{run_folder} holds {len(candidates)} {kind} checkpoints, fewer than --{which} "
            f"{count}: train with train.keep_{which}={count}"
        )
    return sorted(candidates[:count])
