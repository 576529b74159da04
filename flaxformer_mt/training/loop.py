"""The training loop: steps, validations, checkpoints. Meant to be forked."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import jax
import optax

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.data.stream.batches import Batch, DataPosition
from flaxformer_mt.data.stream.training_stream import Prefetched
from flaxformer_mt.errors import UserError
from flaxformer_mt.interruption import Interrupted
from flaxformer_mt.objectives.cross_entropy import Metrics
from flaxformer_mt.run_layout import PROFILE
from flaxformer_mt.runs.checkpoint import Checkpoints
from flaxformer_mt.runs.step_folders import ranking_score
from flaxformer_mt.training.devices import CompiledStep
from flaxformer_mt.training.hooks import StepInfo
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.reporting.metrics import MetricValues, Writer, measurements
from flaxformer_mt.training.reporting.profile import Profile
from flaxformer_mt.training.reporting.progress import Interval, Progress
from flaxformer_mt.training.state import TrainState


def train(
    state: TrainState,
    progress: Progress,
    *,
    train_step: CompiledStep,
    stream: Callable[[DataPosition], Prefetched[Batch]],
    evaluate: Callable[[Params, int], MetricValues],
    schedule: optax.Schedule,
    checkpointer: Checkpoints,
    writers: Sequence[Writer],
    config: TrainConfig,
    devices: Sequence[jax.Device],
    hooks: Callable[[StepInfo], bool],
) -> TrainState:
    """Trains up to `config.num_steps`, and saves.

    Args:
      state: initial, or of the newest checkpoint; placed by the strategy that compiled
        `train_step`; donated.
      progress: of that checkpoint, or `Progress()`; it is advanced in place.
      train_step: (state, batch) -> (state, metrics).
      stream: from a position in the data to an iterator of placed batches.
      evaluate: (params, step) -> metrics of the validation corpus; called every
        `config.eval_every` steps and at the end.
      schedule: the learning rate schedule of the optimizer, for reporting.
      checkpointer: saves every `config.checkpoint_every` steps (later if that step was skipped),
        after each validation that is the best so far if `config.keep_best` is not 0, and at the
        end.
      writers: receive training metrics every `config.log_every` steps and at the end, and the
        metrics of each validation. Speed is that of the steps only; the first includes compilation.
      config: number of steps, intervals, and early stopping.
      devices: all devices that compute a step, for reporting.
      hooks: called after each step, see `StepInfo`; the run is saved and stops if it returns True.

    Raises:
      Interrupted: `hooks` returned True; a checkpoint was written.
      UserError: loss, gradient or update of too many steps in a row was not finite, and the run is
        back at its newest checkpoint; or a checkpoint cannot be written.
    """
    first, last = int(state.step), config.num_steps
    written: dict[str, MetricValues] = {}

    def write(step: int, split: str, values: MetricValues, is_best: bool = False) -> None:
        written[split] = values
        for writer in writers:
            writer.write(step, split, values, is_best)

    def write_training(step: int) -> None:
        started.wait()
        interval, progress.interval = progress.interval, Interval()
        totals = {name: int(interval.metrics[name][0]) for name in _TOTALS}
        values = {
            **interval.means(),
            **totals,
            **measurements(interval, devices),
            # Skipped steps do not advance the schedule.
            "learning_rate": float(schedule(step - 1 - progress.skipped)),
            "compilations": len(progress.batch_shapes),
        }
        write(step, "train", values)

    def validate(step: int) -> tuple[MetricValues, bool]:
        validation = evaluate(state.eval_params, step)
        is_best = _record_validation(progress, validation, config)
        write(step, "valid", validation, is_best)
        return validation, is_best

    if progress.validation_is_due:
        progress.validation_is_due = False
        repeated, _ = validate(first)
        checkpointer.save(first, state, progress.to_json(), repeated)
    if first >= last or early_stop(progress, config):
        checkpointer.wait()
        return state

    wanted = config.profiled_steps if jax.process_index() == 0 else range(0)
    profiled = range(max(wanted.start, first + 1), min(wanted.stop, last + 1))
    is_due = False
    with (
        stream(progress.position) as batches,
        Profile(profiled, checkpointer.run_folder / PROFILE) as profile,
    ):
        give_up = functools.partial(_go_back, checkpointer, writers)
        started = _StartedSteps(progress, batches, config.max_skipped_steps, give_up)
        for step in range(first + 1, last + 1):
            written.clear()
            with profile.of(step, started.paused):
                batch, progress.position = next(batches)
                state, metrics = train_step(state, batch)
                progress.add_shapes(train_step.batch_shapes)
                started.add(step, metrics)

            is_logged = _is_due(step, config.log_every, last)
            if is_logged:
                write_training(step)

            validation: MetricValues | None = None
            keeps_best = stops_early = False
            if _is_due(step, config.eval_every, last):
                with started.paused():
                    try:
                        validation, is_best = validate(step)
                    except Exception:
                        # The steps before it are not lost, for example if it needs too much memory.
                        # Of several processes, others may not have failed, and would not save.
                        if jax.process_count() == 1 and not progress.skipped_in_a_row:
                            progress.validation_is_due = True
                            checkpointer.save(step, state, progress.to_json())
                            checkpointer.wait()
                        raise
                keeps_best = is_best and config.keep_best > 0
                stops_early = bool(early_stop(progress, config))
                if stops_early and not is_logged:
                    write_training(step)

            is_interrupted = hooks(StepInfo(step, state, metrics, {**written}, step == last))
            is_needed = keeps_best or stops_early or is_interrupted or step == last
            is_due = is_due or _is_due(step, config.checkpoint_every, last)
            if is_needed or is_due:
                with started.paused():
                    # While steps are being skipped, the state does not change and may not recover:
                    # a regular checkpoint is written after the next step that succeeds.
                    if is_needed or not progress.skipped_in_a_row:
                        checkpointer.save(step, state, progress.to_json(), validation)
                        is_due = False
            if is_interrupted:
                checkpointer.wait_for_all()
                raise Interrupted(
                    f"stopped after step {step:,}; the same command continues after step "
                    f"{checkpointer.latest_step() or 0:,}"
                )
            if stops_early:
                break
    return state


def _is_due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last


def _record_validation(progress: Progress, validation: MetricValues, config: TrainConfig) -> bool:
    """Records a validation; returns whether it is the best so far."""
    metric = config.early_stopping_metric
    if config.early_stopping_patience and metric not in validation:
        raise UserError(
            f"train.early_stopping_metric={metric}, but validations of this model give only "
            f"{', '.join(validation)}"
        )
    progress.stopping = progress.stopping.after(
        ranking_score(metric, validation), config.early_stopping_min_delta
    )
    progress.best = progress.best.after(ranking_score(config.best_metric, validation))
    return progress.best.validations_since == 0


def early_stop(progress: Progress, config: TrainConfig) -> str:
    """Returns why a run stops before its last step; "" if it goes on."""
    since = progress.stopping.validations_since
    if not 0 < config.early_stopping_patience <= since:
        return ""
    return (
        f"stopped early: {config.early_stopping_metric} has not improved in {since} validations "
        "(train.early_stopping_patience)"
    )


def _go_back(
    checkpointer: Checkpoints, writers: Sequence[Writer], step: int, causes: Sequence[str]
) -> NoReturn:
    """Rewinds and stops a run whose last steps, up to `step`, were skipped for these causes."""
    checkpointer.wait_for_all()
    good = checkpointer.latest_step() or 0
    for writer in writers:
        writer.rewind(good)
    advice = "start a new run with a lower optimizer.learning_rate, more optimizer.warmup_steps or "
    advice += "optimizer.clip_norm=1"
    if good:
        advice += f" (and with train.init_from={checkpointer.run_folder} to continue from there)"
    raise UserError(
        f"the {' and the '.join(sorted(set(causes)))} was not finite in steps "
        f"{step - len(causes) + 1} to {step} (train.max_skipped_steps={len(causes)}), so the run "
        f"stopped and is back at step {good}: {advice}"
    )


_SKIPPED = "skipped_steps"
_CAUSES = {
    "nonfinite_loss": "loss",
    "nonfinite_gradient": "gradient",
    "nonfinite_update": "update",
}
_TOTALS = (_SKIPPED, *_CAUSES, "target_tokens")
"""Metrics of which the sum is reported, not the mean."""


@dataclasses.dataclass
class _StartedSteps:
    """The steps dispatched to the devices; updates `progress` with the metrics of finished ones.

    Waiting for a step only after the next one was dispatched keeps the devices busy, with at most
    two steps in flight. After `max_skipped` skipped steps in a row, `give_up` is called with the
    step and the causes; it must raise.
    """

    progress: Progress
    batches: Prefetched[Batch]
    max_skipped: int
    give_up: Callable[[int, Sequence[str]], NoReturn]
    running: tuple[int, Metrics] | None = None
    waited_before: float = 0.0
    clock: float = dataclasses.field(default_factory=time.perf_counter)

    def add(self, step: int, metrics: Metrics) -> None:
        """Adds the metrics of a step just dispatched, and waits for the previous step."""
        self.wait()
        self.running = step, metrics

    def wait(self) -> None:
        """Waits for the last step; errors as of `give_up`."""
        if self.running is None:
            return
        step, metrics = self.running
        metrics = jax.device_get(metrics)
        self.running = None

        interval, now = self.progress.interval, time.perf_counter()
        interval.add(metrics)
        interval.seconds += now - self.clock
        interval.seconds_waited += self.batches.seconds_waited - self.waited_before
        self.clock, self.waited_before = now, self.batches.seconds_waited

        if not metrics[_SKIPPED][0]:
            self.progress.skipped_in_a_row.clear()
            return
        self.progress.skipped += 1
        causes = self.progress.skipped_in_a_row
        causes.append(next(cause for name, cause in _CAUSES.items() if metrics[name][0]))
        if len(causes) >= self.max_skipped:
            self.give_up(step, causes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the last step, and excludes the block from the time of the steps."""
        self.wait()
        yield
        self.clock = time.perf_counter()
