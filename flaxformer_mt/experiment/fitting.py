"""Trains an experiment in its run folder."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.experiment.console import make_console
from flaxformer_mt.experiment.preparation import Experiment
from flaxformer_mt.interruption import Interrupted, Interruption
from flaxformer_mt.memory_limits import explained_exhaustion
from flaxformer_mt.runs.checkpoint import Checkpoints
from flaxformer_mt.runs.layout import METRICS, TENSORBOARD
from flaxformer_mt.training import loop
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.reporting.callbacks import Callback, Callbacks
from flaxformer_mt.training.reporting.console import ConsoleWriter
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter, TensorBoardWriter, Writer

_LESS_MEMORY = (
    "set model.remat=full, or parallel.fsdp with several devices; a new run can also have more "
    "train.accumulation_steps or a lower train.batch_tokens"
)


def default_writers(workdir: Path, console: Console) -> list[Writer]:
    """Returns the writers of `metrics.jsonl` and of TensorBoard's files.

    Args:
      workdir: the run folder.
      console: prints what was damaged and had to be removed.
    """
    return [
        JsonLinesWriter(workdir / METRICS, console.print),
        TensorBoardWriter(workdir / TENSORBOARD),
    ]


def fit(
    experiment: Experiment,
    workdir: Path,
    console: Console | None = None,
    interruption: Interruption | None = None,
    writers: Sequence[Writer] | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains from the newest checkpoint, or from the start, and writes checkpoints and metrics.

    Args:
      experiment: from `prepare`.
      workdir: its run folder.
      console: prints the progress.
      interruption: see `train`.
      writers: receive the metrics, in the first process, besides the console; by default
        `default_writers`.
      callbacks: see `train`.

    Raises:
      TypeError: a callback is no function, or returned something else than a truth value.
      UserError: see `loop.train`.
      Interrupted: a signal arrived, and everything is saved.
    """
    config, console = experiment.config.train, console or make_console()
    display = ConsoleWriter(
        config.num_steps, console, experiment.dataset.training.batches_per_epoch
    )
    if writers is None:
        writers = default_writers(workdir, console)

    def validated(params: Params, step: int) -> dict[str, Any]:
        display.validating()
        metrics, samples = experiment.validation.validate(params)
        display.translated(samples)
        return metrics

    several = jax.process_count() > 1
    watching = Callbacks(callbacks, distributed.agree, config.log_every if several else 1)
    with (
        explained_exhaustion("training", _LESS_MEMORY),
        Checkpoints(
            workdir, config.keep_last, config.keep_best, config.best_metric, console.print
        ) as checkpointer,
    ):
        is_new = checkpointer.latest_step() is None
        state = experiment.initial_state() if is_new else experiment.abstract_state()
        train_step = experiment.compile_train_step()
        train_step.on_compile = display.compiling
        with (
            contextlib.nullcontext(lambda step: False)
            if interruption is None
            else interruption.deferred(distributed.agree if several else None, config.log_every)
        ) as is_interrupted:
            try:
                loop.train(
                    state,
                    train_step=train_step,
                    stream=experiment.stream,
                    evaluate=validated,
                    schedule=experiment.schedule,
                    checkpointer=checkpointer,
                    writers=[*writers, display, watching] if distributed.is_main() else (),
                    config=config,
                    devices=experiment.devices.devices,
                    # Both are asked after every step, because processes have to agree on each.
                    should_stop=lambda step: any(
                        [is_interrupted(step), watching.should_stop(step)]
                    ),
                    announce=console.print,
                    on_step=display.advance,
                )
            except Interrupted as interrupted:
                if not watching.is_stopping:
                    raise
                console.print(f"by a callback, {interrupted}")
            # While signals are still deferred.
            checkpointer.wait()
            watching.finish()
