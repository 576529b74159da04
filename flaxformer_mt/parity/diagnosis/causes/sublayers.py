"""Causes around sub-layers: residual connections, activations, and active dropout."""

from collections.abc import Callable, Iterator

import numpy as np

from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    SuspectSite,
    alternatives,
    cause,
)
from flaxformer_mt.parity.diagnosis.operations import (
    ACTIVATIONS,
    Activation,
    Given,
    LinearMap,
    Loss,
    Operation,
    Residual,
    Scores,
)


@cause(Residual)
def _residual_connection(residual: Residual, site: SuspectSite) -> Iterator[Candidate]:
    found, inputs = site.parsed, site.inputs
    yield Candidate(
        "residual missing",
        f"the reference does not add the input of {found.group} to its output",
        Given(residual.output),
    )
    yield Candidate("sub-layer missing", f"the reference omits {found.group}", Given(residual.x))

    def normalized(x: np.ndarray) -> np.ndarray:
        return site_operations.normalization(inputs, found, x).value()

    yield Candidate(
        "norm position",
        f"the reference adds the output of {found.group} to its normalized input",
        residual.but(x=normalized(residual.x)),
    )
    yield Candidate(
        "norm position",
        f"the reference normalizes the output of {found.group} before adding it",
        residual.but(output=normalized(residual.output)),
    )


@cause(Residual)
def _residual_dropout(residual: Residual, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is not None:
        yield from active_dropout(
            residual.output, site.theirs - residual.x, lambda kept: residual.but(output=kept)
        )


@cause(Residual)
def _residual_scale(residual: Residual, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is None:
        return
    parts = np.stack([site.rows(part).ravel() for part in (residual.x, residual.output)], axis=1)
    x_scale, output_scale = np.linalg.lstsq(parts, site.rows(site.theirs).ravel())[0]
    yield Candidate(
        "residual scale",
        f"the reference adds {x_scale:.6g} times the input and {output_scale:.6g} times the output "
        f"of {site.parsed.group}, ours adds them unscaled",
        Residual(x_scale * residual.x, output_scale * residual.output),
    )


@cause(Activation)
def _other_activation(activation: Activation, site: SuspectSite) -> Iterator[Candidate]:
    words = f"the reference's activation is {{}}, ours {activation.kind}"
    kinds = {kind: kind for kind in ACTIVATIONS}
    yield from alternatives(activation, "activation", words, "kind", kinds)


@cause(LinearMap)
@cause(Residual)
def _activation_added(operation: LinearMap | Residual, site: SuspectSite) -> Iterator[Candidate]:
    residual = isinstance(operation, Residual)
    value = operation.output if isinstance(operation, Residual) else operation.value()
    for kind in ACTIVATIONS:
        if kind != "none":
            changed = Activation(value, kind).value()
            yield Candidate(
                "activation added",
                f"the reference applies {kind} to the {'output' if residual else 'result'}, ours "
                "does not",
                operation.but(output=changed) if residual else Given(changed),
            )


@cause(Operation)
def _dropout(operation: Operation, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is not None and not isinstance(operation, Scores | Loss):
        yield from active_dropout(operation.value(), site.theirs, Given)


def active_dropout(
    ours: np.ndarray, theirs: np.ndarray, operation: Callable[[np.ndarray], Operation]
) -> Iterator[Candidate]:
    """Yields the candidate that `theirs` is `ours`, of the same shape, after dropout."""
    known = np.abs(ours) > 1e-3 * np.max(np.abs(ours), initial=0.0)
    ratios = theirs[known] / ours[known]
    kept = ratios > 0.5  # Dropped values are 0, kept ones are scaled up.
    if kept.all() or not kept.any():
        return
    scale = float(np.median(ratios[kept]))
    if scale < 1 + 1e-6:  # A ReLU, for example, also sets some values to 0.
        return
    dropped = np.abs(theirs) < np.abs(theirs - scale * ours)
    yield Candidate(
        "dropout",
        f"the reference has active dropout at a rate of {1 - 1 / scale:.3g}: some values are 0, "
        f"the others {scale:.6g} times ours",
        operation(np.where(dropped, 0, scale * ours)),
    )
