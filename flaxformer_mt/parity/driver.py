"""The driver of every comparison: values of both sides, rows, findings, notes, report."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from flaxformer_mt.parity.diagnosis.first_cause import Model, find
from flaxformer_mt.parity.diagnosis.inputs import Diagnosis, Select
from flaxformer_mt.parity.reports.comparison import Row
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.rows import VALUES, gradient_rows, step_rows, value_row
from flaxformer_mt.parity.settings import SettingDifference
from flaxformer_mt.parity.sides import Side
from flaxformer_mt.parity.trace import Values
from flaxformer_mt.parity.trajectories import Trajectory


def compared(
    name: str,
    dtype: str,
    ours: Side,
    theirs: Side,
    select: Select,
    *,
    steps: Trajectory | None = None,
    settings: tuple[SettingDifference, ...] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Returns the report on two sides, without causes, in the order of our values."""
    rows = [*_value_rows(ours.values, theirs, select, dtype)]
    for loss, value in theirs.losses.items():
        rows.append(value_row(loss, np.array(ours.losses[loss]), np.array(value), dtype))
    rows += gradient_rows(ours.gradients, theirs.gradients, dtype)
    if steps is not None:
        rows += step_rows(steps)
    tapped = {*theirs.values, *theirs.never_run}
    return Report(
        name,
        dtype,
        tuple(rows),
        untapped=tuple(site for site in ours.values if site not in tapped),
        never_run=theirs.never_run,
        trajectory=steps,
        settings=settings,
        notes=tuple(notes),
    )


def _value_rows(ours: Values, theirs: Side, select: Select, dtype: str) -> Iterator[Row]:
    for site, value in ours.items():
        if site in theirs.never_run:
            yield Row(site, value.shape, math.inf, math.inf, VALUES[dtype])
        if site not in theirs.values:
            continue
        expected = theirs.values[site]
        if expected.shape != value.shape:
            yield Row(site, value.shape, math.inf, math.inf, VALUES[dtype], expected.shape)
            continue
        yield value_row(site, select(site, value), select(site, expected), dtype)


def explained(
    report: Report,
    theirs: Values,
    select: Select,
    *,
    model: Model | None = None,
    sites: Sequence[str] = (),
    diagnosis_of: Callable[[str], Diagnosis | None] = lambda site: None,
    gradient_notes: Callable[[], Sequence[str]] = tuple,
) -> Report:
    """Returns a report with the causes of its differences.

    Every differing site of `model` is found; `sites` has all of its sites in the order of the data
    flow, and `theirs` the reference's values whose shapes are ours. Without findings,
    `diagnosis_of` has the cause of the first difference. `gradient_notes` says where gradients
    begin to differ.
    """
    first = next((row for row in report.rows if not row.passed), None)
    if first is None or first.reference_shape is not None:
        return report
    if first.section == "gradients":
        report = dataclasses.replace(report, notes=(*report.notes, *gradient_notes()))
    if first.section == "values" and model is not None:
        findings = tuple(find(model, sites, theirs, select, report.dtype))
        report = dataclasses.replace(report, findings=findings)
        if findings:
            return dataclasses.replace(report, diagnosis=findings[0].diagnosis)
    first = report.first_divergence or first
    return dataclasses.replace(report, diagnosis=diagnosis_of(first.site))
