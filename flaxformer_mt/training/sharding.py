"""How arrays are sharded over the device mesh.

Rules select parameters by their paths. Adam's moments of a parameter, and its moving average, have
paths that end with the parameter's, and are sharded like it; all else is replicated.
Activations are sharded by the logical names of their axes (`model/logical_axes.py`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.parameters import Params

AXES = ("data", "fsdp", "tensor")
"""The axes of the mesh: rows are sharded over data and fsdp, parameters over fsdp and tensor."""
ROW_AXES = ("data", "fsdp")

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
    ShardingRule(r"^output/kernel$", ("fsdp", "tensor")),  # [D, V]
    ShardingRule(r"^output/bias$", ("tensor",)),  # [V]
)
"""The first rule that matches decides; other parameters (norms, biases [D]) are replicated."""


def parse_rules(texts: Iterable[tuple[str, str]]) -> tuple[ShardingRule, ...]:
    """Parses `config.parallel.sharding_rules`.

    Args:
      texts: pairs of a regular expression and comma-separated mesh axes, "-" for none.

    Raises:
      UserError: an invalid regular expression, an unknown axis, or an axis twice.
    """
    return tuple(_parse(pattern, axes) for pattern, axes in texts)


def _parse(pattern: str, text: str) -> ShardingRule:
    context = f"parallel.sharding_rules: the rule {pattern!r} -> {text!r}"
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{context} is not a valid regular expression: {error}") from None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (*AXES, "-"):
            raise UserError(
                f"{context} has the unknown mesh axis {name!r}: use {', '.join(AXES)}, or - for "
                "none"
            )
        if name != "-" and names.count(name) > 1:
            raise UserError(
                f"{context} shards two dimensions over {name}: each axis can shard only one"
            )
    return ShardingRule(pattern, tuple(None if name == "-" else name for name in names))


class Sharding(NamedTuple):
    """How all parameters are sharded, and the exceptions to the rules."""

    specs: dict[str, PartitionSpec]
    """By parameter path."""
    not_divisible: list[str]
    """A message for each parameter with a dimension that is not sharded because its mesh axis does
    not divide it."""


def shard_params(
    params: Params, axis_sizes: Mapping[str, int], user_rules: tuple[ShardingRule, ...] = ()
) -> Sharding:
    """Applies the rules to parameters.

    Args:
      params: arrays, or anything with their shapes.
      axis_sizes: of the mesh.
      user_rules: take precedence over the built-in ones.

    Raises:
      UserError: one of `user_rules` matches no parameter, or one with fewer dimensions.
    """
    shapes = {path: leaf.shape for path, leaf in leaves_by_path(params)}
    for rule in user_rules:
        if not any(re.search(rule.pattern, path) for path in shapes):
            raise UserError(
                f"parallel.sharding_rules: {rule.pattern!r} matches no parameter; there are "
                f"{', '.join(list(shapes)[:3])}, ..."
            )
    specs, not_divisible = {}, []
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
            not_divisible.append(f"{path} {list(shape)}: cannot divide {' or '.join(uneven)}")
        specs[path] = PartitionSpec(
            *(
                axis if axis and size % axis_sizes[axis] == 0 else None
                for size, axis in zip(shape, axes, strict=True)
            )
        )
    return Sharding(specs, not_divisible)


def _axes_of(path: str, rank: int, rules: Iterable[ShardingRule]) -> Axes:
    """Returns the mesh axis for each dimension of a parameter."""
    matching = (rule for rule in rules if re.search(rule.pattern, path))
    rule = next(matching, ShardingRule("", ()))
    if len(rule.axes) > rank:
        raise UserError(
            f"parallel.sharding_rules: {rule.pattern!r} has axes for {len(rule.axes)} dimensions, "
            f"but {path} has only {rank}"
        )
    return (None,) * (rank - len(rule.axes)) + rule.axes


def partition_specs(specs: Mapping[str, PartitionSpec], tree: Any) -> Any:
    """Returns the partition spec of every array of a tree, such as a training state.

    An array whose path ends with that of a parameter has the parameter's spec. Others are
    replicated, as are Adafactor's row and column means, which have fewer dimensions or some of
    size 1.

    Args:
      specs: by parameter path.
      tree: arrays, or anything with their shapes.

    Returns:
      The same tree of `PartitionSpec`.
    """

    def spec_of(path: Any, leaf: Any) -> PartitionSpec:
        names = path_name(path).split("/")
        endings = ("/".join(names[start:]) for start in range(len(names)))
        spec = next((specs[ending] for ending in endings if ending in specs), PartitionSpec())
        fits = len(spec) <= len(leaf.shape) and not any(
            axis and size == 1 for axis, size in zip(spec, leaf.shape, strict=False)
        )
        return spec if fits else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def leaves_by_path(tree: Any) -> list[tuple[str, Any]]:
    """Returns every leaf of a tree with its path, "encoder/layers/feed_forward/hidden/kernel"."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def path_name(path: Any) -> str:
    """Formats the path that JAX gives a leaf as rules write it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
