"""Trees of parameters: which of them are trained, and which stay as they are.

A parameter goes by its path, such as "encoder/layers/self_attention/query/kernel". Tables that a
model ties are one parameter: with `model.tie_embeddings=all`, freezing
"target_embedding/embedding" freezes the source embedding and the output projection, too.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError

Params: TypeAlias = dict[str, Any]
"""Nested dicts of arrays, as `Transformer.init` returns them."""


def split(params: Params, freeze: Sequence[str]) -> tuple[Params, Params]:
    """Divides a tree of parameters.

    Args:
      params: nested dicts of arrays, or of their shapes.
      freeze: regular expressions; a parameter is frozen if one is found anywhere in its path.

    Returns:
      What is trained and what is frozen: two trees in which every leaf has the path that it had.

    Raises:
      UserError: an expression is not valid or matches nothing, or nothing is left to train.
    """
    if not freeze:
        return params, {}
    leaves = flatten_dict(params, sep="/")
    frozen = _frozen_paths(leaves, freeze)
    trained = leaves.keys() - frozen
    if not trained:
        raise UserError(
            f"train.freeze={list(freeze)} freezes all parameters: leave some to be trained"
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
    """How much is trained: "9,216 parameters", "3,072 of 9,216 parameters; frozen: encoder".

    Args:
      params: as in `split`, like the next; what is raised, too.
      freeze: what is not trained.
      config: of the model; tells which table is also another.
    """
    trained, frozen = split(params, freeze)
    total = f"{_count(params):,} parameters"
    if not frozen:
        return total
    parts = [
        module + (" (in part)" if module in trained else "") + _other_uses(module, config)
        for module in sorted(frozen)
    ]
    return f"{_count(trained):,} of {total}; frozen: {', '.join(parts)}"


def _frozen_paths(paths: Iterable[str], freeze: Sequence[str]) -> set[str]:
    frozen: set[str] = set()
    for expression in freeze:
        try:
            matching = {path for path in paths if re.search(expression, path)}
        except re.error as error:
            raise UserError(
                f"train.freeze: {expression!r} is no regular expression: {error}"
            ) from error
        if not matching:
            modules = ", ".join(sorted({path.split("/")[0] + "/" for path in paths}))
            raise UserError(
                f"train.freeze: {expression!r} matches no parameter; their paths begin with "
                f"{modules} (tied tables are one parameter)"
            )
        frozen |= matching
    return frozen


def _other_uses(module: str, config: TransformerConfig) -> str:
    """What else a frozen embedding table is: "", " (also the output projection)"."""
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
    """Numbers in all arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
