"""Causes around sub-layers: residual connections, activations, and active dropout."""

from collections.abc import Callable

import numpy as np

from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    Found,
    SuspectSite,
    alternatives,
    cause,
)


@cause(ops.Residual)
def _residual_connection(residual: ops.Residual, site: SuspectSite) -> Found:
    found, x, output = site.parsed, residual.x, residual.output
    words = f"the reference does not add the input of {found.group} to its output"
    yield Candidate("residual missing", words, ops.Given(output))
    yield Candidate("sub-layer missing", f"the reference omits {found.group}", ops.Given(x))
    normalized_x, normalized_output = (
        site_operations.normalization(site.inputs, found, each).value() for each in (x, output)
    )
    words = f"the reference adds the output of {found.group} to its normalized input"
    yield Candidate("norm position", words, residual.but(x=normalized_x))
    words = f"the reference normalizes the output of {found.group} before adding it"
    yield Candidate("norm position", words, residual.but(output=normalized_output))


@cause(ops.Residual)
def _residual_dropout(residual: ops.Residual, site: SuspectSite) -> Found:
    added = site.theirs - residual.x
    yield from active_dropout(residual.output, added, lambda kept: residual.but(output=kept))


@cause(ops.Residual)
def _residual_scale(residual: ops.Residual, site: SuspectSite) -> Found:
    parts = np.stack([site.rows(part).ravel() for part in (residual.x, residual.output)], axis=1)
    x_scale, output_scale = np.linalg.lstsq(parts, site.rows(site.theirs).ravel())[0]
    words = (
        f"the reference adds {x_scale:.6g} times the input and {output_scale:.6g} times the output "
        f"of {site.parsed.group}, ours adds them unscaled"
    )
    scaled = ops.Residual(x_scale * residual.x, output_scale * residual.output)
    yield Candidate("residual scale", words, scaled)


@cause(ops.Activation)
def _other_activation(activation: ops.Activation, site: SuspectSite) -> Found:
    words = f"the reference's activation is {{}}, ours {activation.kind}"
    kinds = {kind: kind for kind in ops.ACTIVATIONS}
    yield from alternatives(activation, "activation", words, "kind", kinds)


@cause(ops.LinearMap, ops.Residual)
def _activation_added(operation: ops.LinearMap | ops.Residual, site: SuspectSite) -> Found:
    is_sum = isinstance(operation, ops.Residual)
    value = operation.output if isinstance(operation, ops.Residual) else operation.value()
    activated = {
        kind: ops.Activation(value, kind).value() for kind in ops.ACTIVATIONS if kind != "none"
    }
    changed, switch = (operation, "output") if is_sum else (ops.Given(value), "result")
    words = f"the reference applies {{}} to the {switch}, ours does not"
    yield from alternatives(changed, "activation added", words, switch, activated)


@cause(ops.Operation)
def _dropout(operation: ops.Operation, site: SuspectSite) -> Found:
    if not isinstance(operation, ops.Scores | ops.Loss):
        yield from active_dropout(operation.value(), site.theirs, ops.Given)


def active_dropout(
    ours: np.ndarray, theirs: np.ndarray, operation: Callable[[np.ndarray], ops.Operation]
) -> Found:
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
    words = (
        f"the reference has active dropout at a rate of {1 - 1 / scale:.3g}: some values are 0, "
        f"the others {scale:.6g} times ours"
    )
    yield Candidate("dropout", words, operation(np.where(dropped, 0, scale * ours)))
