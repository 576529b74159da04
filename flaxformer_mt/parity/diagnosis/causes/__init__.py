"""The known causes of a difference: what a reference may do where our model does something else.

A cause is a function of our operation at a site (`parity/equations.py`) and a `Clue`. It yields
hypotheses: the operation that the reference may have instead, and what that means in words. Its
prediction is then held against the reference's value. To add a cause, write such a function and
name with `@cause` the operation that it is about:

    @cause(Norm)
    def mean_left_in(norm: Norm, clue: Clue) -> Iterator[Hypothesis]:
        yield Hypothesis("mean left in", "the reference does not centre", norm.but(centres=False))

Specific causes stand before general ones: of two that explain a difference equally well the first
is reported.
"""

from flaxformer_mt.parity.diagnosis.causes import (
    attention,
    embeddings,
    losses,
    norms,
    projections,
    sublayers,
)
from flaxformer_mt.parity.diagnosis.causes.registry import (
    CAUSES,
    Clue,
    Hypothesis,
    cause,
    hypotheses,
)

__all__ = [
    "CAUSES",
    "Clue",
    "Hypothesis",
    "attention",
    "cause",
    "embeddings",
    "hypotheses",
    "losses",
    "norms",
    "projections",
    "sublayers",
]
