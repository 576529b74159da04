"""The report of a comparison, as terminal text, JSON or HTML."""

import dataclasses
import json
import math
from typing import Any

import numpy as np

from flaxformer_mt.parity.reports import html, junit, text
from flaxformer_mt.parity.reports.comparison import Comparison


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
        first, steps = self.first_divergence, self.trajectory
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "passed": self.passed,
            "summary": self.summary,
            "first_divergence": first and first.site,
            "rows": [
                row._asdict() | {"section": row.section, "passed": row.passed} for row in self.rows
            ],
            "trajectory": steps
            and {
                "tolerance": steps.tolerance,
                "first_divergence": steps.first_divergence,
                "ours": steps.ours,
                "theirs": steps.theirs,
                "relative_differences": steps.differences(),
            },
        }
        return json.dumps(json_values(values), indent=2, allow_nan=False) + "\n"


def json_values(value: Any) -> Any:
    """Replaces named tuples and arrays, and numbers that JSON lacks by "inf", "-inf" and "nan"."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: json_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [json_values(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value
