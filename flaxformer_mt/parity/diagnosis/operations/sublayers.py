"""Residual connections and activations."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from flaxformer_mt.parity.diagnosis.operations.base import Operation


@dataclasses.dataclass(frozen=True, eq=False)
class Residual(Operation):
    """The residual connection: the input of a sub-layer plus its output, [B, T, D]."""

    x: np.ndarray
    output: np.ndarray

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        return self.x + self.output


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "none": lambda x: x,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
}
"""Activations by name; the first four are those of `TransformerConfig.activation`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Activation(Operation):
    """An elementwise function of the hidden units [B, T, F], times a gate if there is one."""

    hidden: np.ndarray
    kind: str
    """A key of `ACTIVATIONS`."""
    gate: np.ndarray | None = None
    """[B, T, F], or None."""

    def value(self) -> np.ndarray:
        """[B, T, F]."""
        activated = ACTIVATIONS[self.kind](torch.tensor(self.hidden)).numpy()
        return activated if self.gate is None else activated * self.gate
