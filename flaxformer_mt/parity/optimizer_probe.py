"""Finds out how two optimizers differ, from what they do with known gradients.

Both get the same few parameters and gradients. Adam's constants follow from the updates:

    g                  the first update is proportional to g / (g + epsilon)
    none               an update is weight decay
    g, then almost 0   the second update tells the decay rates of the moments
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import torch

_LARGEST = 1e-2  # Below every usual limit of clipping.
_GRADIENTS = _LARGEST * 10.0 ** -np.arange(13)
_SMALL = 1e-4
_SECOND_GRADIENTS = _LARGEST * np.array([0.0, _SMALL, -_SMALL])
"""Those of the last parameters, whose first one is the largest."""
_PARAMETERS = np.zeros(len(_GRADIENTS) + 4)
_DECAYED = len(_GRADIENTS)
_PARAMETERS[_DECAYED] = 1.0  # It has no gradient.

TorchOptimizer = Callable[[list[Any]], torch.optim.Optimizer]


def _gradients(step: int) -> np.ndarray:
    last = _SECOND_GRADIENTS if step else np.full(3, _LARGEST)
    return np.concatenate([_GRADIENTS, [0.0], last])


def updates_of_torch(
    optimizer_of: TorchOptimizer, rate: Callable[[int], float] | None = None
) -> np.ndarray:
    """Returns two updates of an optimizer, float64 [2, N], at the rates of the updates 1 and 2."""
    parameter = torch.nn.Parameter(torch.tensor(_PARAMETERS))
    optimizer = optimizer_of([parameter])
    rows = []
    for step in range(2):
        if rate:
            set_rate(optimizer, rate(step + 1))
        before = parameter.detach().clone()
        parameter.grad = torch.tensor(_gradients(step))
        optimizer.step()
        rows.append((parameter.detach() - before).numpy())
    return np.stack(rows)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def updates_of_optax(optimizer: optax.GradientTransformation) -> np.ndarray:
    """Returns two updates of an optimizer, [2, N]."""
    parameters: Any = jnp.asarray(_PARAMETERS)
    state = optimizer.init(parameters)
    rows = []
    for step in range(2):
        update, state = optimizer.update(jnp.asarray(_gradients(step)), state, parameters)
        parameters = parameters + update
        rows.append(np.asarray(update))
    return np.stack(rows)


class _Constants(NamedTuple):
    rate: float
    """The size of the first update for a gradient of 0.01, or far above epsilon."""
    decay: float
    """The first update of a parameter of 1 without a gradient, relative to the rate."""
    epsilon: float | None
    moments: tuple[float, float] | None


def differences(ours: np.ndarray, theirs: np.ndarray) -> list[str]:
    """Returns how two optimizers differ, one sentence each, from their updates."""
    our, their = _constants(ours), _constants(theirs)
    found = []
    if not np.isclose(our.rate, their.rate, rtol=1e-4):
        found.append(
            f"the first update is {their.rate:.4g} in the reference and {our.rate:.4g} in ours for "
            "the same gradient: check the rate and the correction of the moments' bias"
        )
    if not np.isclose(our.decay, their.decay, rtol=1e-4, atol=1e-9):
        found.append(
            f"weight decay: a parameter of 1 without a gradient changes by {their.decay:.4g} rates "
            f"in the reference, by {our.decay:.4g} in ours"
        )
    if our.epsilon is not None and their.epsilon is not None:
        if not np.isclose(our.epsilon, their.epsilon, rtol=1e-3, atol=1e-15):
            found.append(
                f"Adam's epsilon is {their.epsilon:.3g} in the reference, {our.epsilon:.3g} in ours"
            )
        elif our.moments and their.moments and not np.allclose(our.moments, their.moments, 1e-5):
            rates = (f"({b1:.6g}, {b2:.6g})" for b1, b2 in (their.moments, our.moments))
            found.append("Adam's decay rates are {} in the reference, {} in ours".format(*rates))
    return found


def _constants(updates: np.ndarray) -> _Constants:
    first = -updates[0]
    epsilon = _epsilon(first[: len(_GRADIENTS)] / first[0])
    rate, decay = first[0] * (1 + (epsilon or 0.0) / _LARGEST), first[_DECAYED]
    moments = None
    if epsilon is not None and not decay:  # Decay may be part of the gradients.
        moments = _moments(-updates[1], epsilon)
    return _Constants(float(rate), float(decay / rate), epsilon, moments)


def _epsilon(ratios: np.ndarray) -> float | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        solved = (1 / ratios - 1) / (1 / _GRADIENTS - 1 / (ratios * _LARGEST))
    usable = (ratios > 1e-3) & (ratios < 1 - 1e-3) & (solved > 0)
    if not usable.any():
        return 0.0 if np.allclose(ratios, 1, atol=1e-2) else None
    values = solved[usable]
    return float(np.median(values)) if np.ptp(values) <= 1e-4 * np.median(values) else None


def _moments(second: np.ndarray, epsilon: float) -> tuple[float, float] | None:
    """Solves for the decay rates (b1, b2) from second updates; None if they are not Adam's.

    After the gradients g and d, an update is proportional to (b1 g + d) / (1 + b1), divided by the
    root of (b2 g^2 + d^2) / (1 + b2): its derivative at d = 0 tells b1, and then its value b2.
    """
    rate = second[0] * (1 + epsilon / _LARGEST)
    value, above, below = second[-3:]
    derivative = (above - below) / (2 * _SMALL)
    if not 0 < value < derivative:
        return None
    first = value / derivative
    root = 0.0
    for _ in range(3):  # Epsilon is small beside the root, which b2 tells.
        corrected = value * (1 + (epsilon / (root * _LARGEST) if root else 0.0))
        square = (corrected * (1 + first) / (rate * first)) ** 2  # (1 + b2) / b2
        if square <= 1:
            return None
        root = square**-0.5
    return float(first), float(1 / (square - 1))
