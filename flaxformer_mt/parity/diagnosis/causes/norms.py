"""Causes in norms."""

import numpy as np

from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    Found,
    SuspectSite,
    alternatives,
    cause,
)
from flaxformer_mt.parity.diagnosis.operations import DIVISORS, LayerNormalization
from flaxformer_mt.parity.diagnosis.site_operations import normalization, recomputed

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
