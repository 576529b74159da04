"""The same step on one device or on many, of one process or of several.

The mesh strategy compiles one program for all devices, in which XLA finds the places to
communicate: rows are shared out, and parameters and optimizer state are cut as `sharding.py` says.
pmap runs one program a device, each with the whole state, which communicate by themselves
(`axis_name`). Under both the state is an ordinary pytree of arrays, without a device axis, so that
checkpoints and all else that reads it need not know the strategy.
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
from flaxformer_mt.model.transformer import Embedding
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.sharding import (
    AXES,
    ROW_AXES,
    Sharding,
    parse_rules,
    shard_params,
    spread,
)
from flaxformer_mt.training.state import TrainState

Tree = TypeVar("Tree")


class Compiled:
    """A step that is compiled once for each of a declared number of batch shapes, and no more."""

    def __init__(
        self, name: str, step: Callable, transform: Callable[[Callable, Any], Any], num_shapes: int
    ) -> None:
        """Compiles nothing yet.

        Args:
          name: of the step, for messages.
          step: (state or parameters, batch) -> anything.
          transform: what `jit` does, given the step and its first argument.
          num_shapes: how many batch shapes there are.
        """
        self.batch_shapes: list[str] = []
        self._name = name
        self._step = step
        self._transform = transform
        self._num_shapes = num_shapes
        self._jitted: Any = None

    @property
    def compilations(self) -> int:
        """How often the step was compiled."""
        return len(self.batch_shapes)

    def __call__(self, state: Any, batch: Batch) -> Any:
        """Runs the step.

        Raises:
          UserError: it would have to be compiled once more than declared.
        """
        return self._for(state)(state, batch)

    def lower(self, state: Any, batch: Batch) -> Any:
        """The program for arguments of which only shapes, dtypes and shardings are known."""
        return self._for(state).lower(state, batch)

    def _for(self, state: Any) -> Any:
        if self._jitted is None:
            self._jitted = self._transform(self._traced, state)
        return self._jitted

    def _traced(self, state: Any, batch: Batch) -> Any:
        # Python runs when JAX traces for a compilation, not at every call.
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
        return self._step(state, batch)


class Strategy(abc.ABC):
    """How a step runs on several devices.

    Of several processes, all call the same methods in the same order. The devices of a process are
    neighbours in the mesh.
    """

    axis_name: str | None
    """By which a step has to communicate; None if it need not care."""
    axes: tuple[str, ...]
    """Of the mesh."""

    def __init__(self, devices: list[jax.Device], config: ParallelConfig) -> None:
        """Arranges devices, whose number is a multiple of fsdp * tensor, in a mesh."""
        self.devices = sorted(devices, key=lambda device: (device.process_index, device.id))
        sizes = {"data": -1, "fsdp": config.fsdp, "tensor": config.tensor}
        self.mesh = Mesh(
            np.array(self.devices).reshape([sizes[axis] for axis in self.axes]),
            self.axes,
            # jax.make_mesh would make them explicit, which embedding lookups of linen cannot bear.
            axis_types=(AxisType.Auto,) * len(self.axes),
        )
        self._user_rules = parse_rules(config.sharding_rules)
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        row_axes = tuple(axis for axis in ROW_AXES if axis in self.axes)
        self._by_row = NamedSharding(self.mesh, PartitionSpec(row_axes))
        self.row_shards = math.prod(self.mesh.shape[axis] for axis in row_axes)
        """In how many parts the rows of a batch are cut."""
        self.shard = self._own_shard()
        """The part of every batch that this process has to read."""

    def _own_shard(self) -> Shard:
        parts = np.arange(self.row_shards)
        places: Any = self._by_row.addressable_devices_indices_map(parts.shape)
        own = {int(parts[place][0]) for place in places.values()}
        return Shard(min(own) // len(own), self.row_shards // len(own))

    def sharding(self, params: Params) -> Sharding:
        """How parameters are cut: by the rules of the configuration, then the built-in ones."""
        return shard_params(params, dict(self.mesh.shape), self._user_rules)

    def shardings(self, tree: Tree) -> Tree:
        """The `NamedSharding` of every array of a state, or of parameters."""
        params: Any = tree.params if isinstance(tree, TrainState) else tree
        specs = spread(self.sharding(params).specs, tree)
        return jax.tree.map(
            functools.partial(NamedSharding, self.mesh),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    def abstract_state(self, make_state: Callable[[], Tree]) -> Tree:
        """Shapes, dtypes and shardings of a state: all that is needed to compile, or to restore."""
        return _with_shardings(*self._shapes_and_shardings(make_state))

    def create_state(self, make_state: Callable[[], Tree]) -> Tree:
        """Makes a state where it belongs, so that no device ever holds more than its part.

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
          state: NumPy arrays or arrays of this process' devices; the same in every process.
        """

        def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
            whole = np.asarray(leaf)
            # A copy, because a step will donate what it got, and the caller's array would be gone.
            return jax.make_array_from_callback(
                whole.shape, sharding, lambda index: np.array(whole[index])
            )

        return jax.tree.map(place, state, self.shardings(state))

    def gather(self, params: Tree) -> Tree:
        """Placed parameters, whole, on this process' first device.

        All processes have to call it, even if only one needs the result. That is valid until
        `params` are donated.
        """
        if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
            params = self._gather(params)
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), params)

    @functools.cached_property
    def _gather(self) -> Callable:
        return jax.jit(lambda tree: tree, out_shardings=self._everywhere)

    def place_batch(self, batch: Batch) -> Batch:
        """Sends each device its rows.

        Args:
          batch: the rows of `self.shard`, on the host.

        Raises:
          UserError: they cannot be divided evenly among this process' devices.
        """
        rows, parts = len(batch.decoder_input_tokens), self.row_shards // self.shard.count
        if rows % parts:
            raise UserError(
                f"the {rows} rows of a batch cannot be divided evenly among {parts} devices: make "
                "train.batch_tokens larger, or a multiple of the row length times the devices"
            )
        return jax.tree.map(self._place_rows, batch)

    def abstract_batch(self, batch: Batch) -> Batch:
        """Shapes, dtypes and shardings of a placed batch, from those of the whole one."""
        return _with_shardings(batch, jax.tree.map(lambda _: self._by_row, batch))

    @abc.abstractmethod
    def _place_rows(self, rows: np.ndarray) -> jax.Array:
        """Sends each device its part of this process' rows of one array."""

    def compile_train_step(self, step: Callable, num_shapes: int = 1) -> Compiled:
        """Compiles step(state, batch, axis_name=...) -> (state, metrics).

        The state is donated: after a call only the new one can be used.

        Args:
          step: a pure function.
          num_shapes: of batches; one more is refused.
        """
        step = functools.partial(step, axis_name=self.axis_name)
        return Compiled("training", step, self._jit_train_step, num_shapes)

    def compile_eval_step(self, step: Callable, num_shapes: int = 1) -> Compiled:
        """Compiles step(params, batch, axis_name=...) -> metrics; `num_shapes` as for training."""
        step = functools.partial(step, axis_name=self.axis_name)
        return Compiled("validation", step, self._jit_eval_step, num_shapes)

    @abc.abstractmethod
    def _jit_train_step(self, step: Callable, state: TrainState) -> Any:
        """Compiles step(state, rows) -> (state, replicated), donating the state."""

    @abc.abstractmethod
    def _jit_eval_step(self, step: Callable, params: Params) -> Any:
        """Compiles step(params, rows) -> replicated."""


class MeshStrategy(Strategy):
    """One program for all devices, compiled by jit for a mesh of them."""

    axis_name = None
    axes = AXES

    def _place_rows(self, rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self._by_row, rows)

    def _jit_train_step(self, step: Callable, state: TrainState) -> Any:
        shardings = self.shardings(state)
        return jax.jit(
            self._with_rows_kept(step),
            in_shardings=(shardings, self._by_row),
            out_shardings=(shardings, self._everywhere),
            donate_argnums=0,
        )

    def _jit_eval_step(self, step: Callable, params: Params) -> Any:
        return jax.jit(
            self._with_rows_kept(step),
            in_shardings=(self.shardings(params), self._by_row),
            out_shardings=self._everywhere,
        )

    def _with_rows_kept(self, step: Callable) -> Callable:
        """The step, with the vectors [B, T, D] of every module cut along their rows.

        Left alone, XLA keeps a matrix that fsdp has cut where it is and sends the vectors of all
        rows around. This makes it send the matrix, which is smaller.
        """
        anyhow = PartitionSpec.UNCONSTRAINED

        def keep_results(call: Callable, arguments: Any, options: Any, context: Any) -> Any:
            results = call(*arguments, **options)
            if isinstance(context.module, Embedding) and context.method_name == "__call__":
                # A table that fsdp has cut gives a part of every vector. XLA finds no way from
                # there to whole vectors of some rows, unless it is shown this stop on the way.
                results = self._cut(results, "data", anyhow, "fsdp")
            return jax.tree.map(lambda value: self._cut(value, ROW_AXES, anyhow, anyhow), results)

        def with_rows_kept(*arguments: Any) -> Any:
            # The mesh tells the loss how rows are shared out.
            with (
                jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
                nn.intercept_methods(keep_results),
            ):
                return step(*arguments)

        return with_rows_kept

    def _cut(self, value: Any, *axes: Any) -> Any:
        """Tells XLA how to cut vectors [B, T, D]; other values are left alone."""
        if not isinstance(value, jax.Array) or value.ndim != len(axes):
            return value
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
        try:
            sharding.shard_shape(value.shape)
        except ValueError:  # cannot be divided evenly
            return value
        return jax.lax.with_sharding_constraint(value, sharding)


class PmapStrategy(Strategy):
    """The same program on each device of one process."""

    axis_name = "data"
    axes = ("data",)  # that of pmap itself, which would trace again for arrays of another mesh

    def _place_rows(self, rows: np.ndarray) -> jax.Array:
        """Sends each device its rows, as an array [devices, B / devices, ...]."""
        return jax.device_put(rows.reshape(len(self.devices), -1, *rows.shape[1:]), self._by_row)

    def abstract_batch(self, batch: Batch) -> Batch:
        """Shapes, dtypes and shardings of a placed batch, from those of the whole one."""
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
        # Every device makes the same update, so the state needs no device axis (None).
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
    """The strategy and devices that `config.parallel` asks for.

    Raises:
      UserError: there are not as many devices, the axes cannot be made of them, rows cannot be
        divided among them evenly, or the strategy does not do for several processes.
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
    """Refuses training batches that cannot be shared out.

    Args:
      strategy: whose devices share the rows of a batch.
      config: says how many rows there are, and in how many parts one after the other. (Batches of
        short buckets have a multiple of these rows.)

    Raises:
      UserError: rows cannot be divided evenly.
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
