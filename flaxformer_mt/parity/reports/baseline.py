"""Accepted differences: a file with the sites, the largest difference and the reason of each.

docs/parity-in-ci.md has its format.
"""

import dataclasses
import fnmatch
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import checked, read_text
from flaxformer_mt.parity.reports.comparison import Row
from flaxformer_mt.parity.reports.report import Report

_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class AcceptedDifference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A known difference that does not fail a comparison."""

    site: _Text
    largest: float
    reason: _Text


class _Baseline(msgspec.Struct, forbid_unknown_fields=True):
    accepted: tuple[AcceptedDifference, ...]


def read_baseline(path: str | os.PathLike[str]) -> tuple[AcceptedDifference, ...]:
    """Reads a file of accepted differences."""
    try:
        content = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    found: _Baseline = checked(content, f"{path} is", _Baseline)
    return found.accepted


def judged(
    report: Report,
    tolerances: Mapping[str, float] = {},
    accepted: Sequence[AcceptedDifference] = (),
) -> Report:
    """Judges the rows of a report by other relative tolerances, and by accepted differences.

    The last tolerance that matches holds. Accepted differences that have disappeared are noted.
    """
    rows, used = [], set()
    for row in report.rows:
        row = _tolerated(row, tolerances)
        matching = (each for each in accepted if not row.passed and _accepts(each, row))
        if first := next(matching, None):
            used.add(first)
            row = row._replace(accepted=first.reason)
        rows.append(row)
    stale = [
        f"The accepted difference at {each.site} does not occur: remove it from the baseline."
        for each in accepted
        if each not in used
    ]
    unmatched = [
        f"--tolerance {pattern}: no compared site has this name."
        for pattern in tolerances
        if not any(fnmatch.fnmatchcase(row.site, pattern) for row in rows)
    ]
    differ = {row.site for row in rows if row.verdict == "differs"}
    found = dataclasses.replace(
        report,
        rows=tuple(rows),
        findings=tuple(finding for finding in report.findings if finding.site in differ),
        notes=(*report.notes, *stale, *unmatched),
    )
    before, after = report.first_divergence, found.first_divergence
    if after is None or before is None or after.site != before.site:
        causes = {finding.site: finding.diagnosis for finding in found.findings}
        diagnosis = None if after is None else causes.get(after.site)
        found = dataclasses.replace(found, diagnosis=diagnosis)
    return found


def _tolerated(row: Row, tolerances: Mapping[str, float]) -> Row:
    matching = [value for site, value in tolerances.items() if fnmatch.fnmatchcase(row.site, site)]
    if not matching or not row.max_rel or not math.isfinite(row.max_rel):
        return row
    return row._replace(tolerance=matching[-1] * row.max_abs / row.max_rel)


def _accepts(accepted: AcceptedDifference, row: Row) -> bool:
    return fnmatch.fnmatchcase(row.site, accepted.site) and row.max_rel <= accepted.largest


def assert_parity(
    report: Report,
    *,
    baseline: str | os.PathLike[str] | None = None,
    tolerances: Mapping[str, float] = {},
) -> None:
    """Fails with the report as message unless both sides agree, up to accepted differences.

    `baseline` is their file; `tolerances` are relative, by site, or by pattern with *.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test.
    accepted = read_baseline(baseline) if baseline is not None else ()
    result = judged(report, tolerances, accepted)
    if not result.passed:
        raise AssertionError(result.to_text())
