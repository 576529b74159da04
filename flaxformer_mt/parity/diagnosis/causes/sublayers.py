"""Causes around sub-layers: residuals, activations, and dropout that is left on."""

from collections.abc import Callable, Iterator

import numpy as np

from flaxformer_mt.parity.diagnosis import equations
from flaxformer_mt.parity.diagnosis.causes.registry import Clue, Hypothesis, cause
from flaxformer_mt.parity.diagnosis.equations import (
    ACTIVATIONS,
    Activation,
    Given,
    Loss,
    Operation,
    Residual,
    Scores,
)


@cause(Residual)
def residual_connection(residual: Residual, clue: Clue) -> Iterator[Hypothesis]:
    """One of the two is left out, or what is added is something else."""
    found, evidence = clue.place, clue.evidence
    yield Hypothesis(
        "residual missing",
        f"the reference does not add the input of {found.group} to its output",
        Given(residual.output),
    )
    yield Hypothesis(
        "sub-layer missing", f"the reference leaves {found.group} out", Given(residual.x)
    )

    def normalised(x: np.ndarray) -> np.ndarray:
        return equations.norm(evidence, found, x).value()

    yield Hypothesis(
        "norm position",
        f"the reference adds the output of {found.group} to its normalised input",
        residual.but(x=normalised(residual.x)),
    )
    yield Hypothesis(
        "norm position",
        f"the reference normalises the output of {found.group} before it is added",
        residual.but(output=normalised(residual.output)),
    )
    yield Hypothesis(
        "wrong residual",
        f"the reference adds the output of {found.group} to what went into the layer",
        residual.but(x=equations.layer_input(evidence, found.stack, found.layer or 0)),
    )


@cause(Residual)
def residual_dropout(residual: Residual, clue: Clue) -> Iterator[Hypothesis]:
    """The sub-layer's output went through a dropout."""
    if clue.theirs is not None:
        yield from left_on(
            residual.output, clue.theirs - residual.x, lambda kept: residual.but(output=kept)
        )


@cause(Residual)
def residual_scale(residual: Residual, clue: Clue) -> Iterator[Hypothesis]:
    """The two are multiplied by numbers, which are solved for."""
    if clue.theirs is None:
        return
    parts = np.stack([clue.rows(part).ravel() for part in (residual.x, residual.output)], axis=1)
    x_scale, output_scale = np.linalg.lstsq(parts, clue.rows(clue.theirs).ravel())[0]
    yield Hypothesis(
        "residual scale",
        f"the reference adds {x_scale:.6g} times the input and {output_scale:.6g} times the output "
        f"of {clue.place.group}, ours adds each as it is",
        Residual(x_scale * residual.x, output_scale * residual.output),
    )


@cause(Activation)
def other_activation(activation: Activation, clue: Clue) -> Iterator[Hypothesis]:
    """Another function."""
    for kind in ACTIVATIONS:
        yield Hypothesis(
            "activation",
            f"the reference's activation is {kind}, ours {activation.kind}",
            activation.but(kind=kind),
        )


@cause(Operation)
def dropout(operation: Operation, clue: Clue) -> Iterator[Hypothesis]:
    """The value itself went through a dropout."""
    if clue.theirs is not None and not isinstance(operation, Scores | Loss):
        yield from left_on(operation.value(), clue.theirs, Given)


def left_on(
    ours: np.ndarray, theirs: np.ndarray, operation: Callable[[np.ndarray], Operation]
) -> Iterator[Hypothesis]:
    """That `theirs` is `ours` with some numbers 0 and all others enlarged alike.

    Args:
      ours: any shape.
      theirs: the same shape.
      operation: what the reference then has, of the value behind the dropout.
    """
    known = np.abs(ours) > 1e-3 * np.max(np.abs(ours), initial=0.0)
    ratios = theirs[known] / ours[known]
    kept = ratios > 0.5  # Enlarged are at least as large as before, dropped are 0.
    if kept.all() or not kept.any():
        return
    scale = float(np.median(ratios[kept]))
    dropped = np.abs(theirs) < np.abs(theirs - scale * ours)
    yield Hypothesis(
        "dropout",
        f"the reference has dropout on, at a rate of {1 - 1 / scale:.3g}: some numbers are 0, all "
        f"others {scale:.6g} times ours",
        operation(np.where(dropped, 0, scale * ours)),
    )
