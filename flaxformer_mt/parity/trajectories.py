"""Trains both sides from the same weights on the same batches, and compares every step.

Training amplifies rounding, in float32 and at high learning rates within a few steps. Where the
curves diverge, PyTorch therefore trains a second time, from weights that differ in the last bit: a
divergence of the same size is not a bug.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity import optimizer_probe, sides
from flaxformer_mt.parity.families.model_pair import Forward, model_pair, real_tokens
from flaxformer_mt.parity.families.recipes import Recipe
from flaxformer_mt.parity.optimizer_probe import TorchOptimizer
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule

TOLERANCES = {"float64": 1e-8, "float32": 1e-3}


class Curves(NamedTuple):
    """The training curves of one side, one value per step; float64 [N]."""

    rate: np.ndarray
    loss: np.ndarray
    """Loss per target token, before the update."""
    gradient_norm: np.ndarray
    parameter_norm: np.ndarray
    """Global norm of the trained parameters, after the update."""


class Divergence(NamedTuple):
    """The first step out of tolerance."""

    step: int
    """From 1."""
    quantity: str
    """A field of `Curves`: the first in the order of that class that differs in the step."""
    difference: float
    explanation: str


class Trajectory(NamedTuple):
    """Two training runs from the same weights."""

    ours: Curves
    theirs: Curves
    tolerance: float
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
    """Trains a reference and our model side by side, without dropout; restores the module.

    The N = `num_steps` steps use `batches` in turn; each new shape is compiled. `tolerance` is
    relative, by default from `TOLERANCES`; the other arguments are those of `compare`.
    """
    pair = model_pair(family, module, overrides, forward, recipe)
    tokens = [real_tokens(pair, batch)[0] for batch in batches]
    optimizers = of_recipe(pair.ours.recipe, pair.ours.config.d_model, num_steps)
    return train_both(pair, tokens, num_steps, optimizers, tolerance)


class Optimizers(NamedTuple):
    """The optimizers of both sides."""

    ours: optax.GradientTransformation
    reference: TorchOptimizer
    schedule: Callable[[Any], Any] = lambda count: 0.0
    """Our learning rate of the update after `count`; 0.0 if the optimizer does not tell."""
    rate: Callable[[int], float] | None = None
    """The reference's learning rate of the updates 1, 2 ...; None if its optimizer has it."""


def of_recipe(recipe: Recipe, d_model: int, num_steps: int) -> Optimizers:
    """Returns the optimizers of a recipe."""
    optimizer, schedule = _of_config(recipe.optimizer, d_model, num_steps)
    return Optimizers(optimizer, recipe.adam, schedule, lambda t: recipe.rate(t, d_model))


@functools.lru_cache
def _of_config(config: OptimizerConfig, d_model: int, num_steps: int) -> Any:
    schedule = make_schedule(config, d_model, num_steps)
    return make_optimizer(config, schedule), schedule


def train_both(
    pair: sides.Pair,
    batches: Sequence[Any],
    num_steps: int,
    optimizers: Optimizers,
    tolerance: float | None = None,
) -> Trajectory:
    """Trains both sides of a pair, on batches that are used in turn; restores the module."""
    if num_steps < 1 or not batches:
        raise UserError(
            f"num_steps={num_steps} of {len(batches)} batches: there must be one of each at least"
        )
    with sides.precision(pair.dtype), sides.without_dropout(pair.module):
        ours = train_ours(pair, batches, num_steps, optimizers)
        with sides.restored(pair.module):
            theirs = train_reference(pair, batches, num_steps, optimizers)
        found = Trajectory(ours, theirs, tolerance or TOLERANCES[pair.dtype])
        first = found.first_divergence
        if first is None or first.quantity == "rate" or not _update(first.quantity, first.step):
            return found
        found = found._replace(optimizers=_differences(optimizers))
        if _update(first.quantity, first.step) < 2:
            return found
        with sides.restored(pair.module):
            _change_the_last_bit(pair.module)
            control = train_reference(pair, batches, first.step, optimizers)
            return found._replace(control=control)


def _differences(optimizers: Optimizers) -> tuple[str, ...]:
    try:
        with sides.precision("float64"):
            theirs = optimizer_probe.updates_of_torch(optimizers.reference, optimizers.rate)
            ours = optimizer_probe.updates_of_optax(optimizers.ours)
            return tuple(optimizer_probe.differences(ours, theirs))
    except (ValueError, TypeError, LookupError):
        return ()  # An optimizer of a certain tree of parameters cannot be given others.


def _change_the_last_bit(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))


def train_ours(
    pair: sides.Pair, batches: Sequence[Any], num_steps: int, optimizers: Optimizers
) -> Curves:
    """Trains our side from the weights of the pair."""
    step = _program(pair.ours, optimizers.ours, optimizers.schedule)
    trained: Any = jax.tree.map(jnp.asarray, pair.trained())
    fixed = pair.fixed()
    state = optimizers.ours.init(trained)
    rows = []
    for count in range(num_steps):
        batch = batches[count % len(batches)]
        trained, state, row = step(trained, state, fixed, np.int32(count), batch)
        rows.append(row)
    return _curves(jax.device_get(rows))


@functools.lru_cache(maxsize=8)
def _program(
    ours: sides.Ours, optimizer: optax.GradientTransformation, schedule: Callable[[Any], Any]
) -> Any:
    def step(trained, state, fixed, count, batch):
        def loss_of(trained):
            return ours.loss(ours.run(trained | fixed, batch)[0], batch)

        loss, gradients = jax.value_and_grad(loss_of)(trained)
        updates, state = optimizer.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
        norms = optax.tree.norm(gradients), optax.tree.norm(trained)
        return trained, state, (schedule(count), loss, *norms)

    return jax.jit(step, compiler_options=sides.COMPILER_OPTIONS)


def train_reference(
    pair: sides.Pair, batches: Sequence[Any], num_steps: int, optimizers: Optimizers
) -> Curves:
    """Trains the reference in place."""
    parameters = [p for p in pair.module.parameters() if p.requires_grad]
    optimizer = optimizers.reference(parameters)
    rows = []
    for count in range(num_steps):
        rate = optimizers.rate(count + 1) if optimizers.rate else 0.0
        if optimizers.rate:
            optimizer_probe.set_rate(optimizer, rate)
        batch = batches[count % len(batches)]
        optimizer.zero_grad()
        loss = pair.loss(pair.outputs(batch), batch)
        loss.backward()
        gradients = _norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        rows.append((rate, loss.item(), gradients, _norm(parameters)))
    return _curves(rows)


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    with torch.no_grad():
        return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def _curves(rows: Sequence[tuple[Any, ...]]) -> Curves:
    return Curves(*(np.array(column, np.float64) for column in zip(*rows, strict=True)))
