"""Steps on the devices of a mesh, or of one process by `jax.pmap`.

`compile_step` compiles one program for all devices of a mesh, in which XLA inserts the
communication: the rows of a batch, and the arrays of the state, are sharded by the rules of
`sharding.py`. With `jax.pmap` each device runs the program on its rows and holds the whole state,
and the step adds up its sums by `sum_over_devices`. Under both the state is an ordinary pytree of
arrays without a device axis, so that checkpoints do not depend on the choice.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import ParallelConfig
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.data.stream.placement import place_batch, row_sharding, row_shards
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.memory_limits import device_memory
from flaxformer_mt.runs.states import compare_step, owned
from flaxformer_mt.training.sharding import (
    ACTIVATION_RULES,
    Rules,
    as_rules,
    check_rules,
    leaves_by_path,
    make_mesh,
    shardings,
)

Tree = TypeVar("Tree")
State = TypeVar("State")
Output = TypeVar("Output")
Result = TypeVar("Result")
Activations: TypeAlias = Sequence[tuple[str, str | tuple[str, ...]]]
"""From names of axes that the model gives activations ("length") to axes of the mesh."""


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

    Raises:
      UserError: a rule has an axis that the mesh does not have, or matches no array.
    """
    shapes = jax.eval_shape(make_state, seed_key(seed))
    wanted = jax.tree.map(lambda leaf: leaf.sharding, abstract(shapes, mesh, rules))
    return jax.jit(make_state, out_shardings=wanted)(seed_key(seed))


def abstract(state: Callable[[Array], Tree] | Tree, mesh: Mesh, rules: Rules = ()) -> Tree:
    """Returns the shapes, dtypes and shardings of a state, to restore it without creating it.

        if checkpoints.latest_step() is not None:
            like = fmt.abstract(create, mesh)
            state, position = checkpoints.restore_or(like, data.start)

    Args:
      state: the function that `create` would call, a tree of arrays, or a tree of shapes.
      mesh: the devices.
      rules: as of `create`.
    """
    tree: Any = jax.eval_shape(state, seed_key(0)) if callable(state) else state
    check_rules(tree, mesh.shape, rules)
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
    check_rules(tree, mesh.shape, rules)
    return _copied(tree, mesh, rules)


def _copied(tree: Tree, mesh: Mesh, rules: Rules) -> Tree:
    def copy(leaf: Any, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(leaf)
        # A copy, because a step donates its argument, which would delete the caller's array.
        return jax.make_array_from_callback(
            whole.shape, sharding, lambda index: np.array(whole[index])
        )

    wanted = shardings(tree, mesh, rules)
    return owned(jax.tree.map(copy, tree, wanted))


class CompiledStep(Generic[State, Result]):
    """A step that is compiled when it is first called, and then for each new shape of its batch.

    `step` maps (state, batch) to anything, and `transform` (step, state) to the jitted step, for
    states like this one, concrete or abstract. `max_shapes` is the number of batch shapes that are
    allowed (0 = any), and `frozen` are further arguments, the same in every call. `donates` tells
    whether the step writes over the state. `before_first` is called before the first step.
    """

    def __init__(
        self,
        step: Callable,
        transform: Callable[[Callable, Any], Any],
        max_shapes: int = 0,
        frozen: tuple[Any, ...] = (),
        donates: bool = False,
        before_first: Callable[[], object] = lambda: None,
    ) -> None:
        self.batch_shapes: list[str] = []
        """The shapes for which the step was compiled, in their order."""
        self.on_compile: Callable[[bool], None] = lambda begins: None
        """Called with True when a compilation begins, and with False when its step is running."""
        self._step = step
        self._transform = transform
        self._max_shapes = max_shapes
        self._frozen = frozen
        self._donates = donates
        self._before_first: Callable[[], object] | None = before_first
        self._known: set[Any] = set()
        """The structures of the states whose buffers were compared."""
        self._is_compiling = False
        self._jitted: Any = None
        self._running: Any = None

    def __call__(self, state: State, batch: Any) -> Result:
        """Starts the step, and waits for the step before it.

        So the devices always have work, and at most two steps are in flight: many would need the
        memory of as many batches, and on simulated devices their collectives may never end.
        """
        if self._before_first:
            self._before_first()
            self._before_first = None
        if self._donates:
            self._require_own_buffers(state, batch)
        result = self._for(state)(state, batch, *self._frozen)
        jax.block_until_ready(self._running)
        # The next step deletes the state, and the rest of the result is there as late.
        self._running = result[1] if self._donates else result
        if self._is_compiling:
            self._is_compiling = False
            self.on_compile(False)
        return result

    def _require_own_buffers(self, state: Any, batch: Any) -> None:
        """Refuses an array that the step writes over and that has two names: XLA would crash.

        Buffers are compared at the first call for each structure: that may wait for the arrays, and
        what a step returns has buffers of its own. The same array twice is cheap to notice.
        """
        leaves, structure = jax.tree.flatten(state)
        if structure in self._known and len({*map(id, leaves)}) == len(leaves):
            return
        others = {"batch": batch, "frozen": self._frozen[0] if self._frozen else None}
        donated = leaves_by_path(state)
        names: dict[tuple[Any, int], str] = {}
        for number, (name, array) in enumerate([*donated, *leaves_by_path(others)]):
            for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
                # Several arrays of JAX may hold the same buffer. All empty ones may be nowhere.
                address = _pointer(shard.data) if shard.data.nbytes else id(array)
                buffer = shard.device, address
                if names.get(buffer, name) != name:
                    raise UserError(
                        f"{names[buffer]} and {name} are the same array in memory, which the step "
                        "writes over: give one of them a copy (jnp.copy)"
                    )
                if number < len(donated):
                    names[buffer] = name
        self._known.add(structure)

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers the step for abstract arguments: shapes, dtypes and shardings."""
        return self._for(state).lower(state, batch, *self._frozen)

    def trace(self, state: Any, batch: Any) -> Any:
        """Traces the step, unless by pmap, for abstract arguments, to lower it for any platform."""
        return self._for(state).trace(state, batch, *self._frozen)

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


def _pointer(data: Any) -> int:
    if jax.dtypes.issubdtype(data.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(data)
    return data.unsafe_buffer_pointer()


def compile_step(
    update: Callable[[State, Any, Array, Any], tuple[State, Output]],
    mesh: Mesh,
    *,
    seed: int = 0,
    frozen: Any = None,
    rules: Rules = (),
    activations: Activations = (),
    max_shapes: int = 0,
) -> CompiledStep[State, tuple[State, Output]]:
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
      activations: how what the model computes is sharded, by the names of axes of
        `model/logical_axes.py`: ("length", "sequence") shards positions over an axis of your own.
      max_shapes: the number of batch shapes that are allowed, each of which is a compilation; 0 =
        any.

    Returns:
      The step, called as `step(state, batch)` with a sharded state and a placed batch.

    Raises:
      UserError: at the first call: the state has no number of the step, the new state is of another
        kind than the old one, a rule matches no array of state and `frozen`, or an array of the
        state is in memory that has a second name, in the state, in the batch or in `frozen`; or a
        restored checkpoint was begun with another optimizer than the one that `update` uses.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = () if frozen is None else (_placed(frozen, mesh, rules),)

    def step(state: Any, batch: Any, *frozen: Any) -> Any:
        new_state, results = update(state, batch, step_key(state, seed), *(frozen or (None,)))
        _check_new_state(state, new_state)
        return new_state, results

    def transform(step: Callable, state: Any) -> Any:
        check_rules(state, mesh.shape, rules, *arguments)
        of_state, *of_arguments = shardings((state, *arguments), mesh, rules)
        options = {"out_shardings": (of_state, everywhere), "donate_argnums": 0}
        in_shardings = (of_state, row_sharding(mesh), *of_arguments)
        return _jitted(update, step, mesh, in_shardings, activations, **options)

    # A checkpoint that was restored knows the optimizer with which it was begun.
    before_first = functools.partial(compare_step, update)
    return CompiledStep(step, transform, max_shapes, arguments, True, before_first)


def compile_eval(
    function: Callable[[State, Any], Result],
    mesh: Mesh,
    *,
    results: Literal["replicated", "rows", "rules"] = "replicated",
    rules: Rules = (),
    activations: Activations = (),
    max_shapes: int = 0,
) -> CompiledStep[State, Result]:
    """Compiles a function of parameters and a batch for the devices of a mesh.

        def evaluate(params, batch):
            return fmt.cross_entropy(config, params, batch)

        evaluate = fmt.compile_eval(evaluate, mesh)
        sums = evaluate(state["params"], batch)

    As `compile_step`, but nothing is donated, no step is counted, and there is no key.

    Args:
      function: a pure function (tree, batch) -> anything. The tree may be parameters, a tuple of
        several models, or a whole state.
      mesh: the devices, from `make_mesh`.
      results: how the results are sharded. "replicated": each device has them whole. "rows": arrays
        whose first axis can be shared out like the rows of a batch [B, ...] are, such as logits or
        embeddings of sentences; others are replicated. "rules": by the rules for parameters, such
        as gradients.
      rules: as of `compile_step`, like `activations` and `max_shapes`.
      activations: as above.
      max_shapes: as above.

    Returns:
      The function, called with a sharded tree and a placed batch.
    """
    if results not in ("replicated", "rows", "rules"):
        raise UserError(f'results={results!r}: choose "replicated", "rows" or "rules"')
    everywhere, of_rows = NamedSharding(mesh, PartitionSpec()), row_sharding(mesh)

    def sharding(leaf: Any) -> NamedSharding:
        is_of_rows = results == "rows" and leaf.ndim and len(leaf) % row_shards(mesh) == 0
        return of_rows if is_of_rows else everywhere

    def step(tree: Any, batch: Any) -> Any:
        found = jax.tree.map(jnp.asarray, function(tree, batch))
        by_rules = results == "rules"
        wanted = shardings(found, mesh, rules) if by_rules else jax.tree.map(sharding, found)
        return lax.with_sharding_constraint(found, wanted)

    def transform(step: Callable, tree: Any) -> Any:
        check_rules(tree, mesh.shape, rules)
        in_shardings = (shardings(tree, mesh, rules), row_sharding(mesh))
        options = {"out_shardings": everywhere} if results == "replicated" else {}
        return _jitted(function, step, mesh, in_shardings, activations, **options)

    return CompiledStep(step, transform, max_shapes)


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
    wanted = jax.tree.leaves(shardings(tree, mesh, rules))
    given = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    return tree if given == wanted else _copied(tree, mesh, rules)


def _jitted(
    given: Callable,
    step: Callable,
    mesh: Mesh,
    in_shardings: Any,
    activations: Activations,
    **options: Any,
) -> Any:
    """Jits a step, traced under the name of the given function with the mesh and the rules."""
    as_rules([(name, (axes,)) for name, axes in activations], mesh.axis_names)
    rules = {**dict(ACTIVATION_RULES), **dict(activations)}

    def with_rules(*arguments: Any) -> Any:
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            nn.logical_axis_rules(tuple(rules.items())),
        ):
            return step(*arguments)

    given = getattr(given, "func", given)  # Of functools.partial.
    with_rules.__name__ = getattr(given, "__name__", "step")
    return jax.jit(with_rules, in_shardings=in_shardings, **options)


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


RULES_OPTION = "parallel.sharding_rules: "


@dataclasses.dataclass(frozen=True)
class RunDevices:
    """The mesh and the rules of a run, and what its strategy places and compiles.

    Under pmap, a step gets the rows of a device. What it returns is the same on all devices, since
    its sums over rows have passed through `sum_over_devices`.
    """

    mesh: Mesh
    rules: Rules = ()
    activations: Activations = ()
    by_pmap: bool = False

    @classmethod
    def arrange(cls, config: ParallelConfig, given: Sequence[jax.Device]) -> "RunDevices":
        """Arranges devices, which need not exist: programs can be compiled for others."""
        if config.strategy == "pmap":
            # As pmap's own mesh: it would retrace for arrays of another one.
            return cls(Mesh(np.array(given), ("data",), axis_types=(AxisType.Auto,)), by_pmap=True)
        mesh = make_mesh(fsdp=config.fsdp, tensor=config.tensor, devices=given, **config.own_axes)
        with prefixed(RULES_OPTION):
            rules = as_rules(config.sharding_rules, mesh.axis_names)
        with prefixed("parallel.activations: "):
            as_rules([(name, (axis,)) for name, axis in config.activations], mesh.axis_names)
        return cls(mesh, rules, config.activations)

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of all processes; those of a process are neighbors."""
        return list(self.mesh.devices.flat)

    @property
    def facts(self) -> dict[str, Any]:
        """Describes the devices, of all processes and of one kind, and their memory."""
        return {
            "devices": len(self.devices),
            "device_kind": self.devices[0].device_kind,
            "device_memory_bytes": device_memory(self.devices),
            "processes": jax.process_count(),
            "jax": jax.__version__,
        }

    def _shape(self, rows: Any) -> tuple[int, ...]:
        """Returns [B, ...], or [devices, B / devices, ...] under pmap."""
        batch, *others = rows.shape
        devices = (self.mesh.size,) if self.by_pmap else ()
        return (*devices, batch // math.prod(devices), *others)

    def place_batch(self, batch: Batch) -> Batch:
        """Transfers each device's rows of a process' shard to it."""
        if self.by_pmap:
            batch = jax.tree.map(lambda rows: rows.reshape(self._shape(rows)), batch)
        return place_batch(batch, self.mesh)

    def abstract_batch(self, batch: Batch) -> Batch:
        """Returns the shapes, dtypes and shardings of a placed batch, from those of a whole one."""
        sharding = row_sharding(self.mesh)
        return jax.tree.map(
            lambda rows: jax.ShapeDtypeStruct(self._shape(rows), rows.dtype, sharding=sharding),
            batch,
        )

    def compile_train_step(
        self, update: Callable, *, seed: int, frozen: Any = None, max_shapes: int = 1
    ) -> CompiledStep:
        """Compiles update(state, batch, key, frozen) -> (state, metrics); donates the state."""
        if not self.by_pmap:
            return compile_step(
                update,
                self.mesh,
                seed=seed,
                frozen=frozen,
                rules=self.rules,
                activations=self.activations,
                max_shapes=max_shapes,
            )

        def step(state: Any, batch: Any) -> Any:
            return update(state, batch, step_key(state, seed), frozen)

        return CompiledStep(
            step, functools.partial(self._pmap, donate_argnums=0), max_shapes, donates=True
        )

    def compile_eval_step(self, evaluate: Callable, max_shapes: int = 1) -> CompiledStep:
        """Compiles evaluate(params, batch) -> metrics."""
        if self.by_pmap:
            return CompiledStep(evaluate, self._pmap, max_shapes)
        return compile_eval(
            evaluate,
            self.mesh,
            rules=self.rules,
            activations=self.activations,
            max_shapes=max_shapes,
        )

    def _pmap(self, step: Callable, state: Any, **options: Any) -> Any:
        # All devices compute the same update, so that the state has no device axis (None).
        return jax.pmap(
            step,
            axis_name="data",
            in_axes=(None, 0),
            out_axes=None,
            devices=self.devices,
            **options,
        )


def make_devices(config: ParallelConfig) -> RunDevices:
    """Arranges the first `num_devices` devices, or all; errors as of `make_mesh`."""
    available = jax.devices()
    with prefixed("parallel.num_devices: "):
        return RunDevices.arrange(config, available[: config.num_devices or len(available)])


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
