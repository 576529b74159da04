"""Converts weights between a PyTorch module and the parameters of a JAX function, by rules.

The rules are those of the weight maps (`interop/weight_maps/rules.py`), with paths in the tree of
parameters in place of ours:

    transposed("decoder/kernel", "decoder.weight")            one matrix
    same("layers/{layer}/norm/scale", "h.{layer}.norm.weight") each layer by itself
    transposed("layers/kernel", "h.{layer}.weight")            layers stacked along a leading axis
    tied("embedding", "wte.weight", "lm_head.weight")          one parameter, several names
    packed(["query", "key", "value"], "qkv.weight", transposed) one tensor, several parameters
"""

import collections
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from torch import nn

from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps.rules import AppliedRule, TensorRule, same, to_ours


def weight_rules(
    rules: Sequence[TensorRule] | None,
    shapes: Mapping[str, tuple[int, ...]],
    module: nn.Module,
    unused: Sequence[str] = (),
) -> tuple[AppliedRule, ...]:
    """Applies rules to the tensors of a module and the parameters of a function, given by shape.

    Arguments are those of `compare_models`. Tied parameters may be given once; rules may or may
    not name buffers. Raises UserError if a tensor has no rule or several, or if a rule fits no
    tensor or another shape.
    """
    parameters = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    buffers = {name: tuple(tensor.shape) for name, tensor in module.named_buffers()}
    tensors = parameters | buffers
    if rules is None:
        rules = [same(path, path.replace("/", ".")) for path in shapes]
    found = [each for rule in rules for each in _applied(rule, {*tensors, *shapes})]
    for _, _, ours, theirs in found:
        if not any(name in tensors for name in theirs):
            raise UserError(
                f"the rule of {', '.join(ours)} names {theirs[0]}, which the module does not have"
            )
    _once("parameter", shapes, (path for a in found if not a.layer for path in a.ours), ())
    named = [name for a in found for name in a.theirs]
    _once("tensor", parameters, named, unused)
    zeros = {name: np.broadcast_to(np.float32(0), shape) for name, shape in tensors.items()}
    for path, array in to_ours(found, zeros).items():
        if array.shape != shapes[path]:
            raise UserError(
                f"the rule of {path} gives {array.shape}, but the parameter is {shapes[path]}"
            )
    return tuple(found)


def _applied(rule: TensorRule, names: Set[str]) -> list[AppliedRule]:

    def at(texts: tuple[str, ...], layer: int) -> tuple[str, ...]:
        return tuple(text.format(layer=layer, number=layer + 1) for text in texts)

    if not any(re.search(r"\{(layer|number)\}", name) for name in rule.theirs):
        return [AppliedRule(rule, None, rule.ours, rule.theirs)]
    stacked = not any("{" in path for path in rule.ours)
    layered = rule.theirs if stacked else (*rule.theirs, *rule.ours)
    depth = 0
    while any(name in names for name in at(layered, depth)):
        depth += 1
    if not depth:
        raise UserError(f"the module has no tensor {rule.theirs[0].format(layer=0, number=1)}")
    return [
        AppliedRule(rule, i if stacked else None, at(rule.ours, i), at(rule.theirs, i))
        for i in range(depth)
    ]


def _once(
    what: str, existing: Mapping[str, Any], named: Iterable[str], unused: Sequence[str]
) -> None:
    counts = collections.Counter(named)
    for name, count in counts.items():
        if count > 1:
            raise UserError(f"{what} {name} is in {count} rules, but must be in one")
    for name in existing:
        if name not in counts and not any(fnmatch.fnmatchcase(name, p) for p in unused):
            also = ", nor in unused=" if what == "tensor" else ""
            raise UserError(f"{what} {name} is in no rule{also}")
    if what == "parameter" and (unknown := [path for path in counts if path not in existing]):
        raise UserError(f"the function has no parameter {unknown[0]}; it has {', '.join(existing)}")
