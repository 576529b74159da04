"""Linear maps, and the projection to the logits."""

import dataclasses

import numpy as np

from flaxformer_mt.parity.diagnosis.operations.base import Operation


@dataclasses.dataclass(frozen=True, eq=False)
class LinearMap(Operation):
    """x [B, T, D] times a kernel [D, E], plus a bias [E]."""

    x: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray | None

    def value(self) -> np.ndarray:
        """[B, T, E]."""
        return self.x @ self.kernel + (0 if self.bias is None else self.bias)


@dataclasses.dataclass(frozen=True, eq=False)
class Logits(LinearMap):
    """The projection to the vocabulary, [B, T, V], scaled."""

    scale: float

    def value(self) -> np.ndarray:
        """[B, T, V]."""
        return super().value() * self.scale
