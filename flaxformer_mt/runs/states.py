"""What a training state consists of, and what tells it and its optimizer from others.

A state is divided into the items of a checkpoint, and its position into JSON values. Adam and
AdaBelief have states of the same shapes, so a checkpoint also records the types of the state's
containers. Adam and Adamax have the same types, too: only the functions of the optimizer tell them
apart, and the constants that these were made with. All of this is compared by name.
"""

import dataclasses
import functools
import hashlib
import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import max_content
from flaxformer_mt.run_layout import EMA, PARAMS, TRAINING

Tree = TypeVar("Tree")
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by path."""
_WHOLE = "state"  # The name of a state that is neither a dict nor a dataclass.
_MOST_NAMED = 5
OPTIMIZER = "optimizer"
"""What the names of an optimizer's functions and constants begin with."""
_OPTIMIZER_FIELDS = ("init", "update")
_PLAIN = (bool, int, float, str, type(None))


def divided(state: Any) -> dict[str, Any]:
    """Divides a state into the items of a checkpoint: parameters, moving average, and the rest."""
    members = _members(state)
    if members is None:
        return {TRAINING: {_WHOLE: state}}
    items = {
        name: members.pop(name)
        for name in (PARAMS, EMA)
        if name in members and (name == PARAMS or members[name] is not None)
    }
    members.pop(EMA, None)
    return {**items, TRAINING: members} if members else items


def joined(template: Any, items: Mapping[str, Any]) -> Any:
    """Returns a state like the template, of the items that it was divided into."""
    training = items.get(TRAINING) or {}
    members = _members(template)
    if members is None:
        return training[_WHOLE]
    found = {name: items[name] for name in (PARAMS, EMA) if items.get(name) is not None} | training
    if not isinstance(template, Mapping):
        return dataclasses.replace(template, **found)
    # Also of a frozen or an ordered dict. A moving average may be None.
    structure = jax.tree.structure(template, is_leaf=lambda node: node is not template)
    return jax.tree.unflatten(structure, map(found.get, members))


def _members(state: Any) -> dict[str, Any] | None:
    if isinstance(state, Mapping):
        # Not its own items: a frozen dict wraps them when they are read.
        items, _ = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda node: node is not state
        )
        return {str(path[0].key): value for path, value in items}
    if dataclasses.is_dataclass(state):
        return {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.metadata.get("pytree_node", True)  # Flax marks what is not an array so.
        }
    return None


def as_arrays(state: Any) -> Any:
    """Returns a state whose numbers are arrays."""
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), state
    )


def like(template: Any) -> Any:
    """Returns the shapes, dtypes and shardings of a state."""

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        is_number = not hasattr(leaf, "shape")
        leaf = np.asarray(leaf) if is_number else leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_number)

    return jax.tree.map(abstract, template)


def changed_dtypes(stored: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Compares the items of a checkpoint with those that are wanted.

    Returns:
      The arrays that have another dtype, which can be converted, in words.

    Raises:
      UserError: an array is missing, has another shape, or has integers in place of real numbers.
    """
    there = {name: item.tree for name, item in stored.items() if item is not None}
    theirs, ours = (
        {
            path if item == TRAINING else f"{item}/{path}": leaf
            for item, tree in items.items()
            for path, leaf in named(tree)
        }
        for items in (there, wanted)
    )
    hard = differences(
        {path: _kind(leaf) for path, leaf in theirs.items()},
        {path: _kind(leaf) for path, leaf in ours.items()},
    )
    if hard:
        raise UserError(
            f"another kind of state: {listed(hard)}: restore into the state that was "
            "saved, or give another folder"
        )
    # A Python number has no dtype of its own.
    exact = [path for path, leaf in ours.items() if not leaf.weak_type]
    return differences(
        {path: str(theirs[path].dtype) for path in exact},
        {path: str(ours[path].dtype) for path in exact},
    )


def _kind(leaf: Any) -> str:
    numbers = " of integers" if jnp.issubdtype(leaf.dtype, jnp.integer) else ""
    return f"an array {list(leaf.shape)}{numbers}"


def shapes(tree: Any) -> Shapes:
    """Returns the shapes of a tree of arrays, or of what describes them."""
    return {name: tuple(leaf.shape) for name, leaf in named(tree)}


def named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree with their paths, "layers/kernel"."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield _name(path), leaf


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_size(folder: Path, shapes: Shapes) -> None:
    """Checks that the files of an item may hold arrays of these shapes."""
    there = sum(file.stat().st_size for file in folder.rglob("*"))
    if 4 * sum(map(math.prod, shapes.values())) > max_content(there):
        raise UserError("damaged: its arrays are far larger than its files")


def check_chunks(path: Path, stored: Any) -> None:
    """Checks that no array is read in chunks that are larger than itself."""
    for name, leaf in named(stored):
        chunk = leaf.storage.chunk_shape if leaf.storage else leaf.shape
        if any(ours > max(size, 1) for ours, size in zip(chunk, leaf.shape, strict=True)):
            raise UserError(
                f"{path}: damaged: {name} is an array {list(leaf.shape)} in chunks {list(chunk)}"
            )


def to_json(position: Any) -> Any:
    """Returns JSON values of a position, which `from_json` inverts."""
    if hasattr(position, "to_json"):
        return position.to_json()
    if hasattr(position, "_asdict"):
        return position._asdict()
    if dataclasses.is_dataclass(position) and not isinstance(position, type):
        return dataclasses.asdict(position)
    return position


def from_json(values: Any, like: Any) -> Any:
    """Returns a position of the type of another one; TypeError or the like if it is none."""
    if hasattr(like, "from_json"):
        return type(like).from_json(values)
    if hasattr(like, "_asdict") or dataclasses.is_dataclass(like):
        return type(like)(**values)
    return values


def owned(tree: Tree) -> Tree:
    """Returns arrays in buffers that JAX has allocated, which a step can use again if it may.

    An array that was made from memory of NumPy may share it, and a step then copies the array that
    it is given. The tree is donated, leaf by leaf: buffers of JAX are returned as they are, and at
    most one array has two at a time.
    """

    def own(leaf: Any) -> Any:
        return _own(leaf.sharding)(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(own, tree)


@functools.lru_cache(256)
def _own(sharding: jax.sharding.Sharding) -> Any:
    # Not the identity: of that, JAX returns the argument itself.
    return jax.jit(jnp.copy, out_shardings=sharding, donate_argnums=0)


def of_state(state: Any) -> dict[str, str]:
    """Returns the types of the named tuples, dataclasses and other nodes of a state, by path.

    The names are those of the classes alone, because libraries move classes between modules.
    """
    return dict(_types(state, ()))


def _types(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
    if any(child is node for _, child in children):
        return  # It is a leaf.
    # The keys of dicts, and the places in sequences, are parts of the paths of the leaves.
    if not isinstance(node, Mapping) and type(node) not in (list, tuple, type(None)):
        yield _name(path) or "the state", type(node).__qualname__
    for key, child in children:
        yield from _types(child, (*path, *key))


def of_optimizer(update: Any) -> dict[str, Any]:
    """Returns the functions that an optimizer is made of, and their constants, by name.

    optax keeps both in closures: {"optimizer/0/scale_by_adam.b1": 0.9, ...}. The code of functions
    is not part, and neither are global variables that they use.
    """
    found: dict[str, Any] = {}
    _describe(update, OPTIMIZER, found, frozenset())
    return found


def of_step(update: Any) -> dict[str, Any]:
    """Returns `of_optimizer` of the optimizers that a step's function uses, by their variables.

    They are variables of the enclosing functions, or global ones. Empty if there are none.
    """
    found = {}
    codes = [update.__code__] if inspect.isfunction(update) else []
    names = set()
    for code in codes:
        names |= {*code.co_names, *code.co_freevars}
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    if codes:
        cells = zip(codes[0].co_freevars, update.__closure__ or (), strict=True)
        variables = update.__globals__ | {name: cell.cell_contents for name, cell in cells}
        for name in sorted(names & variables.keys()):
            if getattr(variables[name], "_fields", None) == _OPTIMIZER_FIELDS:
                found[name] = variables[name].update
    result: dict[str, Any] = {}
    for name, each in found.items():
        _describe(
            each, OPTIMIZER if len(found) == 1 else f"{OPTIMIZER}/{name}", result, frozenset()
        )
    return result


def name_of(function: Callable[..., Any], argument: str, built_in: Collection[str] = ()) -> str:
    """Returns the name under which a run records a function: "dpo", or "dpo(beta=0.1)".

    The options are those of `functools.partial`, and the defaults of other arguments.

    Args:
      function: given by the user.
      argument: as which it was given, for messages.
      built_in: names that it must not have.

    Raises:
      UserError: it has no name, or one of `built_in`.
    """
    inner: Any = function
    options: dict[int | str, Any] = {}
    while isinstance(inner, functools.partial):
        options = dict(enumerate(inner.args)) | inner.keywords | options
        inner = inner.func
    name = getattr(inner, "__name__", "")
    if not name.isidentifier():
        raise UserError(
            f"{argument}={function!r} has no name for the run to record: define it with def, and "
            "give its options with functools.partial"
        )
    if name in built_in:
        raise UserError(
            f"{argument}={name} has the name of a built-in one: choose that in the configuration, "
            "or define a function with another name that calls yours"
        )
    defaults: dict[int | str, Any] = {
        each.name: each.default
        for each in inspect.signature(inner).parameters.values()
        if each.default is not each.empty
    }
    values: dict[str, Any] = {}
    for option, value in {**defaults, **options}.items():
        _describe(value, str(option), values, frozenset())
    listed = ", ".join(f"{option}={value!r}" for option, value in sorted(values.items()))
    return f"{name}({listed})" if listed else name


open_checkpoints: weakref.WeakSet[Any] = weakref.WeakSet()
"""The `Checkpoints` of this process that are not closed."""


def compare_step(update: Any) -> None:
    """Compares the optimizer of a step that begins with that of the one open `Checkpoints`.

    Raises:
      UserError: a checkpoint was restored that was begun with another optimizer.
    """
    if len(open_checkpoints) == 1:
        next(iter(open_checkpoints)).compare_optimizer(of_step(update))


def _describe(value: Any, name: str, found: dict[str, Any], outer: frozenset[int]) -> None:
    if id(value) in outer:
        return
    outer |= {id(value)}
    members: Mapping[Any, Any] = {}
    if isinstance(value, functools.partial):
        _describe(value.func, name, found, outer)
        members = {**dict(enumerate(value.args)), **value.keywords}
    elif inspect.ismethod(value):
        _describe(value.__func__, name, found, outer)
        members = {type(value.__self__).__qualname__: value.__self__}
    elif inspect.isfunction(value):
        factory, *inner = value.__qualname__.replace("<locals>.", "").split(".")
        found[f"{name}/{factory}"] = ".".join(inner)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        contents = {variable: cell.cell_contents for variable, cell in cells}
        constants = {key: each for key, each in contents.items() if isinstance(each, _PLAIN)}
        found |= {f"{name}/{factory}.{key}": each for key, each in constants.items()}
        members = {key: each for key, each in contents.items() if key not in constants}
        if len(members) == 1:  # Its name would only make those of its parts longer.
            (only,) = members.values()
            _describe(only, name, found, outer)
            members = {}
    elif getattr(value, "_fields", None) == _OPTIMIZER_FIELDS:
        _describe(value.update, name, found, outer)
    elif isinstance(value, Mapping):
        members = value
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        members = dict(enumerate(value))
    elif isinstance(value, _PLAIN):
        found[name] = value
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        found[name] = array.tolist() if array.size == 1 else f"{array.shape} {digest}"
    elif isinstance(value, type) or inspect.isbuiltin(value):
        found[name] = value.__qualname__
    else:
        found[name] = type(value).__qualname__
        if dataclasses.is_dataclass(value) or type(value).__module__.startswith("optax"):
            members = vars(value)
    for key, member in members.items():
        _describe(member, f"{name}/{key}", found, outer)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Returns in words which names have other values: "seed: 0 there, 1 here".

    The constants of a function are left out if only one side has the function.
    """
    names = dict.fromkeys([*there, *here])
    changed = {
        name: (there.get(name, "nothing"), here.get(name, "nothing"))
        for name in names
        if there.get(name, "nothing") != here.get(name, "nothing")
    }
    return [
        f"{name}: {_short(theirs)} there, {_short(ours)} here"
        for name, (theirs, ours) in changed.items()
        if name.rpartition(".")[0] not in changed
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:16]}..."


def listed(changes: Sequence[str]) -> str:
    """Returns the first of some differences, and how many others there are."""
    others = len(changes) - _MOST_NAMED
    return "; ".join(changes[:_MOST_NAMED]) + (f"; and {others} more" if others > 0 else "")
