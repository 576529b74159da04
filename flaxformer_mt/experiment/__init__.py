"""Experiments: the parts of a training run put together, for programs, scripts and notebooks.

    run = experiment.train("configs/quickstart.py", "runs/quickstart")

does everything: it tokenizes, trains, evaluates, and continues an existing run. To use the parts
separately:

    config = load_config("configs/quickstart.py")  # of flaxformer_mt.config.files
    with experiment.open_folder(workdir) as folder:
        parts = experiment.prepare(config, workdir)
        experiment.fit(parts, folder)
        step, translations, metrics = experiment.evaluate_test(parts, folder)
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.files import load_config
from flaxformer_mt.decoding.text_arguments import require_path
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment.checks import check_before_start
from flaxformer_mt.experiment.fitting import default_writers, make_console, print_test
from flaxformer_mt.experiment.fitting import evaluate_test as evaluate_test
from flaxformer_mt.experiment.fitting import fit as fit
from flaxformer_mt.experiment.folder import open_folder as open_folder
from flaxformer_mt.experiment.parts import Experiment as Experiment
from flaxformer_mt.experiment.preparation import learn_vocabulary as learn_vocabulary
from flaxformer_mt.experiment.preparation import prepare as prepare
from flaxformer_mt.experiment.preparation import tokenize as tokenize
from flaxformer_mt.experiment.rate_range import find_learning_rate as find_learning_rate
from flaxformer_mt.interruption import Interruption, handle_signals
from flaxformer_mt.remote.publishing import continue_from, publishing
from flaxformer_mt.run_reader import Run
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import METRICS
from flaxformer_mt.standard_output import BestEffortOutput
from flaxformer_mt.training.devices import make_devices
from flaxformer_mt.training.memory import require_training_memory
from flaxformer_mt.training.objective import UserObjective, name_of
from flaxformer_mt.training.reporting.callbacks import Callback, Callbacks
from flaxformer_mt.training.reporting.console import print_labelled
from flaxformer_mt.training.reporting.metrics import Writer
from flaxformer_mt.training.reporting.trackers import Tracker
from flaxformer_mt.urls import require_local


def train(
    config: ExperimentConfig | str | Path,
    workdir: str | Path,
    *,
    objective: UserObjective | None = None,
    frozen: Any = None,
    callbacks: Sequence[Callback] = (),
    writers: Sequence[Writer | Tracker] = (),
    console: Console | None = None,
    interruption: Interruption | None = None,
    accept_changes: bool = False,
    publish: str | None = None,
) -> Run:
    """Trains an experiment, or continues it, and evaluates the best checkpoint on the test corpus.

    A callback sees the metrics as they are written, and may stop the run:

        def watch(step, split, metrics):
            return split == "valid" and metrics["bleu"] > 30

        train("configs/quickstart.py", "runs/quickstart", callbacks=[watch])

    The run is saved then, evaluated, and returned; the same call continues it. If a callback
    raises an exception, the run is saved as well, and ends with that exception.

    An objective replaces the cross-entropy. Its name, and the options that `functools.partial`
    gives it, are recorded in `config.json`: a run continues with the same ones.

        def per_sentence(config, params, batch, key, frozen):
            sums = fmt.cross_entropy(config, params, batch, key)
            return sums.replace(weight=jnp.sum(batch.decoder_segment_ids.max(axis=1)))

        train("configs/quickstart.py", "runs/per-sentence", objective=per_sentence)

    Args:
      config: the configuration, or the path of a configuration file.
      workdir: the run folder; created if missing.
      objective: computes what is minimized, as `objective(config, params, batch, key, frozen)`,
        and returns `Sums`; `config` is that of the model. None = that of the configuration.
      frozen: a tree that the objective reads and that is not trained; sharded like parameters.
      callbacks: functions, called in their order as `callback(step, split, metrics)` with what the
        writers get; of several processes, in the first. They return True to stop.
      writers: receive the metrics as well; see `metrics.Writer`, and `trackers.Tracker` for those
        that get configuration and translations, too.
      console: prints the progress; by default to standard output.
      interruption: stops training in an orderly way, and saves; by default Ctrl-C and SIGTERM do,
        if this is the main thread.
      accept_changes: continue a run with other values of some options, or other text, after its
        newest checkpoint; see docs/training.md. `config.json` keeps the history.
      publish: the URL of an object store to which the run is published while it trains. If the
        folder is empty, the run that is published there is continued; see docs/remote.md.

    Raises:
      TypeError: an argument is of another type.
      UserError: the configuration or the data cannot be used, or the folder holds another run.
      Interrupted: a signal arrived, and everything is saved.
    """
    if not isinstance(config, ExperimentConfig):
        config = load_config(require_path(config, "config", "an ExperimentConfig or a path"))
    workdir = require_path(workdir, "workdir")
    require_local(workdir)
    console = console or make_console(
        BestEffortOutput(f"training goes on without it, and {workdir / METRICS} has all metrics")
    )
    if objective is not None:
        train_config = dataclasses.replace(config.train, objective=name_of(objective))
        config = dataclasses.replace(config, train=train_config)
    if isinstance(callbacks, Iterator):
        callbacks = list(callbacks)
    Callbacks(callbacks)  # Raises now what `fit` would raise.
    if publish:
        if distributed.is_main():
            continue_from(publish, workdir)
        distributed.barrier("published run")
    check_before_start(config, workdir, accept_changes)
    require_training_memory(config, make_devices(config))
    with (
        open_folder(workdir, console.print) as folder,
        publishing(folder, publish)
        if publish and distributed.is_main()
        else contextlib.nullcontext(),
    ):
        experiment = prepare(
            config, folder, objective=objective, frozen=frozen, accept_changes=accept_changes
        )
        print_labelled(experiment.report(), console)
        given = contextlib.nullcontext(interruption)
        with given if interruption else handle_signals() as handled:
            all_writers = [*default_writers(config.train, folder, console), *writers]
            fit(experiment, folder, console, handled, all_writers, callbacks)
        if experiment.dataset.test is not None:
            print_test(experiment, folder, experiment.dataset.test, console)
        if config.model.has_inputs:  # A language model does not translate.
            console.print(f"translate with: flaxformer-mt translate --run {folder} < source.txt")
    return Run(workdir)


def dry_run(
    config: ExperimentConfig,
    workdir: str | Path,
    console: Console | None = None,
    accept_changes: bool = False,
) -> None:
    """Checks an experiment and prints what would be trained, without writing anything.

    Errors as in `train`, except that too little memory is only printed: the run may be meant for
    another machine.
    """
    workdir, console = Path(workdir), console or make_console()
    if jax.process_count() > 1:
        raise UserError("--dry-run is for one process: start it without the others")
    check_before_start(config, workdir, accept_changes)
    atomic.require_writable(workdir)
    with atomic.temporary_folder() as cache:
        experiment = prepare(
            config, workdir, cache_folder=cache, write=False, accept_changes=accept_changes
        )
        print_labelled(experiment.report(), console)
        print_labelled(experiment.export_obstacles(), console)
        try:
            require_training_memory(experiment.config, experiment.devices)
        except UserError as error:
            console.print(f"memory   {error}: training would be refused here")
        print_labelled(experiment.costs(), console)
