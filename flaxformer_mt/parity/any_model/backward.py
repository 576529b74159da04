"""Locates the first difference of the gradients, backwards from the loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from flaxformer_mt.parity.any_model.program import TracedFunction
from flaxformer_mt.parity.diagnosis.inputs import Select
from flaxformer_mt.parity.rows import GRADIENTS, difference, largest
from flaxformer_mt.parity.sides import Pair
from flaxformer_mt.parity.trace import Tap, Values, recording, shaped


def first_difference(
    pair: Pair,
    batch: Any,
    taps: Mapping[str, Tap | str],
    values: Values,
    select: Select,
) -> list[str]:
    """Returns a sentence on the last site, by computation, whose gradient differs; or nothing."""
    traced, leaves = pair.traced(batch)
    theirs = _gradients_of_module(pair, batch, taps, values)
    scale = max((largest(select(*each)) for each in theirs.items()), default=0.0)
    ours = _gradients_of_function(pair, batch, traced, leaves)
    for site, number in reversed(traced.sites.items()):
        if site not in theirs:
            continue
        found, expected = (select(site, side[site]) for side in (ours, theirs))
        if difference(found, expected) > GRADIENTS[pair.dtype] * scale:
            readers = _readers(traced, number, list(theirs))
            return [
                f"Backwards from the loss, the gradients agree down to {readers}, and differ at "
                f"{site}: what computes the one from the other is detached, or has another "
                "derivative."
            ]
    return []


def _readers(traced: TracedFunction, number: int, compared: Sequence[str]) -> str:
    numbers = {n: site for site, n in traced.sites.items() if site in compared}
    found, reached = [], {number}
    for equation in traced.equations:
        if reached.intersection(equation.inputs):
            names = [numbers[n] for n in equation.outputs if n in numbers and n != number]
            found += names
            if not names:
                reached.update(equation.outputs)
    if reached.intersection(traced.outputs):
        found.append("the output")
    return ", ".join(found)


def _gradients_of_function(
    pair: Pair, batch: Any, traced: TracedFunction, leaves: Sequence[Any]
) -> Values:
    def loss_of(added):
        values = traced.run(leaves, added)
        return pair.ours.loss([values[number] for number in traced.outputs], batch)

    types = {site: traced.types[number] for site, number in traced.sites.items()}
    floating = [site for site, like in types.items() if jnp.issubdtype(like.dtype, jnp.floating)]
    zeros = {
        traced.sites[site]: jnp.zeros(types[site].shape, types[site].dtype) for site in floating
    }
    found = jax.device_get(jax.jit(jax.grad(loss_of))(zeros))
    return {site: found[traced.sites[site]] for site in floating}


def _gradients_of_module(
    pair: Pair, batch: Any, taps: Mapping[str, Tap | str], values: Values
) -> Values:
    """Sites inside of modules, whose taps name an operation, are left out."""
    wanted = {site: Tap(tap) if isinstance(tap, str) else tap for site, tap in taps.items()}
    keys = {
        site: (pair.module.get_submodule(tap.module), "", tap.side)
        for site, tap in wanted.items()
        if not tap.op
    }
    with recording(pair.module, set(keys.values()), copy=False) as seen:
        total = pair.loss(pair.outputs(batch), batch)
    chosen = {site: _chosen(seen[key], wanted[site]) for site, key in keys.items()}
    tensors = {site: tensor for site, tensor in chosen.items() if tensor is not None}
    if not tensors:
        return {}
    found = torch.autograd.grad(total, list(tensors.values()), materialize_grads=True)
    return {
        site: shaped(site, wanted[site].reshape, gradient.numpy(), values[site].shape)
        for site, gradient in zip(tensors, found, strict=True)
    }


def _chosen(calls: Sequence[Sequence[Any]], tap: Tap) -> torch.Tensor | None:
    if not -len(calls) <= tap.call < len(calls) or tap.argument >= len(calls[tap.call]):
        return None
    found = calls[tap.call][tap.argument]
    return found if isinstance(found, torch.Tensor) and found.requires_grad else None
