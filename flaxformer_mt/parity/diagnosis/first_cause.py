"""Finds the differences of two models, each by itself, and their known causes.

Each value is computed from the reference's values of the preceding sites, as if all earlier
differences had been corrected: it differs only if the computation between them does. As its inputs
are known, each known cause (`causes`) predicts the reference's value, and the diagnosis is the
cause whose prediction is right. The cause may also be at a preceding site without a tap: its
consequences are then computed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.registry import Candidate, SuspectSite, candidates
from flaxformer_mt.parity.diagnosis.inputs import (
    Diagnosis,
    DiagnosisInputs,
    Select,
    most_specific,
    parse_site,
    relative_difference,
    select_rows,
    testing,
)
from flaxformer_mt.parity.diagnosis.operations import Operation
from flaxformer_mt.parity.reports.comparison import Finding
from flaxformer_mt.parity.rows import VALUES

MAX_UNTAPPED_SIZE = 10**7
"""The limit of the search through untapped sites: their number times the elements they hold. The
consequences of each candidate are computed through all of them, which may take a minute."""


class Model(Protocol):
    """Our model, whose values can be replaced by the reference's."""

    def predict(self, site: str) -> np.ndarray | None:
        """Computes the value of a site from the values that are set; None if that is unknown."""

    def explain(self, site: str, expected: np.ndarray) -> Diagnosis | None:
        """Returns the known cause that explains the reference's value of a site, if any."""

    def set(self, site: str, predicted: np.ndarray, expected: np.ndarray | None) -> None:
        """Sets the value of a site: the reference's, or what was predicted if it has none."""


def find(
    model: Model,
    sites: Sequence[str],
    theirs: Mapping[str, np.ndarray],
    select: Select,
    dtype: str,
) -> Iterator[Finding]:
    """Yields the sites whose computation differs, in the order of `sites`, with their causes.

    `model` is changed; `theirs` are the reference's values, and `dtype` determines the tolerance.
    """
    floor = 0.0 if dtype == "float64" else 1.0
    for site in sites:
        predicted = model.predict(site)
        if predicted is None:
            continue
        expected = theirs.get(site)
        if expected is not None:
            found = relative_difference(select(site, predicted), select(site, expected), floor)
            if not found <= VALUES[dtype]:
                yield Finding(site, found, model.explain(site, expected))
        model.set(site, predicted, expected)


class FamilyValues:
    """Our model as equations, whose values become the reference's; see `Model`."""

    def __init__(self, inputs: DiagnosisInputs) -> None:
        self._inputs = inputs.in_float64()

    def predict(self, site: str) -> np.ndarray | None:
        """Computes the value of a site; None for what bare layers get."""
        operation = _operation(self._inputs, site)
        return None if operation is None else operation.value()

    def explain(self, site: str, expected: np.ndarray) -> Diagnosis | None:
        """Returns the known cause of a difference."""
        return diagnose(self._inputs._replace(site=site))

    def set(self, site: str, predicted: np.ndarray, expected: np.ndarray | None) -> None:
        """Sets the value of a site."""
        value = predicted if expected is None else np.asarray(expected, np.float64)
        self._inputs = self._inputs.with_value(site, value)


def diagnose(inputs: DiagnosisInputs) -> Diagnosis | None:
    """Returns the known cause that explains the difference best; None if there is none."""
    if inputs.site != "loss" and inputs.site not in inputs.theirs:
        return None  # Gradients and optimizer steps have no causes of their own.
    # Wrong candidates may divide by zero or overflow, which rules them out.
    with np.errstate(all="ignore"):
        return most_specific(_predictions(inputs.in_float64()), inputs.tolerance)


def _predictions(inputs: DiagnosisInputs) -> Iterator[Diagnosis]:
    expected = inputs.theirs.get(inputs.site, np.asarray(inputs.loss))
    for site in _suspects(inputs):
        operation = _operation(inputs, site)
        if operation is None:
            continue
        here = site == inputs.site
        where, theirs = ("", expected) if here else (f" (at {site})", None)
        for candidate in candidates(operation, SuspectSite(inputs, site, theirs)):
            # A wrong epsilon is rarely wrong in only one norm.
            for everywhere in (False,) if here else (True, False):
                with testing(candidate.cause, inputs.untested):
                    predicted = _consequence(inputs, site, candidate, everywhere)
                    residual = _residual(inputs, predicted, expected)
                    yield Diagnosis(candidate.cause, candidate.explanation + where, residual)


def _suspects(inputs: DiagnosisInputs) -> list[str]:
    if inputs.site == "loss":  # The logits have been compared.
        return [inputs.site]
    before = list(itertools.takewhile(lambda site: site != inputs.site, inputs.ours))[::-1]
    gap = list(itertools.takewhile(lambda site: site not in inputs.theirs, before))
    own = parse_site(inputs.site)._replace(part="")
    beside = [
        site
        for site in before[len(gap) :]
        if site not in inputs.theirs and parse_site(site)._replace(part="") == own
    ]
    sizes = np.cumsum([inputs.ours[site].size for site in gap])
    within_reach = [
        site for number, site in enumerate(gap) if number * sizes[number] <= MAX_UNTAPPED_SIZE
    ]
    return [inputs.site, *within_reach, *beside]


def _operation(inputs: DiagnosisInputs, site: str) -> Operation | None:
    try:
        return site_operations.operation(inputs, site)
    except site_operations.NotComputed:
        return None


def _consequence(
    inputs: DiagnosisInputs, site: str, candidate: Candidate, everywhere: bool
) -> np.ndarray | None:
    """Computes the value at the site of the difference if the candidate holds at `site`.

    Sites in between keep their values if they have a tap; the others are recomputed, with
    `everywhere` by the candidate with the same explanation. None if a shape differs or an input is
    unknown.
    """
    value = candidate.operation.value()
    if site == inputs.site:
        return value
    sites = list(inputs.ours)
    following = sites[sites.index(site) + 1 : sites.index(inputs.site) + 1]
    for later in following:
        if value.shape != inputs.ours[site].shape:
            return None
        if later in inputs.theirs and later != inputs.site:
            continue
        inputs = inputs.with_value(site, value)
        operation = _operation(inputs, later)
        if operation is None:
            return None
        if everywhere:
            operation = _same(inputs, later, operation, candidate)
        site, value = later, operation.value()
    return value


def _same(inputs: DiagnosisInputs, site: str, operation: Operation, like: Candidate) -> Operation:
    found = candidates(operation, SuspectSite(inputs, site, None))
    return next((h.operation for h in found if h.explanation == like.explanation), operation)


def _residual(inputs: DiagnosisInputs, predicted: np.ndarray | None, expected: np.ndarray) -> float:
    if predicted is None or predicted.shape != expected.shape:
        return np.inf
    if inputs.site != "loss":
        predicted, expected = (
            select_rows(inputs.site, array, inputs.real) for array in (predicted, expected)
        )
    # Where all is NaN, any constant that is solved for is, too, and would explain it.
    return np.inf if np.isnan(expected).all() else relative_difference(predicted, expected)
