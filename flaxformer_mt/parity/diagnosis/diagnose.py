"""Finds the cause of a first difference among the known ones, by computing what each would give.

At the first site where the two sides differ, what they compute it from is known: all sites before
it agree. So each known cause (`causes`) predicts the reference's value, and the one whose
prediction is right is the diagnosis. Where sites before have no tap, the cause may be at any of
these: what follows from it is then computed up to the first site that shows a difference.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flaxformer_mt.parity.diagnosis import equations
from flaxformer_mt.parity.diagnosis.causes import Clue, Hypothesis, hypotheses
from flaxformer_mt.parity.diagnosis.equations import NotComputed, Operation
from flaxformer_mt.parity.diagnosis.evidence import Evidence, place, select_rows, with_values

__all__ = ["Diagnosis", "Evidence", "diagnose"]


MOST_NUMBERS = 10**7
"""How far before a difference causes are sought where nothing is tapped: sites there, times the
numbers that they hold. A hypothesis about each is followed through all of them, which may
take a minute."""


class Diagnosis(NamedTuple):
    """A known cause, and how well it explains the difference."""

    cause: str
    """Short and stable, as "norm epsilon"."""
    explanation: str
    """One sentence with the numbers: what the reference does, and what our model does."""
    residual: float
    """What is left of the difference, as a share of the largest magnitude, if the cause is
    assumed."""


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """The known cause that explains the difference best; None if none does within tolerance."""
    if evidence.site != "loss" and evidence.site not in evidence.theirs:
        return None  # Gradients and optimizer steps have no causes of their own.
    evidence = _in_float64(evidence)
    # Wrong hypotheses may divide by zero or overflow, and are then no explanation.
    with np.errstate(all="ignore"):
        found = [
            diagnosis
            for diagnosis in _predictions(evidence)
            if diagnosis.residual <= evidence.tolerance
        ]
    if not found:
        return None
    # Of those that are right but for rounding the first is the most specific.
    best = min(diagnosis.residual for diagnosis in found)
    enough = 10 * best + 0.05 * evidence.tolerance
    return next(diagnosis for diagnosis in found if diagnosis.residual <= enough)


def _in_float64(evidence: Evidence) -> Evidence:
    def widened(arrays):
        return {name: np.asarray(array, np.float64) for name, array in arrays.items()}

    return evidence._replace(
        params=widened(evidence.params),
        ours=widened(evidence.ours),
        theirs=widened(evidence.theirs),
    )


def _predictions(evidence: Evidence) -> Iterator[Diagnosis]:
    """Every hypothesis, with what it leaves unexplained."""
    expected = evidence.theirs.get(evidence.site, np.asarray(evidence.loss))
    for site in _suspects(evidence):
        operation = _operation(evidence, site)
        if operation is None:
            continue
        here = site == evidence.site
        where, theirs = ("", expected) if here else (f" (at {site})", None)
        for hypothesis in hypotheses(operation, Clue(evidence, site, theirs)):
            # A wrong epsilon is seldom wrong in one norm alone.
            for everywhere in (False,) if here else (True, False):
                predicted = _consequence(evidence, site, hypothesis, everywhere)
                residual = _residual(evidence, predicted, expected)
                yield Diagnosis(hypothesis.cause, hypothesis.explanation + where, residual)


def _suspects(evidence: Evidence) -> list[str]:
    """The site, and those before it that no tap has cleared, nearest first."""
    if evidence.site == "loss":  # The logits have been compared.
        return [evidence.site]
    before = list(itertools.takewhile(lambda site: site != evidence.site, evidence.ours))[::-1]
    gap = list(itertools.takewhile(lambda site: site not in evidence.theirs, before))
    own = place(evidence.site)._replace(part="")
    beside = [
        site
        for site in before[len(gap) :]
        if site not in evidence.theirs and place(site)._replace(part="") == own
    ]
    sizes = np.cumsum([evidence.ours[site].size for site in gap])
    within_reach = [
        site for number, site in enumerate(gap) if number * sizes[number] <= MOST_NUMBERS
    ]
    return [evidence.site, *within_reach, *beside]


def _operation(evidence: Evidence, site: str) -> Operation | None:
    """What our model computes there; None if it is not known from what."""
    try:
        return equations.operation(evidence, site)
    except NotComputed:
        return None


def _consequence(
    evidence: Evidence, site: str, hypothesis: Hypothesis, everywhere: bool
) -> np.ndarray | None:
    """The value at the site of the difference if the hypothesis holds at `site`.

    Sites between them that have a tap are as they are; the others follow.

    Args:
      evidence: of the difference.
      site: where the cause is assumed to be.
      hypothesis: the cause.
      everywhere: the hypothesis in the same words is assumed of the sites that follow, too.

    Returns:
      The value; None where the hypothesis gives one of another shape, or what follows is unknown.
    """
    value = hypothesis.operation.value()
    if site == evidence.site:
        return value
    sites = list(evidence.ours)
    following = sites[sites.index(site) + 1 : sites.index(evidence.site) + 1]
    for later in following:
        if value.shape != evidence.ours[site].shape:
            return None
        if later in evidence.theirs and later != evidence.site:
            continue
        evidence = with_values(evidence, {site: value})
        operation = _operation(evidence, later)
        if operation is None:
            return None
        if everywhere:
            operation = _same(evidence, later, operation, hypothesis)
        site, value = later, operation.value()
    return value


def _same(evidence: Evidence, site: str, operation: Operation, like: Hypothesis) -> Operation:
    """The operation under the hypothesis that is in the same words; as it is, if there is none."""
    found = hypotheses(operation, Clue(evidence, site, None))
    return next((h.operation for h in found if h.explanation == like.explanation), operation)


def _residual(evidence: Evidence, predicted: np.ndarray | None, expected: np.ndarray) -> float:
    """The largest difference as a share of the largest magnitude, in rows of real tokens."""
    if predicted is None or predicted.shape != expected.shape:
        return np.inf
    if evidence.site != "loss":
        predicted, expected = (
            select_rows(evidence.site, array, evidence.real) for array in (predicted, expected)
        )
    finite = np.isfinite(expected)
    if not np.array_equal(predicted[~finite], expected[~finite]):
        return np.inf
    difference = np.max(np.abs(predicted - expected), where=finite, initial=0.0)
    largest = np.max(np.abs(expected), where=finite, initial=0.0)
    return float(difference / largest) if largest else float(difference)
