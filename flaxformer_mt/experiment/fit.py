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
from flaxformer_mt.runs import changes
from flaxformer_mt.runs.checkpoint import Checkpoints
from flaxformer_mt.runs.folder import with_first_schedule
from flaxformer_mt.training import continuation, devices, loop
from flaxformer_mt.training.devices import CompiledStep, RunDevices, make_devices, seed_key
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
from flaxformer_mt.training.state import TrainState, create_state
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
        return config if start.is_new else with_first_schedule(start.folder, config), dataset

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
    def model(self) -> Transformer:
        """The model, as a Flax module."""
        return Transformer(self.config.model)

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

    @property
    def _make_state(self) -> Callable[[jax.Array], TrainState]:
        return functools.partial(
            create_state, model=self.model, optimizer=self.optimizer, config=self.config.train
        )

    @functools.cached_property
    def state_shapes(self) -> TrainState:
        """The shapes, dtypes and shardings of the state."""
        shapes = jax.eval_shape(self._make_state, seed_key(0))
        return devices.abstract(shapes, self.devices.mesh, self.devices.rules)

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
        return make_objective(self.model, train, teacher), frozen

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
        state = devices.create(self._make_state, mesh, seed=train.seed, rules=rules)
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
        checkpoints = stack.enter_context(
            Checkpoints(
                workdir, config.keep_last, config.keep_best, config.best_metric, console.print
            )
        )
        state, progress, lines = state_to_go_on_from(experiment, checkpoints, console.print)
        writers = [*trackers.default_writers(config, workdir, console.print), *writers]
        told = [each for each in writers if isinstance(each, Tracker)]
        told += [NotebookProgress()] if in_notebook else []
        tracking = trackers.Trackers(told if distributed.is_main() else [], console.print)
        display = ConsoleWriter(
            config.num_steps,
            Console(quiet=True) if in_notebook else console,
            experiment.dataset.training.batches_per_epoch,
        )
        untracked = [each for each in writers if not isinstance(each, Tracker)]
        all_writers = [*untracked, tracking, display] if distributed.is_main() else []
        experiment.compiled_step.on_compile = display.compiling

        def validated(params: Params, step: int) -> dict[str, Any]:
            display.validating()
            metrics, samples = experiment.validation.validate(params)
            display.translated(samples)
            tracking.tell("translated", step, samples)
            return metrics

        is_interrupted = stack.enter_context(
            contextlib.nullcontext(lambda step: False)
            if interruption is None
            else interruption.deferred(distributed.agree if several else None, config.log_every)
        )
        user = SavedFirst(hooks or Hooks(), distributed.agree, config.log_every if several else 1)
        after_step = Hooks()
        after_step.add_hook(lambda info: display.after_step(info.step, info.sums))
        after_step.add_hook(lambda info: is_interrupted(info.step))
        after_step.add_hook(user)
        values = to_dict(experiment.config) | {"system": experiment.devices.facts}
        tracking.tell("begin", workdir, values)
        with contextlib.ExitStack() as closing:
            for writer in all_writers:
                closing.callback(writer.close)
                writer.rewind(int(state.step))
                for step, values in lines:
                    writer.write(step, changes.SPLIT, values)
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
    history = changes.read(folder)
    lines = changes.missing_lines(folder, history, latest or 0)
    if latest is None:
        return experiment.initial_state(announce), Progress(), lines
    pending = [each for each in history if each["step"] >= latest]
    if not pending:
        state, saved = checkpoints.restore(experiment.state_shapes)
        return state, Progress.from_json(saved), lines
    for entry in pending:
        announce(f"changed after step {entry['step']:,}: {changes.described(entry)}")
    if continuation.begins_epoch(pending):
        announce("the data begin with a new epoch")
    before = changes.before(experiment.config, pending)
    like, own_optimizer = experiment.state_shapes, experiment.own_optimizer
    earlier = continuation.earlier_state(before, experiment.devices, own_optimizer)
    if not continuation.keeps_optimizer(earlier, like):
        announce("the optimizer's state begins anew, but for its count of updates")
    state, saved = checkpoints.restore(earlier)
    freeze = experiment.config.train.freeze
    state = continuation.adapted_state(state, like, experiment.optimizer, freeze)
    return state, continuation.adapted_progress(Progress.from_json(saved), pending), lines
