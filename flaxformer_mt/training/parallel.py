"""The same step on one device or on many: rows are shared out, the state is everywhere.

The mesh strategy compiles one program for all devices, in which XLA finds the places to
communicate; pmap runs one program a device, which communicates by itself (`axis_name`). Under
both the state is an ordinary pytree of arrays, without a device axis, so that checkpoints and
all else that reads it need not know the strategy.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.batches import Batch
from flaxformer_mt.errors import UserError

AXIS = "data"
"""Name of the axis along which rows are shared out."""

Tree = TypeVar("Tree")


class Compiled:
    """A function that JAX compiles for each new shape, and how often it did."""

    def __init__(self, function: Callable, transform: Callable[[Callable], Callable]) -> None:
        self.compilations = 0

        def traced(*arguments: Any) -> Any:
            self.compilations += 1  # Python runs when JAX traces, not at every call
            return function(*arguments)

        self._run = transform(traced)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function."""
        return self._run(*arguments)


class Strategy(abc.ABC):
    """How a step runs on several devices."""

    axis_name: str | None
    """By which a step has to communicate; None if it need not care."""

    def __init__(self, devices: list[jax.Device]) -> None:
        mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
        self.devices = devices
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._by_row = NamedSharding(mesh, PartitionSpec(AXIS))

    def place_state(self, state: Tree) -> Tree:
        """Copies a pytree of arrays (a state, parameters) to every device."""
        # device_put takes over an array that is on one of the devices already, and a step will
        # donate what it got: without a copy, the caller's array would be gone.
        return jax.device_put(jax.tree.map(jnp.copy, state), self._everywhere)

    @abc.abstractmethod
    def place_batch(self, batch: Batch) -> Batch:
        """Sends each device its rows."""

    def compile_train_step(self, step: Callable) -> Compiled:
        """Compiles step(state, batch, axis_name=...) -> (state, metrics).

        The state is donated: after a call only the new one can be used.
        """
        function = functools.partial(step, axis_name=self.axis_name)
        return Compiled(function, functools.partial(self._compile, donate_argnums=0))

    def compile_eval_step(self, step: Callable) -> Compiled:
        """Compiles step(params, batch, axis_name=...) -> metrics."""
        return Compiled(functools.partial(step, axis_name=self.axis_name), self._compile)

    @abc.abstractmethod
    def _compile(self, function: Callable, **options: Any) -> Callable:
        """Compiles function(replicated, rows) -> replicated."""


class MeshStrategy(Strategy):
    """One program for all devices, compiled by jit for a mesh of them."""

    axis_name = None

    def place_batch(self, batch: Batch) -> Batch:
        """Sends each device its rows."""
        return jax.device_put(batch, self._by_row)

    def _compile(self, function: Callable, **options: Any) -> Callable:
        return jax.jit(
            function,
            in_shardings=(self._everywhere, self._by_row),
            out_shardings=self._everywhere,
            **options,
        )


class PmapStrategy(Strategy):
    """The same program on each device."""

    axis_name = AXIS

    def place_batch(self, batch: Batch) -> Batch:
        """Sends each device its rows, as arrays [devices, B / devices, ...]."""
        devices = len(self.devices)
        shards = jax.tree.map(lambda rows: rows.reshape(devices, -1, *rows.shape[1:]), batch)
        return jax.device_put(shards, self._by_row)

    def _compile(self, function: Callable, **options: Any) -> Callable:
        # Every device makes the same update, so the state needs no device axis (None).
        return jax.pmap(
            function,
            axis_name=AXIS,
            in_axes=(None, 0),
            out_axes=None,
            devices=self.devices,
            **options,
        )


def make_strategy(config: ExperimentConfig) -> Strategy:
    """The strategy and devices that `config.parallel` asks for.

    Raises:
      UserError: there are not as many devices, or rows cannot be divided among them evenly.
    """
    devices = jax.devices()
    wanted = config.parallel.num_devices or len(devices)
    if wanted > len(devices):
        raise UserError(
            f"parallel.num_devices={wanted}, but there are only {len(devices)} "
            f"({devices[0].platform}): ask for fewer, or for 0, which means all"
        )
    rows, parts = config.rows_per_batch, config.train.accumulation_steps
    if rows % (wanted * parts):
        raise UserError(
            f"the {rows} rows of a batch (train.batch_tokens={config.train.batch_tokens} / "
            f"data.target_row_length={config.data.target_row_length}) cannot be divided evenly "
            f"among {wanted} devices (parallel.num_devices) times {parts} parts "
            f"(train.accumulation_steps): make train.batch_tokens a multiple of "
            f"{wanted * parts * config.data.target_row_length}"
        )
    kind = {"mesh": MeshStrategy, "pmap": PmapStrategy}[config.parallel.strategy]
    return kind(devices[:wanted])


def on_one_device(tree: Tree) -> Tree:
    """A placed pytree, as its first device has it; valid until the arrays are donated."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
