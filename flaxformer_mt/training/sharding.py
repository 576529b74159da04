"""How arrays are sharded over the device mesh.

Rules select arrays by the ends of their paths, in any tree: parameters, Adam's moments and moving
averages of them, of this project's state or another one. All else is replicated. Activations are
sharded by the logical names of their axes (`model/logical_axes.py`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.data.stream.placement import ROW_AXES
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.parameters import Params

AXES = (*ROW_AXES, "tensor")
"""The axes of the mesh: rows are sharded over data and fsdp, parameters over fsdp and tensor."""

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

Axes: TypeAlias = tuple[str | None, ...]
"""The mesh axis over which each of an array's last dimensions is sharded, or None."""


def make_mesh(
    *, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arranges devices in a mesh with the axes data, fsdp and tensor.

        mesh = fmt.make_mesh(fsdp=2)  # Of 8 devices: 4 x 2 x 1.

    The rows of a batch are sharded over data and fsdp; parameters and optimizer state over fsdp
    (gathered where they are used) and tensor (computed with in parts). `devices` are by default
    all devices of all processes; those that fsdp * tensor leave are data.

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


class ShardingRule(NamedTuple):
    """How the parameters are sharded whose path matches a regular expression."""

    pattern: str
    axes: Axes


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


def parse_rules(texts: Iterable[tuple[str, str]]) -> tuple[ShardingRule, ...]:
    """Parses `config.parallel.sharding_rules`: regular expressions and comma-separated mesh axes.

    Raises:
      UserError: an invalid regular expression, an unknown axis, or an axis twice.
    """
    rules = []
    for pattern, text in texts:
        context = f"parallel.sharding_rules: the rule {pattern!r} -> {text!r}"
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{context} is not a valid regular expression: {error}") from None
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in (*AXES, "-"):
                raise UserError(
                    f"{context} has the unknown mesh axis {name!r}: use {', '.join(AXES)}, or - "
                    "for none"
                )
            if name != "-" and names.count(name) > 1:
                raise UserError(
                    f"{context} shards two dimensions over {name}: each axis can shard only one"
                )
        rules.append(ShardingRule(pattern, tuple(None if name == "-" else name for name in names)))
    return tuple(rules)


def shardings(
    tree: Any, mesh: Mesh | AbstractMesh, user_rules: tuple[ShardingRule, ...] = ()
) -> Any:
    """Returns a tree of `NamedSharding` for the arrays, or their shapes, of any tree.

    A dimension that its mesh axis does not divide is not sharded. Arrays with fewer dimensions than
    the parameter that a rule is for are replicated: these are Adafactor's row and column means.
    `user_rules` take precedence over the built-in ones.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        axes, _ = _partition(path_name(path), leaf.shape, mesh.shape, user_rules)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def check_rules(
    params: Params, axis_sizes: Mapping[str, int], user_rules: tuple[ShardingRule, ...] = ()
) -> list[str]:
    """Checks that rules fit the parameters of a model.

    Returns a message for each parameter with a dimension that is not sharded because its mesh axis
    does not divide it.

    Raises:
      UserError: one of `user_rules` matches no parameter, or one with fewer dimensions.
    """
    shapes = {path: leaf.shape for path, leaf in leaves_by_path(params)}
    for rule in user_rules:
        matching = [path for path in shapes if re.search(rule.pattern, path)]
        if not matching:
            raise UserError(
                f"parallel.sharding_rules: {rule.pattern!r} matches no parameter; there are "
                f"{', '.join(list(shapes)[:3])}, ..."
            )
        for path in matching:
            if len(rule.axes) > len(shapes[path]):
                raise UserError(
                    f"parallel.sharding_rules: {rule.pattern!r} has axes for {len(rule.axes)} "
                    f"dimensions, but {path} has only {len(shapes[path])}"
                )
    messages = []
    for path, shape in shapes.items():
        _, uneven = _partition(path, shape, axis_sizes, user_rules)
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
        size = axis_sizes.get(axis, 1) if axis else 1
        axes.append(axis if size > 1 and dim % size == 0 else None)
        if dim % size:
            uneven.append(f"{dim} by {axis}={size}")
    return tuple(axes), uneven


def leaves_by_path(tree: Any) -> list[tuple[str, Any]]:
    """Returns every leaf of a tree with its path, "encoder/layers/feed_forward/hidden/kernel"."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def path_name(path: Any) -> str:
    """Formats the path that JAX gives a leaf as rules write it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
