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
from flaxformer_mt.parity.diagnosis.operations import DIVISORS, LayerNormalization
from flaxformer_mt.parity.diagnosis.site_operations import normalization, recomputed


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


EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)


@cause(LayerNormalization)
def _epsilon_or_divisor(ours: LayerNormalization, site: SuspectSite) -> Found:
    for kind in sorted(DIVISORS, key=lambda kind: kind != ours.kind):
        other = ours.but(kind=kind)
        their, our = DIVISORS[kind], DIVISORS[ours.kind]
        cause = "norm epsilon" if their.unbiased == our.unbiased else "biased variance"
        solved = [] if site.known is None else [_solved_epsilon(other, site)]
        for epsilon in dict.fromkeys([ours.epsilon, *EPSILONS, *solved]):
            words = (
                f"the reference's norm has epsilon {epsilon:.6g} {their.words}, ours "
                f"{ours.epsilon:g} {our.words}"
            )
            yield Candidate(cause, words, other.but(epsilon=epsilon))


def _solved_epsilon(ours: LayerNormalization, site: SuspectSite) -> float:
    directions = site.rows(ours.centered() * ours.scale)
    differences = site.rows(site.theirs - ours.bias)
    spreads = site.rows(DIVISORS[ours.kind](ours.centered(), 0.0))[:, 0]
    row = np.argmin(spreads)
    direction, spread = directions[row], spreads[row]
    divisor = np.vdot(direction, direction) / np.vdot(direction, differences[row])
    inside = DIVISORS[ours.kind].inside_the_root
    return float(divisor**2 - spread**2 if inside else divisor - spread)


@cause(LayerNormalization)
def _narrow_norm(ours: LayerNormalization, site: SuspectSite) -> Found:
    site.require_float64()
    scaled, expected = site.rows(ours.but(bias=0.0).value()), site.rows(site.theirs)
    change = expected - scaled - ours.bias
    largest = _float32_errors(ours, site)
    size = np.abs(scaled) + np.abs(ours.scale) + np.abs(ours.bias)
    if not np.all(np.abs(change) <= largest * size):  # Also if any is NaN.
        return
    if np.array_equal(expected, expected.astype(np.float32)):
        words = "the reference computes its norm in float32, ours in float64"
        yield Candidate("float32 norm", words, ops.Given(site.theirs))
    # A rounded divisor scales the rows, a rounded mean moves them.
    moved = np.broadcast_to(ours.scale, scaled.shape)
    changes = np.stack([scaled, moved] if ours.centers else [scaled], axis=-1)
    if scaled.shape[-1] <= 2 * changes.shape[-1]:  # Too few features to tell.
        return
    errors = np.linalg.pinv(changes) @ change[..., None]
    if np.all(np.abs(errors) <= largest[..., None]):
        value = ours.value()
        value[site.real] += (changes @ errors)[..., 0]
        words = (
            f"the statistics of the reference's norm differ by up to {np.max(np.abs(errors)):.1e}, "
            "as if they were computed in float32; ours are float64"
        )
        yield Candidate("float32 norm", words, ops.Given(value))


def _float32_errors(ours: LayerNormalization, site: SuspectSite) -> np.ndarray:
    """Returns the largest errors of float32 statistics, relative to the divisor, [N, 1]."""
    divisor = site.rows(DIVISORS[ours.kind](ours.centered(), ours.epsilon))
    size = np.sqrt(np.mean(np.square(site.rows(ours.x)), axis=-1, keepdims=True))
    return 8 * np.finfo(np.float32).eps * np.maximum(1, size / divisor)


@cause(LayerNormalization)
def _norm_missing(ours: LayerNormalization, site: SuspectSite) -> Found:
    name = "final norm missing" if site.parsed.group == "final" else "norm missing"
    yield Candidate(name, "the reference does not normalize here", ops.Given(ours.x))


@cause(LayerNormalization)
def _norm_parameters(ours: LayerNormalization, site: SuspectSite) -> Found:
    without = {
        "scale": ours.but(scale=1.0),
        "bias": ours.but(bias=0.0),
        "scale and bias": ours.but(scale=1.0, bias=0.0),
    }
    for name, changed in without.items():
        yield Candidate(f"norm {name} missing", f"the reference's norm has no {name}", changed)
    for path, scales in site.inputs.params.items():
        norm, _, name = path.rpartition("/")
        if not norm.endswith("_norm") or name != "scale":
            continue
        biases = site.inputs.params.get(f"{norm}/bias", np.zeros_like(scales))
        layers = zip(np.atleast_2d(scales), np.atleast_2d(biases), strict=True)
        for layer, (scale, bias) in enumerate(layers):
            words = f"the reference's norm uses the scale and bias of {norm}, index {layer}"
            yield Candidate("wrong norm", words, ours.but(scale=scale, bias=bias))


@cause(LayerNormalization)
def _root_mean_square(ours: LayerNormalization, site: SuspectSite) -> Found:
    if not ours.centers:
        words = "the reference's norm subtracts the mean, ours is a root-mean-square norm"
        yield Candidate("layer norm", words, ours.but(centers=True))
        return
    other = ours.but(kind="layer_norm", centers=False)
    for bias, also in ((ours.bias, ""), (0.0, " and adds no bias")):
        words = f"the reference's norm does not subtract the mean{also}; its epsilon is {{}}"
        epsilons = {f"{epsilon:g}": epsilon for epsilon in (ours.epsilon, *EPSILONS)}
        norm = other.but(bias=bias)
        yield from alternatives(norm, "root-mean-square norm", words, "epsilon", epsilons)


@cause(LayerNormalization, ops.Residual)
def _norm_after_the_sublayer(ours: LayerNormalization | ops.Residual, site: SuspectSite) -> Found:
    found, inputs = site.parsed, site.inputs
    if inputs.config.norm_position == "post" or found.layer is None:
        return
    end = f"{found.prefix}/{found.group}_sum"
    inputs = inputs.with_value(f"{found.prefix}/{found.group}_norm", ours.x)
    changed = recomputed(inputs, [*inputs.inside(found), end])
    yield Candidate(
        "norm position",
        f"the reference is post-norm, norm(x + f(x)) around its {found.group}; ours is pre-norm",
        normalization(inputs, found, changed.ours[end]),
    )
