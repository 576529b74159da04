"""Causes in the norms."""

from collections.abc import Iterator

import numpy as np

from flaxformer_mt.parity.diagnosis.causes.registry import Clue, Hypothesis, cause
from flaxformer_mt.parity.diagnosis.equations import (
    DIVISORS,
    Given,
    Norm,
    Residual,
    norm,
    operation,
)
from flaxformer_mt.parity.diagnosis.evidence import with_values

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)


@cause(Norm)
def epsilon_or_divisor(ours: Norm, clue: Clue) -> Iterator[Hypothesis]:
    """Another epsilon, or another divisor, or both; an epsilon that is not listed is solved for."""
    for kind in sorted(DIVISORS, key=lambda kind: kind != ours.kind):
        other = ours.but(kind=kind)
        their, our = DIVISORS[kind], DIVISORS[ours.kind]
        cause = "norm epsilon" if their.unbiased == our.unbiased else "biased variance"
        for epsilon in dict.fromkeys([ours.epsilon, *EPSILONS, *_solved_epsilon(other, clue)]):
            yield Hypothesis(
                cause,
                f"the reference's norm has epsilon {epsilon:.6g} {their.words}, ours "
                f"{ours.epsilon:g} {our.words}",
                other.but(epsilon=epsilon),
            )


def _solved_epsilon(ours: Norm, clue: Clue) -> list[float]:
    """From the row that varies least, where epsilon weighs most."""
    if clue.theirs is None:
        return []
    directions = clue.rows(ours.centred() * ours.scale)
    differences = clue.rows(clue.theirs - ours.bias)
    spreads = clue.rows(DIVISORS[ours.kind](ours.centred(), 0.0))[:, 0]
    row = np.argmin(spreads)
    direction, spread = directions[row], spreads[row]
    divisor = np.vdot(direction, direction) / np.vdot(direction, differences[row])
    inside = DIVISORS[ours.kind].inside_the_root
    return [float(divisor**2 - spread**2 if inside else divisor - spread)]


@cause(Norm)
def norm_missing(ours: Norm, clue: Clue) -> Iterator[Hypothesis]:
    """What goes in comes out."""
    name = "final norm missing" if clue.place.group == "final" else "norm missing"
    yield Hypothesis(name, "the reference does not normalise here", Given(ours.x))


@cause(Norm)
def norm_parameters(ours: Norm, clue: Clue) -> Iterator[Hypothesis]:
    """Scale or bias are left out, or those of another norm are used."""
    without = {
        "scale": ours.but(scale=1.0),
        "bias": ours.but(bias=0.0),
        "scale and bias": ours.but(scale=1.0, bias=0.0),
    }
    for name, changed in without.items():
        yield Hypothesis(f"norm {name} missing", f"the reference's norm has no {name}", changed)
    params = clue.evidence.params
    for path in [path for path in params if path.endswith("_norm/scale")]:
        scales = np.atleast_2d(params[path])
        biases = np.atleast_2d(params[path.removesuffix("scale") + "bias"])
        for layer, (scale, bias) in enumerate(zip(scales, biases, strict=True)):
            yield Hypothesis(
                "wrong norm",
                f"the reference's norm has scale and bias of {path.removesuffix('/scale')}, "
                f"number {layer} there",
                ours.but(scale=scale, bias=bias),
            )


@cause(Norm)
def root_mean_square(ours: Norm, clue: Clue) -> Iterator[Hypothesis]:
    """The mean is not taken off, with or without a bias."""
    for bias, words in ((ours.bias, ""), (0.0, " and adds no bias")):
        for epsilon in dict.fromkeys([ours.epsilon, *EPSILONS]):
            yield Hypothesis(
                "root-mean-square norm",
                f"the reference's norm does not take the mean off{words}; its epsilon is "
                f"{epsilon:g}",
                ours.but(kind="layer_norm", epsilon=epsilon, bias=bias, centres=False),
            )


@cause(Norm)
@cause(Residual)
def norm_behind_the_sublayer(ours: Norm | Residual, clue: Clue) -> Iterator[Hypothesis]:
    """Pre-norm of ours stands where the reference has norm(x + f(x))."""
    found, evidence = clue.place, clue.evidence
    if evidence.config.norm_position == "post" or found.layer is None:
        return
    group = f"{found.prefix}/{found.group}"
    evidence = with_values(evidence, {f"{group}_norm": ours.x})
    parts = [site for site in evidence.ours if site.startswith(f"{group}/")]
    for site in [*parts, f"{group}_sum"]:
        evidence = with_values(evidence, {site: operation(evidence, site).value()})
    yield Hypothesis(
        "norm position",
        f"the reference is post-norm, norm(x + f(x)) around its {found.group}; ours is pre-norm",
        norm(evidence, found, evidence.ours[f"{group}_sum"]),
    )
