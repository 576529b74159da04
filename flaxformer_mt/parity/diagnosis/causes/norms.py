"""Causes in norms."""

from collections.abc import Iterator

import numpy as np

from flaxformer_mt.parity.diagnosis.causes.registry import Candidate, SuspectSite, cause
from flaxformer_mt.parity.diagnosis.inputs import with_values
from flaxformer_mt.parity.diagnosis.operations import DIVISORS, Given, LayerNormalization, Residual
from flaxformer_mt.parity.diagnosis.site_operations import normalization, operation

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)


@cause(LayerNormalization)
def _epsilon_or_divisor(ours: LayerNormalization, site: SuspectSite) -> Iterator[Candidate]:
    for kind in sorted(DIVISORS, key=lambda kind: kind != ours.kind):
        other = ours.but(kind=kind)
        their, our = DIVISORS[kind], DIVISORS[ours.kind]
        cause = "norm epsilon" if their.unbiased == our.unbiased else "biased variance"
        for epsilon in dict.fromkeys([ours.epsilon, *EPSILONS, *_solved_epsilon(other, site)]):
            yield Candidate(
                cause,
                f"the reference's norm has epsilon {epsilon:.6g} {their.words}, ours "
                f"{ours.epsilon:g} {our.words}",
                other.but(epsilon=epsilon),
            )


def _solved_epsilon(ours: LayerNormalization, site: SuspectSite) -> list[float]:
    if site.theirs is None:
        return []
    directions = site.rows(ours.centered() * ours.scale)
    differences = site.rows(site.theirs - ours.bias)
    spreads = site.rows(DIVISORS[ours.kind](ours.centered(), 0.0))[:, 0]
    row = np.argmin(spreads)
    direction, spread = directions[row], spreads[row]
    divisor = np.vdot(direction, direction) / np.vdot(direction, differences[row])
    inside = DIVISORS[ours.kind].inside_the_root
    return [float(divisor**2 - spread**2 if inside else divisor - spread)]


@cause(LayerNormalization)
def _narrow_norm(ours: LayerNormalization, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is None or site.inputs.config.dtype != "float64":
        return
    scaled, expected = site.rows(ours.but(bias=0.0).value()), site.rows(site.theirs)
    change = expected - scaled - ours.bias
    largest = _float32_errors(ours, site)
    size = np.abs(scaled) + np.abs(ours.scale) + np.abs(ours.bias)
    if not np.all(np.abs(change) <= largest * size):  # Also if any is NaN.
        return
    if np.array_equal(expected, expected.astype(np.float32)):
        yield Candidate(
            "float32 norm",
            "the reference computes its norm in float32, ours in float64",
            Given(site.theirs),
        )
    # A rounded divisor scales the rows, a rounded mean moves them.
    moved = np.broadcast_to(ours.scale, scaled.shape)
    changes = np.stack([scaled, moved] if ours.centers else [scaled], axis=-1)
    if scaled.shape[-1] <= 2 * changes.shape[-1]:  # Too few features to tell.
        return
    errors = np.linalg.pinv(changes) @ change[..., None]
    if np.all(np.abs(errors) <= largest[..., None]):
        value = ours.value()
        value[site.real] += (changes @ errors)[..., 0]
        yield Candidate(
            "float32 norm",
            f"the statistics of the reference's norm differ by up to {np.max(np.abs(errors)):.1e}, "
            "as if they were computed in float32; ours are float64",
            Given(value),
        )


def _float32_errors(ours: LayerNormalization, site: SuspectSite) -> np.ndarray:
    """Returns the largest errors of float32 statistics, relative to the divisor, [N, 1]."""
    divisor = site.rows(DIVISORS[ours.kind](ours.centered(), ours.epsilon))
    size = np.sqrt(np.mean(np.square(site.rows(ours.x)), axis=-1, keepdims=True))
    return 8 * np.finfo(np.float32).eps * np.maximum(1, size / divisor)


@cause(LayerNormalization)
def _norm_missing(ours: LayerNormalization, site: SuspectSite) -> Iterator[Candidate]:
    name = "final norm missing" if site.parsed.group == "final" else "norm missing"
    yield Candidate(name, "the reference does not normalize here", Given(ours.x))


@cause(LayerNormalization)
def _norm_parameters(ours: LayerNormalization, site: SuspectSite) -> Iterator[Candidate]:
    without = {
        "scale": ours.but(scale=1.0),
        "bias": ours.but(bias=0.0),
        "scale and bias": ours.but(scale=1.0, bias=0.0),
    }
    for name, changed in without.items():
        yield Candidate(f"norm {name} missing", f"the reference's norm has no {name}", changed)
    params = site.inputs.params
    for path in [path for path in params if path.endswith("_norm/scale")]:
        scales = np.atleast_2d(params[path])
        bias_path = path.removesuffix("scale") + "bias"
        biases = np.atleast_2d(params.get(bias_path, np.zeros_like(params[path])))
        for layer, (scale, bias) in enumerate(zip(scales, biases, strict=True)):
            yield Candidate(
                "wrong norm",
                f"the reference's norm uses the scale and bias of {path.removesuffix('/scale')}, "
                f"index {layer}",
                ours.but(scale=scale, bias=bias),
            )


@cause(LayerNormalization)
def _root_mean_square(ours: LayerNormalization, site: SuspectSite) -> Iterator[Candidate]:
    if not ours.centers:
        yield Candidate(
            "layer norm",
            "the reference's norm subtracts the mean, ours is a root-mean-square norm",
            ours.but(centers=True),
        )
        return
    for bias, words in ((ours.bias, ""), (0.0, " and adds no bias")):
        for epsilon in dict.fromkeys([ours.epsilon, *EPSILONS]):
            yield Candidate(
                "root-mean-square norm",
                f"the reference's norm does not subtract the mean{words}; its epsilon is "
                f"{epsilon:g}",
                ours.but(kind="layer_norm", epsilon=epsilon, bias=bias, centers=False),
            )


@cause(LayerNormalization)
@cause(Residual)
def _norm_after_the_sublayer(
    ours: LayerNormalization | Residual, site: SuspectSite
) -> Iterator[Candidate]:
    found, inputs = site.parsed, site.inputs
    if inputs.config.norm_position == "post" or found.layer is None:
        return
    group = f"{found.prefix}/{found.group}"
    inputs = with_values(inputs, {f"{group}_norm": ours.x})
    parts = [name for name in inputs.ours if name.startswith(f"{group}/")]
    for name in [*parts, f"{group}_sum"]:
        inputs = with_values(inputs, {name: operation(inputs, name).value()})
    yield Candidate(
        "norm position",
        f"the reference is post-norm, norm(x + f(x)) around its {found.group}; ours is pre-norm",
        normalization(inputs, found, inputs.ours[f"{group}_sum"]),
    )
