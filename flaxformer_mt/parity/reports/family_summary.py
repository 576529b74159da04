"""Compares several families with their references and tabulates the results."""

import io
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from flaxformer_mt.parity.families.check import Size, check_family
from flaxformer_mt.parity.reports.comparison import format_difference
from flaxformer_mt.parity.reports.report import Report, json_values
from flaxformer_mt.presets import FAMILIES


class FamilyReports(NamedTuple):
    """The reports of one family in both dtypes."""

    float64: Report
    float32: Report

    @property
    def passed(self) -> bool:
        """Whether every value agrees."""
        return self.float64.passed and self.float32.passed

    @property
    def differences(self) -> dict[str, float | None]:
        """The worst differences, relative but for the logits: one row of the table."""
        wide, narrow = self.float64.summary, self.float32.summary
        return {
            "values": wide.values,
            "gradients": wide.gradients,
            "steps": wide.steps,
            "logits_float32": narrow.logits,
            "gradients_float32": narrow.gradients,
        }

    def cells(self) -> list[str]:
        """The cells as printed."""
        numbers = self.differences.values()
        found = ("-" if number is None else format_difference(number) for number in numbers)
        return [self.float64.family, *found]


class FamilySummary(NamedTuple):
    """The reports of several families."""

    reports: tuple[FamilyReports, ...]
    num_steps: int

    @property
    def passed(self) -> bool:
        """Whether every value of every family agrees."""
        return not self.failed

    @property
    def failed(self) -> list[Report]:
        """The reports that found a difference."""
        return [report for both in self.reports for report in both if not report.passed]

    @property
    def headings(self) -> tuple[str, ...]:
        """The column headings."""
        steps = f"{self.num_steps} steps, float64"
        values, gradients = "values, float64", "gradients, float64"
        return "family", values, gradients, steps, "logits, float32", "gradients, float32"

    def to_text(self, *, verbose: bool = False, width: int = 100, color: bool = False) -> str:
        """Returns the table for a terminal, followed by the reports of failed comparisons."""
        table = Table(*self.headings, box=box.SIMPLE, pad_edge=False, show_edge=False)
        for both in self.reports:
            table.add_row(*both.cells(), style="" if both.passed else "bold red")
        output = io.StringIO()
        Console(file=output, width=width, force_terminal=color, no_color=not color).print(table)
        failures = [
            report.to_text(verbose=verbose, width=width, color=color) for report in self.failed
        ]
        return "\n\n".join([output.getvalue().rstrip("\n"), *failures])

    def to_json(self) -> str:
        """Returns the differences of every family as JSON."""
        families = [
            {"family": both.float64.family, **both.differences, "passed": both.passed}
            for both in self.reports
        ]
        values = {"passed": self.passed, "num_steps": self.num_steps, "families": families}
        return json.dumps(json_values(values), indent=2, allow_nan=False) + "\n"


def check_all(
    families: Iterable[str] = tuple(FAMILIES),
    *,
    size: Size = "toy",
    num_steps: int = 0,
    seed: int = 0,
    announce: Callable[[str], Any] = lambda comparison: None,
    **settings: Any,
) -> FamilySummary:
    """Compares families with random weights in both dtypes; optimizer steps in float64 only."""
    reports = []
    for family in families:
        announce(f"{family} in float64")
        wide = check_family(family, size=size, num_steps=num_steps, seed=seed, **settings)
        announce(f"{family} in float32")
        narrow = check_family(family, dtype="float32", size=size, seed=seed, **settings)
        reports.append(FamilyReports(wide, narrow))
    return FamilySummary(tuple(reports), num_steps)
