"""A learning-rate range test: a few steps with a growing rate show at which ones a model learns.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3; the rate
grows exponentially, and divergence ends the test, as in fastai's `lr_find`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from flaxformer_mt import atomic
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment import checks
from flaxformer_mt.experiment.fit import Experiment
from flaxformer_mt.experiment.report import report
from flaxformer_mt.experiment.start import begin, recorded
from flaxformer_mt.training.optimizer import make_schedule, warmup_length
from flaxformer_mt.training.reporting.console import make_console, print_labelled

LOWEST, HIGHEST = 1e-6, 1.0
_STEPS = 200
_WINDOW = 11  # Steps whose mean is the smoothed loss.


class RateRange(NamedTuple):
    """The result of a range test of N steps."""

    rates: np.ndarray
    """float64 [N], ascending."""
    losses: np.ndarray
    """float64 [N], each after the update with that rate."""
    smoothed: np.ndarray
    """float64 [N], the mean over neighboring steps."""
    peak: float
    """The suggested peak of the learning rate: a tenth of the rate with the lowest loss, as by
    fastai, because a long training needs more distance from divergence than a short one."""
    learning_rate: float
    """The `optimizer.learning_rate` with which the schedule has this peak."""


def find_learning_rate(
    config: ExperimentConfig,
    workdir: str | Path,
    console: Console | None = None,
    steps: int = _STEPS,
) -> RateRange:
    """Trains a new model for a few steps with a growing rate, without writing anything.

    Args:
      config: the configuration; its schedule is replaced, and its other fields matter as in
        training.
      workdir: the run folder, whose vocabulary is used if it holds a run.
      console: prints the progress; by default to standard output.
      steps: how many, at most; training that diverges ends the test.

    Raises:
      UserError: as of `train`, or no rate made the loss fall.
    """
    workdir, console = Path(workdir), console or make_console()
    checks.check_one_process("--find-learning-rate")
    config = recorded(config)
    checks.check_config(config, memory=True)
    rates = np.geomspace(LOWEST, HIGHEST, steps)
    losses: list[float] = []
    with atomic.temporary_folder() as cache:
        # The rate of each step takes the place of the schedule.
        numbers = jnp.asarray(rates, float)
        start = begin(config, workdir, cache=cache)
        prepared = Experiment(start, own_schedule=lambda count: numbers[count])
        print_labelled(report(prepared), console)
        for rate, loss in zip(rates, _losses(prepared, steps), strict=False):
            losses.append(loss)
            if len(losses) % 20 == 0:
                console.print(f"step {len(losses)}/{steps}  rate {rate:.1e}  loss {loss:.4f}")
            if _has_diverged(losses):
                break
    if len(losses) <= _WINDOW or not _has_fallen(_smoothed(losses)):
        raise UserError(
            f"no learning rate from {LOWEST:g} to {HIGHEST:g} made the loss fall in {len(losses)} "
            "steps: look at data and model first"
        )
    # The loss of a step is computed before its update.
    rates, smoothed = rates[: len(losses) - 1], _smoothed(losses)[1:]
    peak = rates[smoothed.argmin()] / 10
    return RateRange(rates, np.array(losses[1:]), smoothed, peak, peak / _highest_rate(config))


def _losses(experiment: Experiment, steps: int) -> Iterator[float]:
    """Trains with one rate per step; yields the losses, as long as they are finite."""
    state, step = experiment.initial_state(), experiment.compiled_step
    with experiment.stream(DataPosition()) as batches:
        for _ in range(steps):
            batch, _ = next(batches)
            state, metrics = step(state, batch)
            if metrics["skipped_steps"][0]:
                return
            total, weight = metrics["loss"]
            yield float(total / weight)


def _has_diverged(losses: Sequence[float]) -> bool:
    """Whether half of what the loss had fallen is lost again."""
    smoothed = _smoothed(losses)
    return _has_fallen(smoothed) and smoothed[-1] > (smoothed[0] + smoothed.min()) / 2


def _has_fallen(smoothed: np.ndarray) -> bool:
    return bool(smoothed.min() < 0.9 * smoothed[0])


def _smoothed(losses: Sequence[float]) -> np.ndarray:
    padded = np.pad(np.array(losses), _WINDOW // 2, mode="edge")
    return np.convolve(padded, np.full(_WINDOW, 1 / _WINDOW), mode="valid")


def _highest_rate(config: ExperimentConfig) -> float:
    """Returns the peak of the schedule with a learning rate of 1; all are proportional to it."""
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1.0)
    num_steps = config.train.num_steps
    counts = jnp.arange(max(num_steps, warmup_length(optimizer, num_steps) + 1))
    schedule = make_schedule(optimizer, config.model.d_model, num_steps)
    return float(np.max(jax.vmap(schedule)(counts)))
