"""The helper for tests: fails with the report."""

import os
from collections.abc import Mapping

from flaxformer_mt.parity.reports.baseline import judged, read_baseline
from flaxformer_mt.parity.reports.report import Report


def assert_parity(
    report: Report,
    *,
    baseline: str | os.PathLike[str] | None = None,
    tolerances: Mapping[str, float] = {},
) -> None:
    """Fails unless both sides agree, with the report as message.

    Args:
      report: from `compare` or another comparison.
      baseline: a file of accepted differences, see `reports/baseline.py`.
      tolerances: relative tolerances by site, or by pattern with *.

    Raises:
      AssertionError: something differs that is not accepted.
      UserError: the baseline cannot be read.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test.
    accepted = read_baseline(baseline) if baseline is not None else ()
    result = judged(report, tolerances, accepted)
    if not result.passed:
        raise AssertionError(result.to_text())
