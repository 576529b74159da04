"""The interface of an operation: inputs, switches and a value.

An operation holds its inputs and its switches; `value()` computes the result. The operation of a
reference with another epsilon, for example, is `normalization.but(epsilon=1e-5)`.
"""

import abc
import dataclasses
from typing import Any, Self

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(abc.ABC):
    """The computation of one value from its inputs."""

    @abc.abstractmethod
    def value(self) -> np.ndarray:
        """Computes the result, in float64 if the inputs are float64."""

    def but(self, **changes: Any) -> Self:
        """Returns the operation with some inputs or switches replaced."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Operation):
    """A value that is known."""

    result: np.ndarray

    def value(self) -> np.ndarray:
        """Returns the value."""
        return self.result
