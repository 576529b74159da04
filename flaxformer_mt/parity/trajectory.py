"""Trains both sides from the same weights on the same batches, and compares every step.

Both sides train the reference's parameters: PyTorch with the published loss, schedule and
`torch.optim`, our model with ours. Training amplifies rounding, in float32 and at high learning
rates within a few steps. Where the curves diverge, PyTorch therefore trains a second time, from
weights that differ in the last bit: a divergence of the same size is not a bug.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.model_pair import (
    COMPILER_OPTIONS,
    Forward,
    ModelPair,
    OurModel,
    model_pair,
    precision,
    real_tokens,
    without_dropout,
)
from flaxformer_mt.parity.optimizer_probe import differences, updates_of_optax, updates_of_torch
from flaxformer_mt.parity.recipes import Recipe
from flaxformer_mt.parity.tokens import Tokens
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule

TOLERANCES = {"float64": 1e-8, "float32": 1e-3}
"""Relative tolerance of the loss of a step."""


class Curves(NamedTuple):
    """The training curves of one side, one value per step; float64 [N]."""

    rate: np.ndarray
    """Learning rate of the update."""
    loss: np.ndarray
    """Loss per target token, before the update."""
    gradient_norm: np.ndarray
    """Global norm of the gradients."""
    parameter_norm: np.ndarray
    """Global norm of the trained parameters, after the update."""


class Divergence(NamedTuple):
    """The first step out of tolerance."""

    step: int
    """From 1."""
    quantity: str
    """A field of `Curves`: the first in the order of that class that differs in the step."""
    difference: float
    """Relative difference."""
    explanation: str
    """The likely kind of cause."""


class Trajectory(NamedTuple):
    """Two training runs from the same weights."""

    ours: Curves
    theirs: Curves
    tolerance: float
    """Relative tolerance."""
    control: Curves | None = None
    """The reference's curves from weights that differ in the last bit, up to the first divergence;
    None if there is none, or if it precedes the second update."""
    optimizers: tuple[str, ...] = ()
    """How the optimizers differ, one sentence each, see `optimizer_probe.py`."""

    def differences(self) -> Curves:
        """Returns the relative differences by step."""
        return Curves(*map(_relative, self.ours, self.theirs))

    @property
    def first_divergence(self) -> Divergence | None:
        """The first step out of tolerance, if any."""
        differences = np.stack(self.differences())  # [4, N]
        bad = ~(differences <= self.tolerance)
        if not bad.any():
            return None
        step = int(bad.any(axis=0).argmax())
        quantity = int(bad[:, step].argmax())
        name, difference = Curves._fields[quantity], float(differences[quantity, step])
        explanation = _explain(name, step + 1, "; ".join(self.optimizers))
        if self.control is not None:
            by_itself = _relative(self.control[quantity], self.theirs[quantity][: step + 1])[step]
            explanation += f"; {_verdict(difference, float(by_itself))}"
        return Divergence(step + 1, name, difference, explanation)


def _relative(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    scale = np.maximum(np.abs(theirs), np.finfo(np.float64).tiny)
    return np.abs(ours - theirs) / scale


def _update(quantity: str, step: int) -> int:
    """Returns the update that causes a difference, from 1; 0 if it precedes all updates."""
    # A wrong update shows in the parameter norm, or only in the values of the next step.
    return step if quantity == "parameter_norm" else step - 1


def _explain(quantity: str, step: int, optimizers: str) -> str:
    if quantity == "rate":
        return "the schedules differ: compare their formulas, and whether steps count from 0 or 1"
    update = _update(quantity, step)
    if update == 0:
        return {
            "loss": "the losses differ before any update: check the forward pass and the loss",
            "gradient_norm": "the losses agree and the gradients do not: check what is trained",
        }[quantity]
    if update == 1:
        check = "check epsilon, weight decay and bias correction"
        return f"the first update differs: {optimizers or check}"
    check = (
        "check the decay rates of Adam's moments, its epsilon, clipping, and that both sides get "
        "the same batches"
    )
    return f"update {update} is the first to differ: {optimizers or check}"


def _verdict(difference: float, by_itself: float) -> str:
    run = f"PyTorch from weights that differ in the last bit differs by {by_itself:.1e} there"
    # The effect of rounding varies: two equally accurate runs differ by some factor.
    if by_itself > difference / 100:
        return f"but {run}: this training amplifies rounding, which may be the only difference"
    return f"{run}: it is not rounding"


def trajectory(
    family: str | interop.Family,
    module: nn.Module,
    batches: Sequence[Any],
    num_steps: int,
    *,
    forward: Forward | None = None,
    recipe: Recipe | None = None,
    tolerance: float | None = None,
    **overrides: Any,
) -> Trajectory:
    """Trains a reference and our model side by side.

    Args:
      family: the weight map of the module.
      module: the reference; it is trained without dropout, and then restored.
      batches: used in turn; each new shape is compiled.
      num_steps: N.
      forward: how to run the module, see `model_pair`.
      recipe: loss, schedule and optimizer of both sides; by default the family's.
      tolerance: relative tolerance; by default from `TOLERANCES`.
      **overrides: settings that tensors do not determine, see `interop.load`.

    Returns:
      The curves of both sides, by step; `first_divergence` is None if they agree.

    Raises:
      UserError: the tensors are not the family's, or a batch is invalid.
    """
    sides = model_pair(family, module, overrides, forward, recipe)
    return train_both(sides, batches, num_steps, tolerance)


def train_both(
    sides: ModelPair, batches: Sequence[Any], num_steps: int, tolerance: float | None = None
) -> Trajectory:
    """Trains both sides of a pair; the module is restored at the end."""
    if num_steps < 1 or not batches:
        raise UserError(
            f"num_steps={num_steps} of {len(batches)} batches: there must be one of each at least"
        )
    module = sides.module
    tokens = [real_tokens(sides, batch)[0] for batch in batches]
    with precision(sides.dtype), without_dropout(module):
        ours = train_ours(sides, tokens, num_steps)
        with restored(module):
            theirs = train_reference(sides, tokens, num_steps)
        found = Trajectory(ours, theirs, tolerance or TOLERANCES[sides.dtype])
        first = found.first_divergence
        if first is None or first.quantity == "rate" or not _update(first.quantity, first.step):
            return found
        found = found._replace(optimizers=_differing_optimizers(sides.ours))
        if _update(first.quantity, first.step) < 2:
            return found
        with restored(module):
            _change_the_last_bit(module)
            return found._replace(control=train_reference(sides, tokens, first.step))


def _differing_optimizers(ours: OurModel) -> tuple[str, ...]:
    """Returns how the optimizers of both sides differ at the same learning rate."""
    rate = ours.recipe.rate(1, ours.config.d_model)

    def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = ours.recipe.adam(parameters)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return optimizer

    with precision("float64"):
        optimizer = make_optimizer(ours.recipe.optimizer, optax.constant_schedule(rate))
        return tuple(differences(updates_of_optax(optimizer), updates_of_torch(optimizer_of)))


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restores the tensors and gradients of a module on exit."""
    # No deep copy: modules that keep a non-leaf tensor of their last call cannot be copied. No
    # load_state_dict: some publications override it.
    tensors = [*module.parameters(), *module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _change_the_last_bit(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))


def train_ours(sides: ModelPair, tokens: Sequence[Tokens], num_steps: int) -> Curves:
    """Trains our model from the weights of the pair."""
    optimizer, step = _program(sides.ours, num_steps)
    trained: Any = jax.tree.map(jnp.asarray, sides.trained())
    fixed = sides.fixed()
    state = optimizer.init(trained)
    rows = []
    for count in range(num_steps):
        batch = tokens[count % len(tokens)]
        trained, state, line = step(trained, state, fixed, np.int32(count), batch)
        rows.append(line)
    return curves(jax.device_get(rows))


@functools.lru_cache(maxsize=8)
def _program(ours: OurModel, num_steps: int) -> tuple[optax.GradientTransformation, Any]:
    """Returns the optimizer and the compiled training step."""
    schedule = make_schedule(ours.recipe.optimizer, ours.config.d_model, num_steps)
    optimizer = make_optimizer(ours.recipe.optimizer, schedule)

    def step(trained, state, fixed, count, tokens):
        def loss_of(trained):
            return ours.loss(ours.logits(trained | fixed, tokens), tokens)

        loss, gradients = jax.value_and_grad(loss_of)(trained)
        updates, state = optimizer.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
        rows = schedule(count), loss, optax.tree.norm(gradients), optax.tree.norm(trained)
        return trained, state, rows

    return optimizer, jax.jit(step, donate_argnums=(0, 1), compiler_options=COMPILER_OPTIONS)


def train_reference(sides: ModelPair, tokens: Sequence[Tokens], num_steps: int) -> Curves:
    """Trains the reference in place."""
    parameters = [p for p in sides.module.parameters() if p.requires_grad]
    optimizer = sides.ours.recipe.adam(parameters)
    rows = []
    for count in range(num_steps):
        rate = sides.ours.recipe.rate(count + 1, sides.ours.config.d_model)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = tokens[count % len(tokens)]
        optimizer.zero_grad()
        loss = sides.loss(sides.logits(batch), batch)
        loss.backward()
        gradients = norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        rows.append((rate, loss.item(), gradients, norm(parameters)))
    return curves(rows)


def norm(tensors: Sequence[torch.Tensor]) -> float:
    """Returns the global norm of tensors."""
    with torch.no_grad():
        return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def curves(rows: Sequence[tuple[Any, ...]]) -> Curves:
    """Returns the curves of which `rows` has one step each."""
    return Curves(*(np.array(column, np.float64) for column in zip(*rows, strict=True)))
