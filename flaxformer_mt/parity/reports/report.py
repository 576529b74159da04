"""The report of a comparison, as terminal text, JSON or HTML."""

import json
import math
from typing import Any

from flaxformer_mt.parity.reports import html, junit, text
from flaxformer_mt.parity.reports.comparison import Comparison
from flaxformer_mt.parity.trajectories import Trajectory


class Report(Comparison):
    """A comparison that can be printed and written."""

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, verbose: bool = False, width: int = 100, color: bool = False) -> str:
        """Returns a table for the terminal; unless `verbose`, one line per layer that agrees."""
        return text.to_text(self, verbose, width, color)

    def to_html(self) -> str:
        """Returns a self-contained HTML page with all rows and a plot of the steps, if any."""
        return html.to_html(self)

    def to_junit(self) -> str:
        """Returns JUnit XML: one test case per value."""
        return junit.to_junit(self)

    def to_json(self) -> str:
        """Returns all rows and the summary as JSON; non-finite numbers are strings."""
        first = self.first_divergence
        values = {
            "family": self.family,
            "dtype": self.dtype,
            "passed": self.passed,
            "summary": self.summary._asdict(),
            "untapped": self.untapped,
            "kinks": self.kinks,
            "settings": [each._asdict() for each in self.settings],
            "notes": self.notes,
            "first_divergence": first and first.site,
            "diagnosis": self.diagnosis and self.diagnosis._asdict(),
            "never_run": self.never_run,
            "findings": [
                finding._asdict() | {"diagnosis": finding.diagnosis and finding.diagnosis._asdict()}
                for finding in self.findings
            ],
            "rows": [
                row._asdict() | {"section": row.section, "passed": row.passed} for row in self.rows
            ],
            "trajectory": self.trajectory and _trajectory_as_dict(self.trajectory),
        }
        return json.dumps(json_values(values), indent=2, allow_nan=False) + "\n"


def json_values(value: Any) -> Any:
    """Replaces the numbers that JSON cannot represent by "inf", "-inf" and "nan"."""
    if isinstance(value, dict):
        return {name: json_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def _trajectory_as_dict(trajectory: Trajectory) -> dict[str, Any]:
    first = trajectory.first_divergence
    curves = {
        "ours": trajectory.ours,
        "theirs": trajectory.theirs,
        "relative_differences": trajectory.differences(),
    }
    return {
        "tolerance": trajectory.tolerance,
        "first_divergence": first and first._asdict(),
    } | {
        side: {name: curve.tolist() for name, curve in of_side._asdict().items()}
        for side, of_side in curves.items()
    }
