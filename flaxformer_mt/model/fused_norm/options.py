"""What a kernel is compiled for."""

from typing import NamedTuple


class Options(NamedTuple):
    """The static options of the norm of a sum."""

    epsilon: float
    """Of the norm."""
    threshold: int
    """A value is dropped if its random number of 16 bits is below it."""
    interpret: bool
    """Whether the kernels are interpreted, as on CPUs."""
    uses: int
    """How many operations use the result: the kernel adds up their gradients."""
