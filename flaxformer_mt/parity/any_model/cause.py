"""The type of a cause in a traced program."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np


class ProgramCause(NamedTuple):
    """A change of the equations, and the value of the site that follows."""

    cause: str
    explanation: str
    value: np.ndarray


Found: TypeAlias = Iterator[ProgramCause]
