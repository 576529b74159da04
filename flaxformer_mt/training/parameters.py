"""Parameter trees, and their partition into trained and frozen parameters.

A parameter is named by its path, such as "encoder/layers/self_attention/query/kernel". Tied tables
are one parameter: with `model.tie_embeddings=all`, freezing "target_embedding/embedding" freezes
the source embedding and the output projection as well.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError

Params: TypeAlias = dict[str, Any]
"""Nested dicts of arrays, as `Transformer.init` returns them."""


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
