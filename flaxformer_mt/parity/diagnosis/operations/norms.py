"""The published layer norms."""

import dataclasses
from typing import NamedTuple

import numpy as np

from flaxformer_mt.parity.diagnosis.operations.base import Operation


class Divisor(NamedTuple):
    """The divisor of a norm."""

    unbiased: bool
    """Divide the sum of squares by n - 1 instead of n."""
    inside_the_root: bool
    """Add epsilon to the variance instead of its square root."""

    def __call__(self, centered: np.ndarray, epsilon: float) -> np.ndarray:
        """Computes the divisor [..., 1] of centered values [..., D]."""
        count = centered.shape[-1] - self.unbiased
        variance = np.sum(np.square(centered), axis=-1, keepdims=True) / count
        return np.sqrt(variance + epsilon) if self.inside_the_root else np.sqrt(variance) + epsilon

    @property
    def words(self) -> str:
        """A description for messages."""
        where = "inside" if self.inside_the_root else "outside"
        return f"{where} the root of the variance over {'n - 1' if self.unbiased else 'n'}"


DIVISORS = {
    "layer_norm": Divisor(unbiased=False, inside_the_root=True),
    "unbiased_std": Divisor(unbiased=True, inside_the_root=False),
    "unbiased_variance": Divisor(unbiased=True, inside_the_root=True),
    "biased_std": Divisor(unbiased=False, inside_the_root=False),
}
"""The first two are those of `TransformerConfig.norm_kind`."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerNormalization(Operation):
    """A norm over the last axis of x [B, T, D], with scale and bias [D]."""

    x: np.ndarray
    kind: str
    """A key of `DIVISORS`."""
    epsilon: float
    scale: np.ndarray | float
    bias: np.ndarray | float
    centers: bool = True
    """Subtract the mean; False for a root-mean-square norm."""

    def centered(self) -> np.ndarray:
        """The dividend, [B, T, D]."""
        return self.x - np.mean(self.x, axis=-1, keepdims=True) if self.centers else self.x

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        centered = self.centered()
        return centered / DIVISORS[self.kind](centered, self.epsilon) * self.scale + self.bias
