"""The training loop: steps, validations, checkpoints. Meant to be copied and changed."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import jax
import optax

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.data.batches import Batch
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.checkpoint import Checkpointer
from flaxformer_mt.training.metrics import Figures, Writer, means
from flaxformer_mt.training.parallel import Compiled
from flaxformer_mt.training.state import Params, TrainState
from flaxformer_mt.training.step import Metrics


def train(
    state: TrainState,
    *,
    train_step: Compiled,
    batches: Callable[[int], Batch],
    evaluate: Callable[[Params, int], Figures],
    schedule: optax.Schedule,
    checkpointer: Checkpointer,
    writers: Sequence[Writer],
    config: TrainConfig,
) -> TrainState:
    """Trains up to `config.num_steps`, from the newest checkpoint if there is one.

    Args:
      state: the initial one, placed by the strategy that compiled `train_step`; donated.
      train_step: (state, batch) -> (state, metrics).
      batches: from the number of updates made to the batch of the next one, placed.
      evaluate: (params, step) -> figures of the validation corpus; called every
        `config.eval_every` steps and at the end.
      schedule: of the optimizer; only reported.
      checkpointer: saves every `config.checkpoint_every` steps and at the end.
      writers: get the figures of training every `config.log_every` steps and at the end, and
        those of each validation. Speed is that of the steps alone; the first includes compiling.
      config: lengths and intervals.

    Returns:
      The state at the end.

    Raises:
      UserError: the loss or its gradient is not finite. No such state is saved.
    """
    if checkpointer.latest_step() is not None:
        state = checkpointer.restore(state)
    first, last = int(state.step), config.num_steps

    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.close)
            writer.rewind(first)

        def write(step: int, split: str, figures: Figures) -> None:
            for writer in writers:
                writer.write(step, split, figures)

        interval = _Interval()
        batch = batches(first) if first < last else None
        for step in range(first + 1, last + 1):
            state, metrics = train_step(state, batch)
            # The call returns at once: the next batch is made while the devices compute.
            batch = batches(step) if step < last else None
            interval.add(step, metrics)

            if _is_due(step, config.log_every, last):
                figures = {
                    **interval.finish(),
                    "learning_rate": float(schedule(step - 1)),
                    "compilations": train_step.compilations,
                }
                write(step, "train", figures)

            validation = None
            if _is_due(step, config.eval_every, last):
                interval.wait()
                validation = evaluate(state.params, step)
                write(step, "valid", validation)
                interval.start_clock()

            if _is_due(step, config.checkpoint_every, last):
                interval.wait()
                checkpointer.save(step, state, validation)
                interval.start_clock()
    return state


def _is_due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last


class _Interval:
    """The steps since the last line of figures.

    Waiting for a step only after the next one was started keeps the devices busy, and lets no
    more than two steps pile up.
    """

    def __init__(self) -> None:
        self._running: tuple[int, Metrics] | None = None
        self._done: list[Metrics] = []
        self._seconds = 0.0
        self.start_clock()

    def start_clock(self) -> None:
        """Leaves out the time since the last step, which was spent on something else."""
        self._clock = time.perf_counter()

    def add(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step that was just started, and waits for the one before."""
        self.wait()
        self._running = step, metrics

    def wait(self) -> None:
        """Waits for the last step.

        Raises:
          UserError: its loss or gradient is not finite.
        """
        if self._running is None:
            return
        step, metrics = self._running
        metrics = jax.device_get(metrics)
        self._seconds += time.perf_counter() - self._clock
        self.start_clock()
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(metrics[name][0]):
                raise UserError(
                    f"{name} is {metrics[name][0]} at step {step}: start again with a lower "
                    "optimizer.learning_rate, more optimizer.warmup_steps or optimizer.clip_norm=1"
                )
        self._done.append(metrics)
        self._running = None

    def finish(self) -> dict[str, float]:
        """Waits for the last step, returns the figures of the interval and begins a new one."""
        self.wait()
        tokens = sum(float(metrics["loss"][1]) for metrics in self._done)
        figures = {**means(self._done), "target_tokens_per_second": tokens / self._seconds}
        self._done, self._seconds = [], 0.0
        return figures
