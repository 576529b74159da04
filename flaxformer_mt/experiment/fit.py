"""Fits the parameters of a run: its parts, the state to go on from, and the loop."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.config import ExperimentConfig, to_dict
from flaxformer_mt.data.dataset import Dataset
from flaxformer_mt.data.stream.batches import Batch, DataPosition
from flaxformer_mt.data.stream.blocks import Curriculum
from flaxformer_mt.data.stream.placement import own_shard
from flaxformer_mt.data.stream.training_stream import Prefetched
from flaxformer_mt.decoding.translator import check_search
from flaxformer_mt.experiment.start import Start
from flaxformer_mt.experiment.test import Validation
from flaxformer_mt.interruption import Interrupted, Interruption
from flaxformer_mt.memory_limits import explained_exhaustion
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.cross_entropy import Objective
from flaxformer_mt.runs import folder as run_folder
from flaxformer_mt.runs.checkpoint import Checkpoints
from flaxformer_mt.runs.metrics_file import CHANGE
from flaxformer_mt.training import devices, loop
from flaxformer_mt.training.continuation import adapted
from flaxformer_mt.training.devices import CompiledStep, RunDevices, make_devices
from flaxformer_mt.training.hooks import Hooks, SavedFirst
from flaxformer_mt.training.objective import UserObjective, make_objective
from flaxformer_mt.training.optimizer import UserOptimizer, make_optimizer, make_schedule
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.reporting import trackers
from flaxformer_mt.training.reporting.console import ConsoleWriter, is_notebook, make_console
from flaxformer_mt.training.reporting.metrics import Writer
from flaxformer_mt.training.reporting.notebook import NotebookProgress
from flaxformer_mt.training.reporting.progress import Progress
from flaxformer_mt.training.reporting.trackers import Tracker
from flaxformer_mt.training.state import TrainState, abstract_state, state_maker
from flaxformer_mt.training.step import train_step
from flaxformer_mt.training.warm_start import WarmStart, load_teacher, start_from, with_moments

_LESS_MEMORY = (
    "set model.remat=full, or parallel.fsdp with several devices; a new run can also have more "
    "train.accumulation_steps or a lower train.batch_tokens"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """The parts of an experiment, each of which is made when it is first asked for.

    `own_objective`, if given, is minimized instead of that of the configuration, and `own_frozen`
    is its last argument; `own_optimizer` makes the optimizer if the configuration names no built-in
    one, `own_schedule` takes the place of the configured learning rates, and `own_curriculum` says
    how often pairs are used.
    """

    start: Start
    own_objective: UserObjective | None = None
    own_frozen: Any = None
    own_optimizer: UserOptimizer | None = None
    own_schedule: optax.Schedule | None = None
    own_curriculum: Curriculum | None = None

    def make(self) -> None:
        """Makes all parts; their errors are raised before anything is written."""
        _ = self.validation, self.train_step, self.state_shapes
        if self.start.is_new:
            _ = self.loaded

    @functools.cached_property
    def _tokenized(self) -> tuple[ExperimentConfig, Dataset]:
        start = self.start
        if start.config.model.has_inputs:
            check_search(start.config.model, start.tokenizers, start.config.decode)
        config, dataset = start.text.tokenized(start.tokenizers, self.own_curriculum)
        if not start.is_new:
            config = run_folder.with_first_schedule(start.folder, config)
        return config, dataset

    @property
    def config(self) -> ExperimentConfig:
        """The configuration with all sizes."""
        return self._tokenized[0]

    @property
    def dataset(self) -> Dataset:
        """The training stream and the evaluation sets."""
        return self._tokenized[1]

    @functools.cached_property
    def devices(self) -> RunDevices:
        """The devices, and what they compile."""
        return make_devices(self.config.parallel)

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """From the number of updates made to the learning rate."""
        if self.own_schedule is not None:
            return self.own_schedule
        config = self.config
        return make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer with its schedule."""
        return make_optimizer(self.config.optimizer, self.schedule, self.own_optimizer)

    @functools.cached_property
    def state_shapes(self) -> TrainState:
        """The shapes, dtypes and shardings of the state."""
        return abstract_state(self.config, self.optimizer, self.devices)

    @functools.cached_property
    def validation(self) -> Validation:
        """Evaluates parameters."""
        return Validation(self.config, self.dataset, self.devices)

    @functools.cached_property
    def _minimized(self) -> tuple[Objective, Any]:
        if self.own_objective is not None:
            return functools.partial(self.own_objective, self.config.model), self.own_frozen
        train = self.config.train
        teacher, frozen = load_teacher(train.teacher, self.dataset.tokenizers)
        return make_objective(Transformer(self.config.model), train, teacher), frozen

    @functools.cached_property
    def train_step(self) -> Callable[..., Any]:
        """The training step, as a pure function."""
        objective, _ = self._minimized
        return functools.partial(
            train_step, objective=objective, optimizer=self.optimizer, config=self.config.train
        )

    @functools.cached_property
    def compiled_step(self) -> CompiledStep:
        """The training step, for the devices and the shapes of the batches."""
        return self.devices.compile_train_step(
            self.train_step,
            seed=self.config.train.seed,
            frozen=self._minimized[1],
            max_shapes=len(self.dataset.training.shapes),
        )

    @functools.cached_property
    def loaded(self) -> tuple[Params | None, dict[str, Any]]:
        """The parameters, and moments, of `train.init_from`, if any, on the host."""
        train = self.config.train
        if not train.init_from:
            return None, {}
        start = WarmStart(train.init_from)
        params = start.parameters(self.config.model, self.state_shapes.params)
        return params, start.moments() if train.init_optimizer else {}

    def initial_state(self, announce: Callable[[str], None] = print) -> TrainState:
        """Creates the state before the first step, on the devices."""
        mesh, rules, train = self.devices.mesh, self.devices.rules, self.config.train
        make_state = state_maker(self.config, self.optimizer)
        state = devices.create(make_state, mesh, seed=train.seed, rules=rules)
        params, moments = self.loaded
        if moments:
            opt_state, differing = with_moments(state.opt_state, moments)
            state = dataclasses.replace(state, opt_state=opt_state)
            new = f"; these begin anew: {', '.join(differing)}" if differing else ""
            announce(f"the optimizer's moments are those of {train.init_from}{new}")
        return state if params is None else start_from(state, params, mesh, rules)

    def stream(self, position: DataPosition) -> Prefetched[Batch]:
        """Returns an iterator of batches on the devices, from a position in the data."""
        shard = own_shard(self.devices.mesh)
        return self.dataset.training.prefetched(shard, self.devices.place_batch, position)


def fit(
    experiment: Experiment,
    workdir: str | Path,
    console: Console | None = None,
    interruption: Interruption | None = None,
    writers: Sequence[Writer | Tracker] = (),
    hooks: Hooks | None = None,
) -> None:
    """Trains from the newest checkpoint, or from the start, and writes checkpoints and metrics.

    Arguments and errors as of `train`.
    """
    config, console, workdir = experiment.config.train, console or make_console(), Path(workdir)
    several, in_notebook = jax.process_count() > 1, is_notebook()
    with contextlib.ExitStack() as stack:
        stack.enter_context(explained_exhaustion("training", _LESS_MEMORY))
        kept = config.keep_last, config.keep_best, config.best_metric
        checkpoints = stack.enter_context(Checkpoints(workdir, *kept, console.print))
        state, progress, lines = state_to_go_on_from(experiment, checkpoints, console.print)
        writers = [*trackers.default_writers(config, workdir, console.print), *writers]
        if in_notebook:
            writers.append(NotebookProgress())
        is_main = distributed.is_main()
        tracking = trackers.Trackers(writers if is_main else [], console.print)
        shown = Console(quiet=True) if in_notebook else console
        epoch = experiment.dataset.training.batches_per_epoch
        display = ConsoleWriter(config.num_steps, shown, epoch)
        all_writers = [*tracking.others, tracking, display] if is_main else []
        experiment.compiled_step.on_compile = display.compiling

        def validated(params: Params, step: int) -> dict[str, Any]:
            display.validating()
            metrics, samples = experiment.validation.validate(params)
            display.translated(samples)
            tracking.tell("translated", step, samples)
            return metrics

        after_step = Hooks()
        after_step.add_hook(lambda info: display.after_step(info.step, info.sums))
        if interruption is not None:
            agree = distributed.agree if several else None
            is_asked = stack.enter_context(interruption.deferred(agree, config.log_every))
            after_step.add_hook(lambda info: is_asked(info.step))
        user = SavedFirst(hooks or Hooks(), distributed.agree, config.log_every if several else 1)
        after_step.add_hook(user)
        facts = {"system": experiment.devices.facts}
        tracking.tell("begin", workdir, to_dict(experiment.config) | facts)
        with contextlib.ExitStack() as closing:
            for writer in all_writers:
                closing.callback(writer.close)
                writer.rewind(int(state.step))
                for step, values in lines:
                    writer.write(step, CHANGE, values)
            try:
                loop.train(
                    state,
                    progress,
                    train_step=experiment.compiled_step,
                    stream=experiment.stream,
                    evaluate=validated,
                    schedule=experiment.schedule,
                    checkpointer=checkpoints,
                    writers=all_writers,
                    config=config,
                    devices=experiment.devices.devices,
                    hooks=after_step,
                )
            except Interrupted as interrupted:
                if not user.is_stopping:
                    raise
                console.print(f"by a hook, {interrupted}")
        if why := loop.early_stop(progress, config):
            console.print(why)
        # While signals are still deferred.
        checkpoints.wait()
        user.finish()


def state_to_go_on_from(
    experiment: Experiment, checkpoints: Checkpoints, announce: Callable[[str], None] = print
) -> tuple[TrainState, Progress, list[tuple[int, dict[str, str]]]]:
    """Returns the state and the progress of the newest checkpoint, or those of a start.

    Both are adapted to options that were changed after it. Also returns the lines about changes
    that `metrics.jsonl` lacks.
    """
    latest, folder = checkpoints.latest_step(), checkpoints.run_folder
    history = run_folder.read_history(folder)
    lines = run_folder.missing_lines(folder, history, latest or 0)
    if latest is None:
        return experiment.initial_state(announce), Progress(), lines
    pending = [each for each in history if each["step"] >= latest]
    there = wanted = experiment.state_shapes
    if pending:
        before = run_folder.config_before(experiment.config, pending)
        optimizer = make_optimizer(before.optimizer, experiment.schedule, experiment.own_optimizer)
        there = abstract_state(before, optimizer, experiment.devices)
    state, progress = checkpoints.restore_or(there, Progress())
    optimizer, freeze = experiment.optimizer, experiment.config.train.freeze
    return *adapted(state, progress, pending, wanted, optimizer, freeze, announce), lines
