"""Trains both sides from the same weights on the same batches, and compares every step.

Both train the reference's own parameters: PyTorch with the publication's loss, schedule and
`torch.optim`, we with ours. Training amplifies rounding, in float32 and at high rates within some
steps. So where the curves part, PyTorch is asked to train once more, from weights that differ in
the last bit: what it then does to itself is no bug of ours.
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
from flaxformer_mt.parity.pair import (
    COMPILER_OPTIONS,
    Forward,
    Ours,
    Pair,
    pair,
    precision,
    real_tokens,
    without_dropout,
)
from flaxformer_mt.parity.recipes import Recipe
from flaxformer_mt.parity.tokens import Tokens
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule

TOLERANCES = {"float64": 1e-8, "float32": 1e-3}
"""Relative; what a step's loss may differ by."""


class Curves(NamedTuple):
    """One side's training, a number a step; float64 [N]."""

    rate: np.ndarray
    """Learning rate of the update."""
    loss: np.ndarray
    """Per token, before the update."""
    gradient_norm: np.ndarray
    """Of all trained parameters together, as the next."""
    parameter_norm: np.ndarray
    """After the update."""


class Divergence(NamedTuple):
    """The first step out of tolerance."""

    step: int
    """From 1."""
    quantity: str
    """A field of `Curves`; within a step the first one in the order of that class."""
    difference: float
    """Relative."""
    explanation: str
    """Where to look."""


class Trajectory(NamedTuple):
    """Two trainings from the same weights."""

    ours: Curves
    theirs: Curves
    tolerance: float
    """Relative."""
    control: Curves | None = None
    """The reference's, from weights that differ in the last bit, up to the step at which the sides
    part; only if they part, and not at once."""

    def differences(self) -> Curves:
        """Relative differences, by step."""
        return Curves(*map(_relative, self.ours, self.theirs))

    @property
    def first_divergence(self) -> Divergence | None:
        """The first step out of tolerance, if there is one."""
        differences = np.stack(self.differences())  # [4, N]
        bad = ~(differences <= self.tolerance)
        if not bad.any():
            return None
        step = int(bad.any(axis=0).argmax())
        quantity = int(bad[:, step].argmax())
        name, difference = Curves._fields[quantity], float(differences[quantity, step])
        explanation = _explain(name, step + 1)
        if self.control is not None:
            by_itself = _relative(self.control[quantity], self.theirs[quantity][: step + 1])[step]
            explanation += f"; {_verdict(difference, float(by_itself))}"
        return Divergence(step + 1, name, difference, explanation)


def _relative(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    scale = np.maximum(np.abs(theirs), np.finfo(np.float64).tiny)
    return np.abs(ours - theirs) / scale


def _update(quantity: str, step: int) -> int:
    """The update that a difference is due to, from 1; 0 if it is there before any."""
    # A wrong update is seen in the parameters, or only in what the next step makes of them.
    return step if quantity == "parameter_norm" else step - 1


def _explain(quantity: str, step: int) -> str:
    if quantity == "rate":
        return "the schedules differ: compare their formulas, and whether steps count from 0 or 1"
    update = _update(quantity, step)
    if update == 0:
        return {
            "loss": "the losses differ before any update: look at the forward pass and the loss",
            "gradient_norm": "the losses agree and the gradients do not: look at what is trained",
        }[quantity]
    if update == 1:
        return "the first update differs: look at epsilon, weight decay and bias correction"
    return (
        f"update {update} is the first to show: look at the decay of Adam's moments, at clipping, "
        "and whether both sides see the same batches"
    )


def _verdict(difference: float, by_itself: float) -> str:
    run = f"PyTorch itself, from weights that differ in the last bit, is {by_itself:.1e} off there"
    # Rounding is a matter of luck: two runs with the same amount of it differ by some factor.
    if by_itself > difference / 100:
        return f"but {run}: this training amplifies rounding, and what differs may be no more"
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
      family: the map of the module's weights.
      module: the reference; it is trained without dropout, and then restored.
      batches: taken in turn; their shapes should be equal, each new one is compiled.
      num_steps: N.
      forward: how to run the module, see `pair`.
      recipe: loss, schedule and optimizer of both sides, by default the family's.
      tolerance: relative, by default that of `TOLERANCES`.
      **overrides: what the module's tensors cannot tell, see `interop.load`.

    Raises:
      UserError: the tensors are not the family's, or a batch has another form.
    """
    sides = pair(family, module, overrides, forward, recipe)
    return train_both(sides, batches, num_steps, tolerance)


def train_both(
    sides: Pair, batches: Sequence[Any], num_steps: int, tolerance: float | None = None
) -> Trajectory:
    """What `trajectory` does, for a pair; its module is restored in the end."""
    module = sides.module
    tokens = [real_tokens(sides, batch)[0] for batch in batches]
    with precision(sides.dtype), without_dropout(module):
        ours = train_ours(sides, tokens, num_steps)
        with _restored(module):
            theirs = train_reference(sides, tokens, num_steps)
        found = Trajectory(ours, theirs, tolerance or TOLERANCES[sides.dtype])
        first = found.first_divergence
        if first is None or first.quantity == "rate" or _update(first.quantity, first.step) < 2:
            return found
        with _restored(module):
            _change_the_last_bit(module)
            return found._replace(control=train_reference(sides, tokens, first.step))


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Gives a module its tensors and gradients back in the end."""
    # Not a deep copy: modules that keep a value of their last call cannot be copied. Nor
    # load_state_dict, which some publications have changed.
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


def train_ours(sides: Pair, tokens: Sequence[Tokens], num_steps: int) -> Curves:
    """Trains our model, from the weights of the pair."""
    optimizer, step = _program(sides.ours, num_steps)
    trained: Any = jax.tree.map(jnp.asarray, sides.trained())
    fixed = sides.fixed()
    state = optimizer.init(trained)
    figures = []
    for count in range(num_steps):
        batch = tokens[count % len(tokens)]
        trained, state, line = step(trained, state, fixed, np.int32(count), batch)
        figures.append(line)
    return _curves(jax.device_get(figures))


@functools.lru_cache(maxsize=8)
def _program(ours: Ours, num_steps: int) -> tuple[optax.GradientTransformation, Any]:
    """The optimizer, and the compiled step with it."""
    schedule = make_schedule(ours.recipe.optimizer, ours.config.d_model, num_steps)
    optimizer = make_optimizer(ours.recipe.optimizer, schedule)

    def step(trained, state, fixed, count, tokens):
        def loss_of(trained):
            return ours.loss(ours.logits(trained | fixed, tokens), tokens)

        loss, gradients = jax.value_and_grad(loss_of)(trained)
        updates, state = optimizer.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
        figures = schedule(count), loss, optax.tree.norm(gradients), optax.tree.norm(trained)
        return trained, state, figures

    return optimizer, jax.jit(step, donate_argnums=(0, 1), compiler_options=COMPILER_OPTIONS)


def train_reference(sides: Pair, tokens: Sequence[Tokens], num_steps: int) -> Curves:
    """Trains the reference's module in place."""
    parameters = [p for p in sides.module.parameters() if p.requires_grad]
    optimizer = sides.ours.recipe.adam(parameters)
    figures = []
    for count in range(num_steps):
        rate = sides.ours.recipe.rate(count + 1, sides.ours.config.d_model)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = tokens[count % len(tokens)]
        optimizer.zero_grad()
        loss = sides.loss(sides.logits(batch), batch)
        loss.backward()
        gradients = _norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        figures.append((rate, loss.item(), gradients, _norm(parameters)))
    return _curves(figures)


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    with torch.no_grad():
        return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def _curves(figures: Sequence[tuple[Any, ...]]) -> Curves:
    return Curves(*(np.array(column, np.float64) for column in zip(*figures, strict=True)))
