"""The parts of an experiment: model, objective, optimizer, devices, steps and data."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.dataset import Dataset
from flaxformer_mt.data.stream.batches import Batch, DataPosition
from flaxformer_mt.data.stream.placement import own_shard
from flaxformer_mt.data.stream.prefetch import Prefetched
from flaxformer_mt.experiment.validation import Validation
from flaxformer_mt.interop.exports import exports, summary
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.cross_entropy import Objective
from flaxformer_mt.training import devices
from flaxformer_mt.training.devices import CompiledStep, make_devices, seed_key
from flaxformer_mt.training.memory import abstract_batch, step_cost
from flaxformer_mt.training.objective import UserObjective, make_objective
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
from flaxformer_mt.training.parameters import Params, describe
from flaxformer_mt.training.sharding import check_rules
from flaxformer_mt.training.state import TrainState, create_state
from flaxformer_mt.training.step import train_step
from flaxformer_mt.training.warm_start import (
    load_moments,
    load_parameters,
    load_teacher,
    start_from,
    with_moments,
)


def _state_maker(
    config: ExperimentConfig, optimizer: optax.GradientTransformation
) -> Callable[[jax.Array], TrainState]:
    model = Transformer(config.model)
    return functools.partial(create_state, model=model, optimizer=optimizer, config=config.train)


class Experiment:
    """The parts of an experiment: model, objective, optimizer, devices, steps and data.

    `config` is the resolved configuration, from `open_dataset`. `objective`, if given, is
    minimized instead of that of the configuration, and `frozen` is its last argument; `schedule`
    takes the place of the configured learning rates.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        dataset: Dataset,
        objective: UserObjective | None = None,
        frozen: Any = None,
        schedule: optax.Schedule | None = None,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.devices = make_devices(config)
        self.model = Transformer(config.model)
        self.schedule = schedule or make_schedule(
            config.optimizer, config.model.d_model, config.train.num_steps
        )
        self.optimizer = make_optimizer(config.optimizer, self.schedule)
        self.make_state = _state_maker(config, self.optimizer)
        self.state_shapes: TrainState = jax.eval_shape(self.make_state, seed_key(0))
        self.validation = Validation(config, dataset, self.devices)
        if objective is not None:
            self.objective: Objective = functools.partial(objective, config.model)
            self.frozen = frozen
        else:
            teacher, self.frozen = load_teacher(config.train.teacher, dataset.tokenizers)
            self.objective = make_objective(self.model, config.train, teacher)
        self.train_step = functools.partial(
            train_step, objective=self.objective, optimizer=self.optimizer, config=config.train
        )

    def compile_train_step(self) -> CompiledStep:
        """Compiles the training step for the devices and the shapes of the batches."""
        return self.devices.compile_train_step(
            self.train_step,
            seed=self.config.train.seed,
            frozen=self.frozen,
            max_shapes=len(self.dataset.training.shapes),
        )

    def report(self) -> Iterator[tuple[str, str]]:
        """Yields the lines at the start of a run, each with its label."""
        config = self.config
        yield from self.dataset.report()
        params = self.state_shapes.params
        yield (
            "model",
            f"{describe(params, config.train.freeze, config.model)}, {config.model.dtype}",
        )
        epochs = config.train.num_steps / self.dataset.training.batches_per_epoch
        yield "steps", f"{config.train.num_steps:,}, which are {epochs:,.1f} epochs"
        if config.train.label_smoothing:
            smoothing = f"with label smoothing of {config.train.label_smoothing:g}"
            yield "loss", f"{smoothing}; the perplexity is exp(loss) without it"
        mesh = self.devices.mesh
        axes = " x ".join(f"{size} {axis}" for axis, size in mesh.shape.items())
        yield "devices", f"{mesh.size} {self.devices.devices[0].platform} ({axes})"
        for line in check_rules(params, mesh.shape, self.devices.rules):
            yield "sharding", line
        yield "exports", summary(config.model, self.dataset.tokenizers.has_sentencepiece)

    def export_obstacles(self) -> Iterator[tuple[str, str]]:
        """Yields what prevents an export to each other format."""
        has_sentencepiece = self.dataset.tokenizers.has_sentencepiece
        for name, obstacle in exports(self.config.model, has_sentencepiece).items():
            if obstacle:
                yield "exports", f"not {name}: {obstacle}"

    def costs(self) -> Iterator[tuple[str, str]]:
        """Compiles the training step for each shape, and yields what it needs per device."""
        step, state = self.compile_train_step(), self.abstract_state()
        has_inputs, has_links = self.config.model.has_inputs, bool(self.config.data.alignments)
        for shape in self.dataset.training.shapes:
            batch = self.devices.abstract_batch(abstract_batch(shape, has_inputs, has_links))
            cost = step_cost(step.lower(state, batch).compile(), state, batch)
            rows = f"{shape.rows} x {shape.source_length} and {shape.target_length} tokens"
            yield "step", f"one compilation for {rows}: {cost}"

    @functools.cache  # noqa: B019  (an experiment lives as long as the program)
    def load_start(self) -> tuple[Params | None, dict[str, Any]]:
        """Loads the parameters, and moments, of `train.init_from`, if any, onto the host."""
        train = self.config.train
        if not train.init_from:
            return None, {}
        params = load_parameters(train.init_from, self.config.model, self.state_shapes.params)
        return params, load_moments(train.init_from) if train.init_optimizer else {}

    def initial_state(self, announce: Callable[[str], None] = print) -> TrainState:
        """Creates the state before the first step, on the devices."""
        mesh, rules = self.devices.mesh, self.devices.rules
        state = devices.create(self.make_state, mesh, seed=self.config.train.seed, rules=rules)
        params, moments = self.load_start()
        if params is not None:
            state = start_from(state, params, mesh, rules)
        if moments:
            opt_state, differing = with_moments(state.opt_state, moments)
            state = dataclasses.replace(state, opt_state=opt_state)
            new = f"; these begin anew: {', '.join(differing)}" if differing else ""
            announce(f"the optimizer's moments are those of {self.config.train.init_from}{new}")
        return state

    def abstract_state(self, config: ExperimentConfig | None = None) -> TrainState:
        """Returns the shapes, dtypes and shardings of the state, to restore a checkpoint into.

        `config` is an earlier configuration of the run, with which the checkpoint was written.
        """
        shapes = self.state_shapes
        if config is not None:
            schedule = make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)
            optimizer = make_optimizer(config.optimizer, schedule)
            shapes = jax.eval_shape(_state_maker(config, optimizer), seed_key(0))
        return devices.abstract(shapes, self.devices.mesh, self.devices.rules)

    def stream(self, position: DataPosition) -> Prefetched[Batch]:
        """Returns an iterator of batches on the devices, from a position in the data."""
        shard = own_shard(self.devices.mesh)
        return self.dataset.training.prefetched(shard, self.devices.place_batch, position)
