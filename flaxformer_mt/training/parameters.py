"""Parameter trees: the role of each parameter, and which ones are trained.

A parameter is named by its path, such as "encoder/layers/self_attention/query/kernel". Tied tables
are one parameter: with `model.tie_embeddings=all`, freezing "target_embedding/embedding" freezes
the source embedding and the output projection as well.

The parameters of a stack of L layers are stacked: kernels are [L, D, F], biases and scales [L, D].
A rule by the number of dimensions, which many optimizers have, therefore takes a stacked bias for a
matrix, and a stacked kernel for none. Roles follow from paths instead:

    decayed = optax.adamw(1e-3, weight_decay=0.1, mask=fmt.role_mask("kernel", "output"))
    adafactor = fmt.per_layer(optax.adafactor(1e-2))
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.sharding import path_name

Params: TypeAlias = dict[str, Any]
"""Nested dicts of arrays, as `Transformer.init` returns them."""
Role: TypeAlias = Literal["kernel", "bias", "scale", "embedding", "output"]
ROLES: tuple[Role, ...] = ("kernel", "bias", "scale", "embedding", "output")
_STACK = "layers"


def split(params: Params, freeze: Sequence[str]) -> tuple[Params, Params]:
    """Partitions a parameter tree into trained and frozen parameters, with unchanged paths.

    Args:
      params: nested dicts of arrays, or of their shapes.
      freeze: regular expressions; a parameter is frozen if one matches anywhere in its path.

    Raises:
      UserError: an expression is invalid or matches nothing, or all parameters are frozen.
    """
    if not freeze:
        return params, {}
    leaves = flatten_dict(params, sep="/")
    frozen: set[str] = set()
    for expression in freeze:
        try:
            matching = {path for path in leaves if re.search(expression, path)}
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(
                f"train.freeze: {expression!r} is not a regular expression: {error}"
            ) from error
        if not matching:
            modules = ", ".join(sorted({path.split("/")[0] + "/" for path in leaves}))
            raise UserError(
                f"train.freeze: {expression!r} matches no parameter; paths begin with "
                f"{modules} (tied tables are one parameter)"
            )
        frozen |= matching
    trained = leaves.keys() - frozen
    if not trained:
        raise UserError(
            f"train.freeze={list(freeze)} freezes all parameters: at least one must be trained"
        )
    return (
        unflatten_dict({path: leaves[path] for path in trained}, sep="/"),
        unflatten_dict({path: leaves[path] for path in frozen}, sep="/"),
    )


def merge(trained: Params, frozen: Params) -> Params:
    """The inverse of `split`."""
    if not frozen:
        return trained
    return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen))


def describe(params: Params, freeze: Sequence[str], config: TransformerConfig) -> str:
    """Describes what is trained: "3,072 of 9,216 parameters; frozen: encoder"."""
    trained, frozen = split(params, freeze)
    total = f"{_count(params):,} parameters"
    if not frozen:
        return total
    parts = [
        module + (" (in part)" if module in trained else "") + _other_uses(module, config)
        for module in sorted(frozen)
    ]
    return f"{_count(trained):,} of {total}; frozen: {', '.join(parts)}"


def _other_uses(module: str, config: TransformerConfig) -> str:
    """The other uses of a frozen embedding table: "", " (also the output projection)"."""
    if module != "target_embedding":
        return ""
    uses = [
        use
        for use, is_shared in (
            ("the source embedding", config.shares_source_and_target),
            ("the output projection", config.shares_target_and_output),
        )
        if is_shared
    ]
    return f" (also {' and '.join(uses)})" if uses else ""


def _count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def role_of(path: Any) -> str:
    """Returns the role of a parameter.

    - kernel: a matrix of a linear map inside a layer;
    - bias: of a linear map, of a norm, or of the logits;
    - scale: of a norm;
    - embedding: a table of token vectors, of learned positions, or of relative positions. A table
      that is also the output projection is an embedding;
    - output: the matrix of an untied output projection.

    A parameter that a class of your own adds has its name as its role.

    Args:
      path: as `jax.tree_util.tree_map_with_path` gives it, or "encoder/layers/.../kernel". Only its
        end matters, so that a path in an optimizer's state has a role, too.
    """
    names = _names(path)
    is_output = names[-2:] == ["output", "kernel"] and _STACK not in names
    return "output" if is_output else names[-1]


def is_matrix(path: Any, leaf: Any) -> bool:
    """Returns whether a parameter is a matrix of a layer, stacked [L, D, F] or not [D, F].

    Embeddings and the output projection are none: optimizers for matrices, such as Muon, leave them
    to Adam.

        labels = jax.tree_util.tree_map_with_path(fmt.is_matrix, params)
    """
    return role_of(path) == "kernel" and len(leaf.shape) - (_STACK in _names(path)) == 2


def role_mask(*roles: Role) -> Callable[[Any], Any]:
    """Returns a function from a tree to a tree of bools: whether a leaf has one of the roles.

    It is what `optax.masked` and the `mask` of `optax.adamw` take.

    Raises:
      UserError: there is no such role.
    """
    for role in roles:
        if role not in ROLES:
            raise UserError(f"there is no role {role!r}: use {', '.join(ROLES)}")

    def mask(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: role_of(path) in roles, tree)

    return mask


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies an optimizer to each layer of stacked parameters by itself.

        optimizer = fmt.per_layer(optax.adafactor(1e-2))

    Inside a stack of layers, `optimizer` sees leaves without the axis L, and its state gets that
    axis. Other leaves it sees as they are. Means, norms and clipping are then of one layer or of
    one leaf, as in frameworks whose layers have parameters of their own. `optax.adafactor` and
    other optimizers that compute something of a whole leaf need this; Adam does not.

    Clipping by the norm of all parameters must stay outside:
    `optax.chain(optax.clip_by_global_norm(1.0), fmt.per_layer(...))`.
    """

    def over_layers(function: Callable) -> Callable:
        def wrapped(tree: Any, *rest: Any, **extra: Any) -> Any:
            # All layers may be frozen.
            if not jax.tree.leaves(tree):
                return function(tree, *rest, **extra)
            return jax.vmap(lambda *each: function(*each, **extra))(tree, *rest)

        return wrapped

    inner = optax.with_extra_args_support(optimizer)
    layers = optax.GradientTransformationExtraArgs(
        over_layers(inner.init), over_layers(inner.update)
    )

    def partitioned(tree: Any) -> optax.GradientTransformationExtraArgs:
        labels = jax.tree_util.tree_map_with_path(lambda path, _: _stack_of(path), tree)
        # The stacks may differ in their number of layers.
        stacks = set(jax.tree.leaves(labels)) - {""}
        return optax.partition({"": inner, **dict.fromkeys(sorted(stacks), layers)}, labels)

    def init(params: Any) -> Any:
        return partitioned(params).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return partitioned(updates).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _names(path: Any) -> list[str]:
    return (path if isinstance(path, str) else path_name(path)).split("/")


def _stack_of(path: Any) -> str:
    """Returns "encoder/layers" for a parameter of its layers, "" for one of no stack."""
    names = _names(path)
    return "/".join(names[: names.index(_STACK) + 1]) if _STACK in names else ""
