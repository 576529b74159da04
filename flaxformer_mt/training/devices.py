"""Steps on the devices of a mesh, or of one process by `jax.pmap`.

`compile_step` compiles one program for all devices of a mesh, in which XLA inserts the
communication: the rows of a batch, and the arrays of the state, are sharded by the rules of
`sharding.py`. With `jax.pmap` each device runs the program on its rows and holds the whole state,
and the step adds up its sums by `sum_over_devices`. Under both the state is an ordinary pytree of
arrays without a device axis, so that checkpoints do not depend on the choice.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.data.stream.placement import place_batch, row_sharding
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.sharding import (
    ACTIVATION_RULES,
    AXES,
    ShardingRule,
    leaves_by_path,
    shardings,
)

Tree = TypeVar("Tree")
Rules: TypeAlias = tuple[ShardingRule, ...]


def make_mesh(
    *, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arranges devices in a mesh with the axes data, fsdp and tensor.

        mesh = fmt.make_mesh(fsdp=2)  # Of 8 devices: 4 x 2 x 1.

    The rows of a batch are sharded over data and fsdp; parameters and optimizer state over fsdp
    (gathered where they are used) and tensor (computed with in parts).

    Args:
      fsdp: the size of that axis.
      tensor: the size of that axis.
      devices: all devices by default, of all processes. Those that fsdp * tensor leave are data.

    Raises:
      UserError: fsdp * tensor does not divide the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if fsdp < 1 or tensor < 1 or len(devices) % (fsdp * tensor):
        raise UserError(
            f"{len(devices)} devices are not a multiple of fsdp={fsdp} times tensor={tensor}"
        )
    # The devices of a process are neighbors.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(
        np.array(ordered).reshape(-1, fsdp, tensor),
        AXES,
        # jax.make_mesh makes them explicit, which embedding lookups do not support.
        axis_types=(AxisType.Auto,) * len(AXES),
    )


def seed_key(seed: int) -> Array:
    """Returns the key of a seed of up to 63 bits; that of JAX drops all but 32."""
    key = jax.random.key(seed % 2**32)
    return key if seed < 2**32 else jax.random.fold_in(key, seed >> 32)


def create(
    make_state: Callable[[Array], Tree], mesh: Mesh, *, seed: int = 0, rules: Rules = ()
) -> Tree:
    """Creates a sharded state; no device ever holds more than its part.

        params = fmt.create(lambda key: fmt.init(config, key), mesh, seed=0)

    Args:
      make_state: key -> a pytree of arrays; traced by JAX, in each process, and computed by each
        device for its part.
      mesh: the devices.
      seed: of the key, at most 63 bits.
      rules: sharding rules that take precedence over the built-in ones.
    """
    out_shardings = shardings(jax.eval_shape(make_state, seed_key(seed)), mesh, rules)
    return jax.jit(make_state, out_shardings=out_shardings)(seed_key(seed))


def abstract(tree: Tree, mesh: Mesh, rules: Rules = ()) -> Tree:
    """Returns the shapes, dtypes and shardings of a tree of arrays, or of their shapes."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(tree, mesh, rules),
    )


def place(tree: Tree, mesh: Mesh, rules: Rules = ()) -> Tree:
    """Copies a tree to the devices, sharded.

    Args:
      tree: NumPy arrays or arrays on this process' devices; the same in every process.
      mesh: the devices.
      rules: as of `create`.
    """

    def copy(leaf: Any, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(leaf)
        # A copy, because a step donates its argument, which would delete the caller's array.
        return jax.make_array_from_callback(
            whole.shape, sharding, lambda index: np.array(whole[index])
        )

    return jax.tree.map(copy, tree, shardings(tree, mesh, rules))


class CompiledStep:
    """A step that is compiled when it is first called, and then for each new shape of its batch.

    Args:
      step: (state, batch) -> anything, traced.
      transform: (step, state) -> the jitted step, for states like this one, concrete or abstract.
      max_shapes: the number of batch shapes that are allowed; 0 = any.
      frozen: further arguments, which are the same in every call.
    """

    def __init__(
        self,
        step: Callable,
        transform: Callable[[Callable, Any], Any],
        max_shapes: int = 0,
        frozen: tuple[Any, ...] = (),
    ) -> None:
        self.batch_shapes: list[str] = []
        """The shapes for which the step was compiled, in their order."""
        self.on_compile: Callable[[bool], None] = lambda begins: None
        """Called with True when a compilation begins, and with False when its step is running."""
        self._step = step
        self._transform = transform
        self._max_shapes = max_shapes
        self._frozen = frozen
        self._is_compiling = False
        self._jitted: Any = None
        self._running: Any = None

    def __call__(self, state: Any, batch: Any) -> Any:
        """Starts the step, and waits for the step before it.

        So the devices always have work, and at most two steps are in flight: many would need the
        memory of as many batches, and on simulated devices their collectives may never end.
        """
        result = self._for(state)(state, batch, *self._frozen)
        jax.block_until_ready(self._running)
        self._running = result[1] if isinstance(result, tuple) else result
        if self._is_compiling:
            self._is_compiling = False
            self.on_compile(False)
        return result

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers the step for abstract arguments: shapes, dtypes and shardings."""
        return self._for(state).lower(state, batch, *self._frozen)

    def _for(self, state: Any) -> Any:
        if self._jitted is None:
            self._jitted = self._transform(self._traced, state)
        return self._jitted

    def _traced(self, state: Any, batch: Any, *frozen: Any) -> Any:
        # This runs when JAX traces the step to compile it, not at every call. JAX may do so again
        # for a known shape, for example after its caches were cleared.
        sizes = dict.fromkeys(str(list(leaf.shape)) for leaf in jax.tree.leaves(batch))
        shape = " and ".join(sizes)
        if shape not in self.batch_shapes:
            if self._max_shapes and len(self.batch_shapes) == self._max_shapes:
                raise UserError(
                    f"a batch of the shape {shape} would compile the step once more than for the "
                    f"{self._max_shapes} shapes that are declared, which are "
                    f"{'; '.join(self.batch_shapes)}: every batch must have one of them"
                )
            self.batch_shapes.append(shape)
        self._is_compiling = True
        self.on_compile(True)
        return self._step(state, batch, *frozen)


def compile_step(
    update: Callable[[Any, Any, Array, Any], tuple[Any, Any]],
    mesh: Mesh,
    *,
    seed: int = 0,
    frozen: Any = None,
    rules: Rules = (),
    max_shapes: int = 0,
) -> CompiledStep:
    """Compiles a training step for the devices of a mesh.

        def update(state, batch, key, frozen):
            ...
            return {"params": params, "opt": opt, "step": state["step"] + 1}, sums

        step = fmt.compile_step(update, mesh, seed=0)
        state, sums = step(state, batch)

    The state is sharded by the rules and donated: after a call only the new one can be used. The
    key is `fold_in(key(seed), step)`, where `step` is `state["step"]` or `state.step`; so nothing
    random is part of the state.

    Args:
      update: a pure function (state, batch, key, frozen) -> (new state, anything). The new state
        has the shapes and dtypes of the old one; the rest is replicated.
      mesh: the devices, from `make_mesh`.
      seed: at most 63 bits.
      frozen: a tree that no step changes, such as the parameters of a teacher or of a reference
        model: sharded once, not donated.
      rules: sharding rules that take precedence over the built-in ones.
      max_shapes: the number of batch shapes that are allowed, each of which is a compilation; 0 =
        any.

    Returns:
      The step, called as `step(state, batch)` with a sharded state and a placed batch.

    Raises:
      UserError: at the first call: the state has no number of the step, or the new state is of
        another kind than the old one.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = () if frozen is None else (_placed(frozen, mesh, rules),)

    def step(state: Any, batch: Any, *frozen: Any) -> Any:
        new_state, results = update(state, batch, step_key(state, seed), *(frozen or (None,)))
        _check_new_state(state, new_state)
        return new_state, results

    def transform(step: Callable, state: Any) -> Any:
        of_state = shardings(state, mesh, rules)
        return jax.jit(
            _with_rules(update, step, mesh),
            in_shardings=(of_state, row_sharding(mesh), *shardings(arguments, mesh, rules)),
            out_shardings=(of_state, everywhere),
            donate_argnums=0,
        )

    return CompiledStep(step, transform, max_shapes, arguments)


def compile_evaluation(
    evaluate: Callable[[Any, Any], Any], mesh: Mesh, *, rules: Rules = (), max_shapes: int = 0
) -> CompiledStep:
    """Compiles `evaluate(params, batch)`, whose result is replicated; see `compile_step`."""

    def transform(step: Callable, params: Any) -> Any:
        return jax.jit(
            _with_rules(evaluate, step, mesh),
            in_shardings=(shardings(params, mesh, rules), row_sharding(mesh)),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )

    return CompiledStep(evaluate, transform, max_shapes)


def step_key(state: Any, seed: int) -> Array:
    """Returns `fold_in(key(seed), step)`, where `step` is `state["step"]` or `state.step`."""
    step = state.get("step") if isinstance(state, Mapping) else getattr(state, "step", None)
    if step is None:
        raise UserError(
            'the state needs the number of steps made, as state["step"] or state.step (an int32 '
            "scalar): the keys of random numbers follow from it"
        )
    return jax.random.fold_in(seed_key(seed), step)


def _placed(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """The tree on the devices; arrays that are there already are not copied."""
    wanted = jax.tree.leaves(shardings(tree, mesh, rules))
    given = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    return tree if given == wanted else place(tree, mesh, rules)


def _with_rules(given: Callable, step: Callable, mesh: Mesh) -> Callable:
    """Returns the step, traced under the name of the given function with the mesh and the rules."""

    def with_rules(*arguments: Any) -> Any:
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            nn.logical_axis_rules(ACTIVATION_RULES),
        ):
            return step(*arguments)

    given = getattr(given, "func", given)  # Of functools.partial.
    with_rules.__name__ = getattr(given, "__name__", "step")
    return with_rules


def _check_new_state(old: Any, new: Any) -> None:
    """Checks that a step returns a state that the next step can take."""
    there, here = dict(leaves_by_path(old)), dict(leaves_by_path(new))
    for path in [*there, *(here.keys() - there.keys())]:
        before, after = (
            f"{leaf.dtype} {list(leaf.shape)}" if leaf is not None else "missing"
            for leaf in (there.get(path), here.get(path))
        )
        if before != after:
            raise UserError(
                f"the step returns another kind of state than it takes: {path} was {before} and "
                f"is {after}"
            )


# jax.pmap: the same program on each device of one process.


def pmap_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Returns the mesh of `pmap_step`."""
    # As pmap's own mesh: it would retrace for arrays of another one.
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def pmap_step(
    update: Callable, mesh: Mesh, *, frozen: Any = None, max_shapes: int = 0
) -> CompiledStep:
    """Compiles a training step for each device by `jax.pmap`; arguments as of `compile_step`.

    `update` gets the rows of a device. What it returns is the same on all devices, since its
    sums over rows have passed through `sum_over_devices`.
    """

    def step(state: Any, batch: Any) -> Any:
        return update(state, batch, step_key(state, 0), frozen)

    return CompiledStep(step, functools.partial(_pmap, mesh, donate_argnums=0), max_shapes)


def pmap_evaluation(evaluate: Callable, mesh: Mesh, *, max_shapes: int = 0) -> CompiledStep:
    """Compiles `evaluate(params, rows)` by `jax.pmap`; arguments as of `pmap_step`."""
    return CompiledStep(evaluate, functools.partial(_pmap, mesh), max_shapes)


def _pmap(mesh: Mesh, step: Callable, state: Any, **options: Any) -> Any:
    # All devices compute the same update, so that the state has no device axis (None).
    return jax.pmap(
        step,
        axis_name="data",
        in_axes=(None, 0),
        out_axes=None,
        devices=list(mesh.devices),
        **options,
    )


def place_pmap_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Transfers each device's rows to it, as arrays [devices, B / devices, ...]."""
    return place_batch(
        jax.tree.map(lambda rows: rows.reshape(mesh.size, -1, *rows.shape[1:]), batch), mesh
    )


def sum_over_devices(tree: Tree) -> Tree:
    """Adds up arrays over the devices that see only their own rows: those of `jax.pmap`.

    On a mesh of `compile_step`, where a step sees all rows, the sums are complete.
    """
    axes = _own_axes()
    return lax.psum(tree, axes) if axes else tree


def device_key(key: Array) -> Array:
    """Returns a key that differs between the devices that see only their own rows."""
    for axis in _own_axes():
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def _own_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().manual_axes
