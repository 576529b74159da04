"""Locates the first difference of the gradients, backwards from the loss."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from flaxformer_mt.parity.any_model.program import Program
from flaxformer_mt.parity.rows import GRADIENTS, difference, largest
from flaxformer_mt.parity.trace import Tap, shaped

Gradients = dict[str, np.ndarray]
"""Gradients of the loss with respect to the values of sites."""


def first_difference(program: Program, ours: Gradients, theirs: Gradients, dtype: str) -> list[str]:
    """Returns a sentence on the last site, in the order of computation, whose gradient differs.

    The gradients of all sites after it agree, so the difference is in what reads it. Nothing is
    returned if the gradients of all sites agree.
    """
    scale = max(map(largest, theirs.values()), default=0.0)
    for site in reversed(program.sites):
        if site.name not in theirs:
            continue
        if difference(ours[site.name], theirs[site.name]) > GRADIENTS[dtype] * scale:
            readers = _readers(program, site.number, list(theirs))
            return [
                f"Backwards from the loss, the gradients agree down to {readers}, and differ at "
                f"{site.name}: what computes the one from the other is detached, or has another "
                "derivative."
            ]
    return []


def _readers(program: Program, number: int, compared: Sequence[str]) -> str:
    """Returns the names of the next compared sites that are computed from a value."""
    numbers = {site.number: site.name for site in program.sites if site.name in compared}
    found, reached = [], {number}
    for equation in program.equations:
        if reached.intersection(equation.inputs):
            names = [numbers[n] for n in equation.outputs if n in numbers and n != number]
            found += names
            if not names:
                reached.update(equation.outputs)
    if reached.intersection(program.outputs):
        found.append("the output")
    return ", ".join(found)


def gradients_of_function(
    program: Program, leaves: Sequence[Any], loss: Callable[..., Any]
) -> Gradients:
    """Returns the gradients of the loss with respect to all floating sites."""
    floating = {
        site.name: site.number
        for site in program.sites
        if jnp.issubdtype(program.types[site.number].dtype, jnp.floating)
    }

    def loss_of(added):
        values = program.run(leaves, added)
        return loss(*(values[number] for number in program.outputs))

    zeros = {
        number: jnp.zeros(program.types[number].shape, program.types[number].dtype)
        for number in floating.values()
    }
    found = jax.device_get(jax.jit(jax.grad(loss_of))(zeros))
    return {name: found[number] for name, number in floating.items()}


def gradients_of_module(
    module: nn.Module,
    taps: Mapping[str, Tap | str],
    loss: Callable[[], torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> Gradients:
    """Returns the gradients of the loss with respect to inputs and outputs of sub-modules.

    Sites inside of modules, whose taps name an operation, are left out.
    """
    wanted = {site: Tap(tap) if isinstance(tap, str) else tap for site, tap in taps.items()}
    wanted = {site: tap for site, tap in wanted.items() if not tap.op}
    with _tensors(module, wanted) as seen:
        total = loss()
    tensors = {
        site: tensor
        for site, tap in wanted.items()
        if isinstance(tensor := _chosen(seen[tap.module, tap.side], tap), torch.Tensor)
        and tensor.requires_grad
    }
    if not tensors:
        return {}
    found = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
    return {
        site: shaped(
            site,
            wanted[site].reshape,
            np.zeros(tuple(tensor.shape)) if gradient is None else gradient.numpy(),
            shapes[site],
        )
        for (site, tensor), gradient in zip(tensors.items(), found, strict=True)
    }


def _chosen(calls: Sequence[Sequence[Any]], tap: Tap) -> Any:
    if not -len(calls) <= tap.call < len(calls) or tap.argument >= len(calls[tap.call]):
        return None
    return calls[tap.call][tap.argument]


@contextlib.contextmanager
def _tensors(
    module: nn.Module, taps: Mapping[str, Tap]
) -> Iterator[dict[tuple[str, str], list[Sequence[Any]]]]:
    """Keeps the inputs and outputs of tapped modules."""
    seen: dict[tuple[str, str], list[Sequence[Any]]] = {}
    handles = []
    for name in {tap.module for tap in taps.values()}:
        inputs = seen.setdefault((name, "input"), [])
        outputs = seen.setdefault((name, "output"), [])

        def keep(part, args, kwargs, output, inputs=inputs, outputs=outputs):
            inputs.append((*args, *kwargs.values()))
            outputs.append(output if isinstance(output, tuple) else (output,))

        part = module.get_submodule(name)
        handles.append(part.register_forward_hook(keep, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
