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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.files import load_config
from flaxformer_mt.data.stream.blocks import Curriculum
from flaxformer_mt.decoding.text_arguments import require_path
from flaxformer_mt.experiment import checks
from flaxformer_mt.experiment.fit import Experiment as Experiment
from flaxformer_mt.experiment.fit import fit as fit
from flaxformer_mt.experiment.rate_range import find_learning_rate as find_learning_rate
from flaxformer_mt.experiment.report import dry_run as dry_run
from flaxformer_mt.experiment.report import print_test, report
from flaxformer_mt.experiment.start import begin as begin
from flaxformer_mt.experiment.start import open_folder as open_folder
from flaxformer_mt.experiment.start import record, recorded
from flaxformer_mt.experiment.test import Tested
from flaxformer_mt.interruption import Interruption, handle_signals
from flaxformer_mt.remote.publishing import continue_from, publishing
from flaxformer_mt.run_layout import METRICS
from flaxformer_mt.run_reader import Run
from flaxformer_mt.runs.folder import require_shared
from flaxformer_mt.standard_output import BestEffortOutput
from flaxformer_mt.training.hooks import Hooks
from flaxformer_mt.training.objective import UserObjective
from flaxformer_mt.training.optimizer import UserOptimizer
from flaxformer_mt.training.reporting.console import make_console, print_labelled
from flaxformer_mt.training.reporting.metrics import Writer
from flaxformer_mt.training.reporting.trackers import Tracker
from flaxformer_mt.urls import require_local


def train(
    config: ExperimentConfig | str | Path,
    workdir: str | Path,
    *,
    objective: UserObjective | None = None,
    frozen: Any = None,
    optimizer: UserOptimizer | None = None,
    curriculum: Curriculum | None = None,
    hooks: Hooks | None = None,
    writers: Sequence[Writer | Tracker] = (),
    console: Console | None = None,
    interruption: Interruption | None = None,
    accept_changes: bool = False,
    publish: str | None = None,
) -> Run:
    """Trains an experiment, or continues it, and evaluates the best checkpoint on the test corpus.

    Hooks are called after the steps, and may stop the run:

        hooks = fmt.Hooks()

        @hooks.add_hook
        def good_enough(info):
            return "valid" in info.metrics and info.metrics["valid"]["bleu"] > 30

        train("configs/quickstart.py", "runs/quickstart", hooks=hooks)

    The run is saved then, evaluated, and returned; the same call continues it. If a hook raises an
    exception, the run is saved as well, and ends with that exception.

    An objective replaces the cross-entropy. Its name, and the options that `functools.partial`
    gives it, are recorded in `config.json`: a run continues with the same ones.

        def per_sentence(config, params, batch, key, frozen):
            sums = fmt.cross_entropy(config, params, batch, key)
            return sums.replace(weight=jnp.sum(batch.decoder_segment_ids.max(axis=1)))

        train("configs/quickstart.py", "runs/per-sentence", objective=per_sentence)

    An optimizer is given as a function of the configured learning rate schedule. Its name, options
    and constants are recorded likewise.

        lion = functools.partial(optax.lion, b1=0.95, b2=0.98)
        train("configs/quickstart.py", "runs/lion", optimizer=lion)

    Args:
      config: the configuration, or the path of a configuration file.
      workdir: the run folder; created if missing.
      objective: computes what is minimized, as `objective(config, params, batch, key, frozen)`,
        and returns `Sums`; `config` is that of the model. None = that of the configuration.
      frozen: a tree that the objective reads and that is not trained; sharded like parameters.
      optimizer: makes the optimizer, as `optimizer(schedule)`, where the schedule gives the rate
        of each update; `fmt.per_layer` is for one that is not elementwise. Of the configuration's
        optimizer, it has the learning rate and `clip_norm`. None = that of the configuration.
      curriculum: how often each pair is used in an epoch, as `curriculum(epoch, lengths, columns)`;
        see `packed`. Recorded with its options, as an objective is. None = once.
      hooks: called after the steps, in every process.
      writers: receive the metrics; see `metrics.Writer`, and `trackers.Tracker` for those
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
        config = load_config(config)
    if not isinstance(hooks, Hooks | None):
        raise TypeError(f"hooks must be fmt.Hooks, not {type(hooks).__name__}")
    workdir = require_path(workdir, "workdir")
    require_local(workdir)
    console = console or make_console(
        BestEffortOutput(f"training goes on without it, and {workdir / METRICS} has all metrics")
    )
    if publish:
        with distributed.first_process_first("published run") as is_first:
            if is_first:
                continue_from(publish, workdir)
    with (
        open_folder(workdir, console.print) as folder,
        publishing(folder, publish)
        if publish and distributed.is_main()
        else contextlib.nullcontext(),
    ):
        parts = prepare(
            config,
            folder,
            objective=objective,
            frozen=frozen,
            optimizer=optimizer,
            curriculum=curriculum,
            accept_changes=accept_changes,
            memory=True,
        )
        lines = report(parts)
        print_labelled(lines, console)
        given = contextlib.nullcontext(interruption)
        with given if interruption else handle_signals() as handled:
            fit(parts, folder, console, handled, writers, hooks)
        print_test(parts, folder, console)
        if parts.config.model.has_inputs:  # A language model does not translate.
            console.print(f"translate with: flaxformer-mt translate --run {folder} < source.txt")
    return Run(workdir)


def prepare(
    config: ExperimentConfig,
    workdir: str | Path,
    *,
    objective: UserObjective | None = None,
    frozen: Any = None,
    optimizer: UserOptimizer | None = None,
    curriculum: Curriculum | None = None,
    accept_changes: bool = False,
    memory: bool = False,
) -> Experiment:
    """Builds the parts of a new run, or of the run in a folder, and writes the run folder.

    Of several processes the first one tokenizes and writes.

    Args:
      config: the configuration as given by the user.
      workdir: the run folder.
      objective: as of `train`.
      frozen: as of `train`.
      optimizer: as of `train`.
      curriculum: as of `train`.
      accept_changes: as of `train`.
      memory: whether the devices must have what training needs at the very least, as `train` does.

    Raises:
      UserError: as of `train`.
    """
    config = recorded(config, objective, optimizer, curriculum)
    checks.check_config(config, objective, optimizer, curriculum, memory=memory)
    folder = Path(workdir)
    with distributed.first_process_first("data") as is_first:
        if not is_first:
            require_shared(folder)
        start = begin(config, folder, accept_changes=accept_changes)
        parts = Experiment(start, objective, frozen, optimizer, own_curriculum=curriculum)
        parts.make()
        if is_first:
            record(parts.start, parts.dataset)
    return parts


def evaluate_test(
    experiment: Experiment, workdir: str | Path, show_progress: bool = False
) -> Tested:
    """Evaluates the best checkpoint of a run on its test corpus, and writes the metrics."""
    return experiment.validation.test(workdir, show_progress)
