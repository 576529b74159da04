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
from flaxformer_mt.runs.changes import SPLIT
from flaxformer_mt.runs.checkpoint import Checkpoints
from flaxformer_mt.runs.layout import PROFILE
from flaxformer_mt.runs.step_folders import ranking_score
from flaxformer_mt.training.devices import CompiledStep
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.reporting.metrics import MetricValues, Writer, measurements
from flaxformer_mt.training.reporting.profile import Profile
from flaxformer_mt.training.reporting.progress import Interval, Progress
from flaxformer_mt.training.state import TrainState


def train(
    state: TrainState,
    *,
    train_step: CompiledStep,
    stream: Callable[[DataPosition], Prefetched[Batch]],
    evaluate: Callable[[Params, int], MetricValues],
    schedule: optax.Schedule,
    checkpointer: Checkpoints,
    writers: Sequence[Writer],
    config: TrainConfig,
    devices: Sequence[jax.Device],
    should_stop: Callable[[int], bool] = lambda step: False,
    announce: Callable[[str], None] = print,
    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None,
    adapt: Callable[[TrainState, Progress], tuple[TrainState, Progress]] = lambda *each: each,
    changes: Sequence[tuple[int, MetricValues]] = (),
) -> TrainState:
    """Trains up to `config.num_steps`, from the newest checkpoint if there is one.

    Args:
      state: the initial state, placed by the strategy that compiled `train_step`; donated. If there
        is a checkpoint, only its shapes, dtypes and shardings are used.
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
      should_stop: called with the step after each step; returns whether to save and stop.
      announce: called with each line of other news for the user.
      on_step: called with the number and the metrics, on the host, of each step when it is
        finished, which is after the next one was dispatched.
      adapt: called with the state and the progress of the checkpoint; returns those to go on with.
      changes: steps after which options were changed, and what the writers receive about it.

    Raises:
      Interrupted: `should_stop` returned True; a checkpoint was written.
      UserError: loss, gradient or update of too many steps in a row was not finite, and the run is
        back at its newest checkpoint; or a checkpoint cannot be written.
    """
    progress = Progress()
    if checkpointer.latest_step() is not None:
        state, saved = checkpointer.restore(state)
        state, progress = adapt(state, Progress.from_json(saved))
    first, last = int(state.step), config.num_steps

    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.close)
            writer.rewind(first)

        def write(step: int, split: str, values: MetricValues, is_best: bool = False) -> None:
            for writer in writers:
                writer.write(step, split, values, is_best)

        for step, values in changes:
            write(step, SPLIT, values)

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
        if first >= last or _is_patience_over(progress, config, announce):
            checkpointer.wait()
            return state

        batches = stack.enter_context(stream(progress.position))
        give_up = functools.partial(_go_back, checkpointer, writers)
        started = _StartedSteps(progress, batches, config.max_skipped_steps, give_up, on_step)
        wanted = config.profiled_steps if jax.process_index() == 0 else range(0)
        profiled = range(max(wanted.start, first + 1), min(wanted.stop, last + 1))
        profile = stack.enter_context(Profile(profiled, checkpointer.run_folder / PROFILE))
        is_due = False
        for step in range(first + 1, last + 1):
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
                stops_early = _is_patience_over(progress, config, announce)
                if stops_early and not is_logged:
                    write_training(step)

            is_interrupted = should_stop(step)
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


def _is_patience_over(
    progress: Progress, config: TrainConfig, announce: Callable[[str], None]
) -> bool:
    is_over = 0 < config.early_stopping_patience <= progress.stopping.validations_since
    if is_over:
        announce(
            f"stopped early: {config.early_stopping_metric} has not improved in "
            f"{progress.stopping.validations_since} validations (train.early_stopping_patience)"
        )
    return is_over


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
    on_step: Callable[[int, Metrics], None]
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
        self.on_step(step, metrics)

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
