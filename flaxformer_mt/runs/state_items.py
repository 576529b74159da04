"""How a state is divided into the items of a checkpoint, and a position into JSON values."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.errors import UserError
from flaxformer_mt.run_layout import EMA, PARAMS, TRAINING
from flaxformer_mt.runs import identity

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by path."""
_WHOLE = "state"  # The name of a state that is neither a dict nor a dataclass.


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
    hard = identity.differences(
        {path: _kind(leaf) for path, leaf in theirs.items()},
        {path: _kind(leaf) for path, leaf in ours.items()},
    )
    if hard:
        raise UserError(
            f"another kind of state: {identity.listed(hard)}: restore into the state that was "
            "saved, or give another folder"
        )
    # A Python number has no dtype of its own.
    exact = [path for path, leaf in ours.items() if not leaf.weak_type]
    return identity.differences(
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
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


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
