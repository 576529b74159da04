"""How arrays are sharded over the device mesh.

Rules select arrays by the ends of their paths, in any tree: parameters, Adam's moments and moving
averages of them, of this project's state or another one. All else is replicated. Activations are
sharded by the logical names of their axes (`model/logical_axes.py`).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.data.stream.placement import ROW_AXES
from flaxformer_mt.errors import UserError, UserTypeError

AXES = (*ROW_AXES, "tensor")
"""The axes of every mesh: rows are sharded over data and fsdp, parameters over fsdp and tensor."""

ACTIVATION_RULES = (
    # By default, XLA leaves a matrix that is sharded over fsdp in place and sends the vectors of
    # all rows around. With sharded rows it sends the matrix, which is smaller.
    ("batch", ROW_AXES),
    ("lookup_batch", ("data",)),
    ("lookup_embed", ("fsdp",)),
    ("parts", ("tensor",)),
    # XLA cannot divide a kernel that is not its own.
    ("attention_heads", ("tensor",)),
)
"""Logical axes of activations and the mesh axes over which they are sharded; XLA chooses for
others."""

Axes: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
"""The mesh axis, or axes, over which each of an array's last dimensions is sharded, or None."""


def make_mesh(
    *,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    **axes: int,
) -> Mesh:
    """Arranges devices in a mesh with the axes data, fsdp, tensor, and your own.

        mesh = fmt.make_mesh(fsdp=2)  # Of 8 devices: 4 x 2 x 1.
        mesh = fmt.make_mesh(fsdp=2, experts=4)  # 1 x 2 x 1 x 4.

    The rows of a batch are sharded over data and fsdp; parameters and optimizer state over fsdp
    (gathered where they are used) and tensor (computed with in parts). Nothing is sharded over an
    axis of your own, unless rules say so: `rules` of `compile_step` for arrays of the state,
    `activations` for what the model computes. `devices` are by default all devices of all
    processes; those that the other axes leave are data.

    Raises:
      UserError: the axes do not divide the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"fsdp": fsdp, "tensor": tensor, **axes}
    given = " times ".join(f"{name}={size}" for name, size in sizes.items())
    if "data" in axes or min(sizes.values()) < 1 or len(devices) % math.prod(sizes.values()):
        rest = ", and the axis data is what they leave" if "data" in axes else ""
        raise UserError(f"{len(devices)} devices are not a multiple of {given}{rest}")
    # The devices of a process are neighbors.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(
        np.array(ordered).reshape(-1, *sizes.values()),
        ("data", *sizes),
        # jax.make_mesh makes them explicit, which embedding lookups do not support.
        axis_types=(AxisType.Auto,) * (1 + len(sizes)),
    )


class ShardingRule(NamedTuple):
    """How the arrays are sharded whose path matches a regular expression.

        rule = fmt.ShardingRule("experts/kernel$", ("experts", None, "tensor"))

    A plain pair does as well, and so does text for the axes: "experts,-,tensor".
    """

    pattern: str
    """Searched for in paths such as "params/encoder/layers/self_attention/query/kernel"."""
    axes: Axes
    """Of each of the last dimensions, the mesh axis, several of them, or None."""


Rules: TypeAlias = Sequence[ShardingRule | tuple[str, Axes | str]]


# A product over a sharded dimension needs a sum over devices, one over a replicated dimension does
# not. So the first matrix of a pair (queries, keys and values; hidden) is sharded along its outputs
# and the second along its inputs, and there is one sum for both (Shoeybi et al. 2019). What fsdp
# shards is gathered before it is used; any dimension will do.
BUILT_IN = (
    ShardingRule(r"_positions/embedding$", (None, "fsdp")),  # [max_length, D]
    ShardingRule(r"position_bias/embedding$", ()),  # [buckets, H]
    ShardingRule(r"embedding$", ("tensor", "fsdp")),  # [V, D]
    ShardingRule(r"(query|key|value)/kernel$", ("fsdp", "tensor")),  # [L, D, H*K]
    ShardingRule(r"(query|key|value)/bias$", ("tensor",)),  # [L, H*K]
    ShardingRule(r"attention/output/kernel$", ("tensor", "fsdp")),  # [L, H*U, D]
    ShardingRule(r"recurrence/(candidate|forget)/kernel$", ("fsdp", None)),  # [L, D, D]
    ShardingRule(r"feed_forward/(hidden|gate)/kernel$", ("fsdp", "tensor")),  # [L, D, F]
    ShardingRule(r"feed_forward/(hidden|gate)/bias$", ("tensor",)),  # [L, F]
    ShardingRule(r"feed_forward/output/kernel$", ("tensor", "fsdp")),  # [L, F, D]
    ShardingRule(r"(attention|feed_forward)/output/bias$", ()),  # [L, D]
    ShardingRule(r"(^|/)output/kernel$", ("fsdp", "tensor")),  # [D, V]
    ShardingRule(r"(^|/)output/bias$", ("tensor",)),  # [V]
)
"""The first rule that matches decides; other parameters (norms, biases [D]) are replicated."""


def as_rules(given: Rules, mesh_axes: Iterable[str]) -> tuple[ShardingRule, ...]:
    """Returns rules that may be pairs, such as those of `config.parallel.sharding_rules`.

    Raises:
      UserError: an invalid regular expression, an unknown axis, or an axis twice.
    """
    rules, known = [], tuple(mesh_axes)
    for rule in given:
        if isinstance(rule, str) or len(rule) != 2 or not isinstance(rule[0], str):
            raise UserTypeError(
                f"{rule!r} is not a sharding rule: give a list of pairs, each of a regular "
                "expression and the mesh axes of the last dimensions"
            )
        pattern, axes = rule
        context = f"the sharding rule {pattern!r} -> {axes!r}"
        if isinstance(axes, str):
            names = [name.strip() for name in axes.split(",")]
            axes = tuple(None if name == "-" else name for name in names)
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{context} is not a valid regular expression: {error}") from None
        used = [name for each in axes for name in _names(each)]
        for name in used:
            if name not in known:
                raise UserError(
                    f"{context} has the unknown mesh axis {name!r}: use {', '.join(known)}, or "
                    'None (in text "-")'
                )
            if used.count(name) > 1:
                raise UserError(
                    f"{context} shards two dimensions over {name}: each axis can shard only one"
                )
        rules.append(ShardingRule(pattern, tuple(axes)))
    return tuple(rules)


def _names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def shardings(tree: Any, mesh: Mesh | AbstractMesh, user_rules: Rules = ()) -> Any:
    """Returns a tree of `NamedSharding` for the arrays, or their shapes, of any tree.

    A dimension that its mesh axis does not divide is not sharded. Arrays with fewer dimensions than
    the parameter that a rule is for are replicated: these are Adafactor's row and column means.
    `user_rules` take precedence over the built-in ones.
    """
    rules = as_rules(user_rules, mesh.axis_names)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        axes, _ = _partition(path_name(path), leaf.shape, mesh.shape, rules)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def check_rules(
    tree: Any, axis_sizes: Mapping[str, int], user_rules: Rules = (), *others: Any
) -> list[str]:
    """Checks that rules fit the arrays of a tree: parameters, or a state, and of others if given.

    Returns a message for each array with a dimension that is not sharded because its mesh axis does
    not divide it.

    Raises:
      UserError: one of `user_rules` matches no array, or one with fewer dimensions. The means of an
        optimizer that are smaller than their parameter do not count.
    """
    rules = as_rules(user_rules, axis_sizes)
    trees = (tree, *others)
    shapes = {path: leaf.shape for each in trees for path, leaf in leaves_by_path(each)}
    for rule in rules:
        matching = [path for path in shapes if re.search(rule.pattern, path)]
        if not matching:
            raise UserError(
                f"the sharding rule {rule.pattern!r} matches no parameter; there are "
                f"{', '.join(list(shapes)[:3])}, ..."
            )
        short = [path for path in matching if len(shapes[path]) < len(rule.axes)]
        long = [f"/{path}".split("/", 2)[-1] for path in matching if path not in short]
        for path in short:
            if not any(path.endswith(f"/{of_parameter}") for of_parameter in long):
                raise UserError(
                    f"the sharding rule {rule.pattern!r} has axes for {len(rule.axes)} dimensions, "
                    f"but {path} has only {len(shapes[path])}"
                )
    messages = []
    for path, shape in shapes.items():
        _, uneven = _partition(path, shape, axis_sizes, rules)
        if uneven:
            messages.append(f"{path} {list(shape)}: cannot divide {' or '.join(uneven)}")
    return messages


def _partition(
    path: str,
    shape: tuple[int, ...],
    axis_sizes: Mapping[str, int],
    user_rules: tuple[ShardingRule, ...],
) -> tuple[Axes, list[str]]:
    """Returns the axes over which an array is sharded, and which others do not divide it."""
    matching = (rule for rule in (*user_rules, *BUILT_IN) if re.search(rule.pattern, path))
    rule = next(matching, ShardingRule("", ()))
    # Stacked layers have one dimension more.
    rank = len(rule.axes) + ("layers" in path.split("/") and rule in BUILT_IN)
    if len(shape) < rank:
        return (None,) * len(shape), []
    wanted = (None,) * (len(shape) - len(rule.axes)) + rule.axes
    axes, uneven = [], []
    for dim, axis in zip(shape, wanted, strict=True):
        names = _names(axis)
        size = math.prod(axis_sizes.get(name, 1) for name in names)
        axes.append(axis if size > 1 and dim % size == 0 else None)
        if dim % size:
            uneven.append(f"{dim} by {' and '.join(names)}={size}")
    return tuple(axes), uneven


def leaves_by_path(tree: Any) -> list[tuple[str, Any]]:
    """Returns every leaf of a tree with its path, "encoder/layers/feed_forward/hidden/kernel"."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def path_name(path: Any) -> str:
    """Formats the path that JAX gives a leaf as rules write it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
