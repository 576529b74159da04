"""Which dimension of which array is cut along which axis of the device mesh.

Rules speak of parameters by their paths. What the optimizer keeps for a parameter, and its moving
average, have paths that end with the parameter's, and are cut as it is; all else is whole on every
device.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.parameters import Params

AXES = ("data", "fsdp", "tensor")
"""The mesh: rows are shared out along data and fsdp, parameters are cut along fsdp and tensor."""
ROW_AXES = ("data", "fsdp")

Axes: TypeAlias = tuple[str | None, ...]
"""For each of an array's last dimensions the mesh axis that cuts it, or None."""


class Rule(NamedTuple):
    """How the parameters are cut whose path a regular expression finds."""

    pattern: str
    axes: Axes


# A product over a dimension that is cut needs a sum over devices, one over whole dimensions needs
# none. So the first matrix of a pair (queries, keys and values; hidden) is cut along its outputs
# and the second along its inputs, and there is one sum for both (Shoeybi et al. 2019). What fsdp
# cuts is put together before it is used; any dimension will do.
BUILT_IN = (
    Rule(r"_positions/embedding$", (None, "fsdp")),  # [max_length, D]
    Rule(r"embedding$", ("tensor", "fsdp")),  # [V, D]
    Rule(r"(query|key|value)/kernel$", ("fsdp", "tensor")),  # [L, D, H*K]
    Rule(r"(query|key|value)/bias$", ("tensor",)),  # [L, H*K]
    Rule(r"attention/output/kernel$", ("tensor", "fsdp")),  # [L, H*U, D]
    Rule(r"recurrence/(candidate|forget)/kernel$", ("fsdp", None)),  # [L, D, D]
    Rule(r"feed_forward/hidden/kernel$", ("fsdp", "tensor")),  # [L, D, F]
    Rule(r"feed_forward/hidden/bias$", ("tensor",)),  # [L, F]
    Rule(r"feed_forward/output/kernel$", ("tensor", "fsdp")),  # [L, F, D]
    Rule(r"^output/kernel$", ("fsdp", "tensor")),  # [D, V]
    Rule(r"^output/bias$", ("tensor",)),  # [V]
)
"""The first rule that fits decides; parameters that none fits (norms, biases [D]) stay whole."""


def parse_rules(texts: Iterable[tuple[str, str]]) -> tuple[Rule, ...]:
    """Reads `config.parallel.sharding_rules`.

    Args:
      texts: pairs of a regular expression and mesh axes parted by commas, "-" for none.

    Raises:
      UserError: no regular expression, no such axis, or an axis twice.
    """
    return tuple(_parse(pattern, axes) for pattern, axes in texts)


def _parse(pattern: str, text: str) -> Rule:
    where = f"parallel.sharding_rules: the rule {pattern!r} -> {text!r}"
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{where} has no regular expression for parameter paths: {error}") from None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (*AXES, "-"):
            raise UserError(
                f"{where} names the mesh axis {name!r}: write {', '.join(AXES)}, or - for none"
            )
        if name != "-" and names.count(name) > 1:
            raise UserError(f"{where} cuts two dimensions along {name}: an axis can cut one only")
    return Rule(pattern, tuple(None if name == "-" else name for name in names))


class Sharding(NamedTuple):
    """How every parameter is cut, and what could not be cut as a rule says."""

    specs: dict[str, PartitionSpec]
    """By parameter path."""
    left_whole: list[str]
    """One sentence for each parameter with a dimension that its axis does not divide."""


def shard_params(
    params: Params, axis_sizes: Mapping[str, int], user_rules: tuple[Rule, ...] = ()
) -> Sharding:
    """Applies the rules to parameters.

    Args:
      params: arrays, or anything with their shapes.
      axis_sizes: of the mesh.
      user_rules: tried before the built-in ones.

    Raises:
      UserError: one of `user_rules` fits no parameter, or one that has fewer dimensions.
    """
    shapes = {path: leaf.shape for path, leaf in leaves_by_path(params)}
    for rule in user_rules:
        if not any(re.search(rule.pattern, path) for path in shapes):
            raise UserError(
                f"parallel.sharding_rules: {rule.pattern!r} fits no parameter; there are "
                f"{', '.join(list(shapes)[:3])}, ..."
            )
    specs, left_whole = {}, []
    for path, shape in shapes.items():
        axes = [
            axis if axis and axis_sizes.get(axis, 1) > 1 else None
            for axis in _axes_of(path, len(shape), (*user_rules, *BUILT_IN))
        ]
        uneven = [
            f"{size} by {axis}={axis_sizes[axis]}"
            for size, axis in zip(shape, axes, strict=True)
            if axis and size % axis_sizes[axis]
        ]
        if uneven:
            left_whole.append(f"{path} {list(shape)}: cannot divide {' or '.join(uneven)}")
        specs[path] = PartitionSpec(
            *(
                axis if axis and size % axis_sizes[axis] == 0 else None
                for size, axis in zip(shape, axes, strict=True)
            )
        )
    return Sharding(specs, left_whole)


def _axes_of(path: str, rank: int, rules: Iterable[Rule]) -> Axes:
    """For each dimension of a parameter the axis that shall cut it."""
    rule = next((rule for rule in rules if re.search(rule.pattern, path)), Rule("", ()))
    if len(rule.axes) > rank:
        raise UserError(
            f"parallel.sharding_rules: {rule.pattern!r} has axes for {len(rule.axes)} dimensions, "
            f"but {path} has only {rank}"
        )
    return (None,) * (rank - len(rule.axes)) + rule.axes


def spread(specs: Mapping[str, PartitionSpec], tree: Any) -> Any:
    """The cut of every array of a tree, such as a state: that of the parameter it belongs to.

    Args:
      specs: by parameter path.
      tree: arrays, or anything with their ranks.

    Returns:
      The same tree of `PartitionSpec`.
    """

    def of(path: Any, leaf: Any) -> PartitionSpec:
        names = path_name(path).split("/")
        endings = ("/".join(names[start:]) for start in range(len(names)))
        spec = next((specs[ending] for ending in endings if ending in specs), PartitionSpec())
        return spec if len(spec) <= len(leaf.shape) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(of, tree)


def leaves_by_path(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf of a tree with its path, "encoder/layers/feed_forward/hidden/kernel"."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def path_name(path: Any) -> str:
    """The path that JAX gives a leaf, as rules write it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
