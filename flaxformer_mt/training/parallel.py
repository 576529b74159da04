"""Strategies that run a step on one or many devices, of one or several processes.

The mesh strategy compiles one program for all devices, in which XLA inserts the communication: the
rows of a batch, the parameters and the optimizer state are sharded by the rules of `sharding.py`.
The pmap strategy runs one program per device, each with the whole state, and the step communicates
explicitly (`axis_name`). Under both the state is an ordinary pytree of arrays without a device
axis, so that checkpoints do not depend on the strategy.
"""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import ExperimentConfig, ParallelConfig
from flaxformer_mt.data.stream.batches import Batch, Shard
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.sharding import (
    ACTIVATION_RULES,
    AXES,
    ROW_AXES,
    Sharding,
    parse_rules,
    partition_specs,
    shard_params,
)
from flaxformer_mt.training.state import TrainState

Tree = TypeVar("Tree")


class Compiled:
    """A step that is compiled at most once for each of a declared number of batch shapes."""

    def __init__(
        self, name: str, step: Callable, transform: Callable[[Callable, Any], Any], num_shapes: int
    ) -> None:
        """Stores the arguments; the step is compiled when it is first called.

        Args:
          name: of the step, for messages.
          step: (state or parameters, batch) -> anything.
          transform: (step, its first argument) -> jitted step.
          num_shapes: number of batch shapes.
        """
        self.batch_shapes: list[str] = []
        self.on_compile: Callable[[bool], None] = lambda begins: None
        """Called with True when a compilation begins, and with False when its step is running."""
        self._name = name
        self._step = step
        self._transform = transform
        self._num_shapes = num_shapes
        self._jitted: Any = None

    @property
    def compilations(self) -> int:
        """The number of compilations so far."""
        return len(self.batch_shapes)

    def __call__(self, state: Any, batch: Batch) -> Any:
        """Runs the step.

        Raises:
          UserError: it would be compiled once more than declared.
        """
        before = self.compilations
        result = self._for(state)(state, batch)
        if self.compilations > before:
            self.on_compile(False)
        return result

    def lower(self, state: Any, batch: Batch) -> Any:
        """Lowers the step for abstract arguments: shapes, dtypes and shardings."""
        return self._for(state).lower(state, batch)

    def _for(self, state: Any) -> Any:
        if self._jitted is None:
            self._jitted = self._transform(self._traced, state)
        return self._jitted

    def _traced(self, state: Any, batch: Batch) -> Any:
        # This runs when JAX traces the step to compile it, not at every call.
        sizes = dict.fromkeys(str(list(leaf.shape)) for leaf in jax.tree.leaves(batch))
        shape = " and ".join(sizes)
        if self.compilations == self._num_shapes:
            why = (
                "though not for this state or in this way"
                if shape in self.batch_shapes
                else f"which are {'; '.join(self.batch_shapes)}"
            )
            raise UserError(
                f"a batch of the shape {shape} would compile the {self._name} step once more than "
                f"its declared {self._num_shapes} shapes, {why}: every batch must have one of them"
            )
        self.batch_shapes.append(shape)
        self.on_compile(True)
        return self._step(state, batch)


class Strategy(abc.ABC):
    """How a step runs on several devices.

    All processes call the same methods in the same order. The devices of a process are neighbours
    in the mesh.
    """

    axis_name: str | None
    """The axis over which a step has to communicate explicitly; None if XLA does it."""
    axes: tuple[str, ...]
    """The axes of the mesh."""

    def __init__(self, devices: list[jax.Device], config: ParallelConfig) -> None:
        """Arranges the devices in a mesh; their number is a multiple of fsdp * tensor."""
        self.devices = sorted(devices, key=lambda device: (device.process_index, device.id))
        sizes = {"data": -1, "fsdp": config.fsdp, "tensor": config.tensor}
        self.mesh = Mesh(
            np.array(self.devices).reshape([sizes[axis] for axis in self.axes]),
            self.axes,
            # jax.make_mesh makes them explicit, which embedding lookups do not support.
            axis_types=(AxisType.Auto,) * len(self.axes),
        )
        self._user_rules = parse_rules(config.sharding_rules)
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        row_axes = tuple(axis for axis in ROW_AXES if axis in self.axes)
        self._by_row = NamedSharding(self.mesh, PartitionSpec(row_axes))
        self.row_shards = math.prod(self.mesh.shape[axis] for axis in row_axes)
        """The number of shards of the rows of a batch."""
        self.shard = self._own_shard()
        """The part of every batch that this process reads."""

    def _own_shard(self) -> Shard:
        parts = np.arange(self.row_shards)
        indices: Any = self._by_row.addressable_devices_indices_map(parts.shape)
        own = {int(parts[index][0]) for index in indices.values()}
        return Shard(min(own) // len(own), self.row_shards // len(own))

    def sharding(self, params: Params) -> Sharding:
        """Shards parameters by the rules of the configuration, then by the built-in ones."""
        return shard_params(params, dict(self.mesh.shape), self._user_rules)

    def shardings(self, tree: Tree) -> Tree:
        """Returns the `NamedSharding` of every array of a state, or of parameters."""
        params: Any = tree.params if isinstance(tree, TrainState) else tree
        specs = partition_specs(self.sharding(params).specs, tree)
        return jax.tree.map(
            functools.partial(NamedSharding, self.mesh),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    def abstract_state(self, make_state: Callable[[], Tree]) -> Tree:
        """Returns the shapes, dtypes and shardings of a state, to compile with or to restore."""
        return _with_shardings(*self._shapes_and_shardings(make_state))

    def create_state(self, make_state: Callable[[], Tree]) -> Tree:
        """Creates a sharded state; no device ever holds more than its part.

        Args:
          make_state: traced by JAX; each process calls it, and each device computes its part.
        """
        _, shardings = self._shapes_and_shardings(make_state)
        return jax.jit(make_state, out_shardings=shardings)()

    def _shapes_and_shardings(self, make_state: Callable[[], Tree]) -> tuple[Tree, Tree]:
        shapes = jax.eval_shape(make_state)
        return shapes, self.shardings(shapes)

    def place_state(self, state: Tree) -> Tree:
        """Copies a state, or parameters, to the devices.

        Args:
          state: NumPy arrays or arrays on this process' devices; the same in every process.
        """

        def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
            whole = np.asarray(leaf)
            # A copy, because a step donates its argument, which would delete the caller's array.
            return jax.make_array_from_callback(
                whole.shape, sharding, lambda index: np.array(whole[index])
            )

        return jax.tree.map(place, state, self.shardings(state))

    def gather(self, params: Tree) -> Tree:
        """Gathers sharded parameters on this process' first device.

        All processes must call it, even if only one needs the result, which is valid until `params`
        are donated.
        """
        if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
            params = self._gather(params)
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), params)

    @functools.cached_property
    def _gather(self) -> Callable:
        return jax.jit(lambda tree: tree, out_shardings=self._everywhere)

    def place_batch(self, batch: Batch) -> Batch:
        """Transfers each device's rows to it.

        Args:
          batch: the rows of `self.shard`, on the host.

        Raises:
          UserError: the number of devices of this process does not divide that of rows.
        """
        rows, parts = len(batch.decoder_input_tokens), self.row_shards // self.shard.count
        if rows % parts:
            raise UserError(
                f"the {rows} rows of a batch cannot be divided evenly among {parts} devices: make "
                "train.batch_tokens larger, or a multiple of the row length times the devices"
            )
        return jax.tree.map(self._place_rows, batch)

    def abstract_batch(self, batch: Batch) -> Batch:
        """Returns the shapes, dtypes and shardings of a placed batch, from those of a whole one."""
        return _with_shardings(batch, jax.tree.map(lambda _: self._by_row, batch))

    @abc.abstractmethod
    def _place_rows(self, rows: np.ndarray) -> jax.Array:
        """Transfers each device's part of this process' rows of one array to it."""

    def compile_train_step(self, step: Callable, num_shapes: int = 1) -> Compiled:
        """Compiles step(state, batch, axis_name=...) -> (state, metrics).

        The state is donated: after a call only the new one can be used.

        Args:
          step: a pure function.
          num_shapes: number of batch shapes; one more raises an error.
        """
        step = functools.partial(step, axis_name=self.axis_name)
        return Compiled("training", step, self._jit_train_step, num_shapes)

    def compile_eval_step(self, step: Callable, num_shapes: int = 1) -> Compiled:
        """Compiles step(params, batch, axis_name=...) -> metrics, for `num_shapes` batch shapes."""
        step = functools.partial(step, axis_name=self.axis_name)
        return Compiled("validation", step, self._jit_eval_step, num_shapes)

    @abc.abstractmethod
    def _jit_train_step(self, step: Callable, state: TrainState) -> Any:
        """Compiles step(state, rows) -> (state, replicated), donating the state."""

    @abc.abstractmethod
    def _jit_eval_step(self, step: Callable, params: Params) -> Any:
        """Compiles step(params, rows) -> replicated."""


class MeshStrategy(Strategy):
    """One program for all devices, compiled by `jax.jit` for a mesh."""

    axis_name = None
    axes = AXES

    def _place_rows(self, rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self._by_row, rows)

    def _jit_train_step(self, step: Callable, state: TrainState) -> Any:
        shardings = self.shardings(state)
        return jax.jit(
            self._with_rules("train_step", step),
            in_shardings=(shardings, self._by_row),
            out_shardings=(shardings, self._everywhere),
            donate_argnums=0,
        )

    def _jit_eval_step(self, step: Callable, params: Params) -> Any:
        return jax.jit(
            self._with_rules("eval_step", step),
            in_shardings=(self.shardings(params), self._by_row),
            out_shardings=self._everywhere,
        )

    def _with_rules(self, name: str, step: Callable) -> Callable:
        """Returns the step, traced with the mesh and the sharding rules of activations.

        Args:
          name: of the compiled program, in traces.
          step: the step.
        """

        def with_rules(*arguments: Any) -> Any:
            with (
                jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
                nn.logical_axis_rules(ACTIVATION_RULES),
            ):
                return step(*arguments)

        with_rules.__name__ = name
        return with_rules


class PmapStrategy(Strategy):
    """The same program on each device of one process, by `jax.pmap`."""

    axis_name = "data"
    axes = ("data",)  # As in pmap's own mesh: it would retrace for arrays of another one.

    def _place_rows(self, rows: np.ndarray) -> jax.Array:
        """Transfers each device's rows to it, as an array [devices, B / devices, ...]."""
        return jax.device_put(rows.reshape(len(self.devices), -1, *rows.shape[1:]), self._by_row)

    def abstract_batch(self, batch: Batch) -> Batch:
        """Returns the shapes, dtypes and shardings of a placed batch, from those of a whole one."""
        devices = len(self.devices)

        def divided(rows: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (devices, rows.shape[0] // devices, *rows.shape[1:])
            return jax.ShapeDtypeStruct(shape, rows.dtype)

        return super().abstract_batch(jax.tree.map(divided, batch))

    def _jit_train_step(self, step: Callable, state: TrainState) -> Any:
        return self._pmap(step, donate_argnums=0)

    def _jit_eval_step(self, step: Callable, params: Params) -> Any:
        return self._pmap(step)

    def _pmap(self, step: Callable, **options: Any) -> Any:
        # All devices compute the same update, so that the state has no device axis (None).
        return jax.pmap(
            step,
            axis_name=self.axis_name,
            in_axes=(None, 0),
            out_axes=None,
            devices=self.devices,
            **options,
        )


def _with_shardings(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def make_strategy(config: ExperimentConfig) -> Strategy:
    """Creates the strategy of `config.parallel`.

    Raises:
      UserError: there are too few devices, the mesh axes do not divide their number, they do not
        divide the rows of a batch, or the strategy does not support several processes.
    """
    parallel, available = config.parallel, jax.devices()
    wanted = parallel.num_devices or len(available)
    if wanted > len(available):
        raise UserError(
            f"parallel.num_devices={wanted}, but there are only {len(available)} "
            f"({available[0].platform}): ask for fewer, or for 0, which means all"
        )
    if jax.process_count() > 1 and wanted < len(available):
        raise UserError(
            f"parallel.num_devices={wanted}, but {jax.process_count()} processes have "
            f"{len(available)} devices, all of which have to be used: set it to 0"
        )
    if jax.process_count() > 1 and parallel.strategy == "pmap":
        raise UserError(
            f"parallel.strategy=pmap is for one process, and there are {jax.process_count()}: set "
            "parallel.strategy=mesh"
        )
    local, tensor = jax.local_device_count(), parallel.tensor
    if jax.process_count() > 1 and local % tensor and tensor % local:
        raise UserError(
            f"parallel.tensor={tensor} does not fit processes of {local} devices: one has to be a "
            "multiple of the other"
        )
    if wanted % (parallel.fsdp * parallel.tensor):
        raise UserError(
            f"{wanted} devices (parallel.num_devices) are not a multiple of parallel.fsdp="
            f"{parallel.fsdp} times parallel.tensor={parallel.tensor}"
        )
    kind = {"mesh": MeshStrategy, "pmap": PmapStrategy}[parallel.strategy]
    strategy = kind(available[:wanted], parallel)
    check_rows(strategy, config)
    return strategy


def check_rows(strategy: Strategy, config: ExperimentConfig) -> None:
    """Checks that the rows of a training batch can be divided among the devices.

    Args:
      strategy: has the devices.
      config: has the number of rows and of accumulation steps. (Batches of short buckets have a
        multiple of these rows.)

    Raises:
      UserError: they cannot be divided evenly.
    """
    rows, row_length = config.rows_per_batch, config.data.row_lengths[1]
    shards, parts = strategy.row_shards, config.train.accumulation_steps
    if rows % (shards * parts):
        raise UserError(
            f"the {rows} rows of a batch (train.batch_tokens={config.train.batch_tokens} / "
            f"{row_length} tokens of a target row) cannot be divided evenly among {shards} devices "
            f"(parallel.num_devices / parallel.tensor) times {parts} parts "
            f"(train.accumulation_steps): make train.batch_tokens a multiple of "
            f"{shards * parts * row_length}"
        )
