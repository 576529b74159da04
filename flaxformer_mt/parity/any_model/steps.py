"""Trains a PyTorch module and a JAX function from the same weights on the same batch."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn

from flaxformer_mt.parity.model_pair import precision
from flaxformer_mt.parity.optimizer_probe import differences, updates_of_optax, updates_of_torch
from flaxformer_mt.parity.trajectory import TOLERANCES, Curves, Trajectory, curves, norm, restored


def train_both(
    module: nn.Module,
    module_loss: Callable[[], torch.Tensor],
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    trained: Mapping[str, Any],
    function_loss: Callable[[Any], Any],
    optimizer: optax.GradientTransformation,
    num_steps: int,
    dtype: str,
) -> Trajectory:
    """Returns the training curves of both sides; the module is restored at the end.

    Args:
      module: the reference.
      module_loss: its loss.
      optimizer_of: makes its optimizer from its parameters.
      trained: its trained tensors by name.
      function_loss: the loss of the function, given these tensors.
      optimizer: the optimizer of the function.
      num_steps: the number of updates.
      dtype: of both sides; determines the tolerance.
    """
    with restored(module):
        theirs = _train_module(module, module_loss, optimizer_of, num_steps)
    ours = _train_function(trained, function_loss, optimizer, num_steps)
    found = Trajectory(ours, theirs, TOLERANCES[dtype])
    if found.first_divergence is None:
        return found
    # An optimizer of a certain tree of parameters cannot be given others.
    with precision("float64"), contextlib.suppress(ValueError, TypeError, LookupError):
        both = updates_of_optax(optimizer), updates_of_torch(optimizer_of)
        found = found._replace(optimizers=tuple(differences(*both)))
    return found


def _train_module(
    module: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    num_steps: int,
) -> Curves:
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizer_of(parameters)
    rows = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        gradients = norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        rows.append((0.0, loss.item(), gradients, norm(parameters)))
    return curves(rows)


def _train_function(
    trained: Mapping[str, Any],
    loss_of: Callable[[Any], Any],
    optimizer: optax.GradientTransformation,
    num_steps: int,
) -> Curves:
    @jax.jit
    def step(tensors: Any, state: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(tensors)
        updates, state = optimizer.update(gradients, state, tensors)
        tensors = optax.apply_updates(tensors, updates)
        return tensors, state, (0.0, loss, optax.tree.norm(gradients), optax.tree.norm(tensors))

    tensors = jax.tree.map(jnp.asarray, dict(trained))
    state = optimizer.init(tensors)
    rows = []
    for _ in range(num_steps):
        tensors, state, row = step(tensors, state)
        rows.append(row)
    return curves(jax.device_get(rows))
