"""Checks all families, and makes one table of it."""

import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.families import Size, check_family
from flaxformer_mt.parity.reports.report import Report, figure, finite
from flaxformer_mt.presets import FAMILIES

BEGIN = "<!-- table: made by flaxformer-mt parity --family all --markdown docs/parity.md -->"
END = "<!-- end of table -->"


class Figures(NamedTuple):
    """How far a family is from its reference: a line of the table."""

    family: str
    values: float | None
    """float64: the worst relative difference of any value."""
    gradients: float | None
    """float64: the worst difference of any gradient, relative to the largest."""
    steps: float | None
    """float64: the worst relative difference of the loss at any optimizer step, if there were."""
    logits_float32: float | None
    """The largest difference of the logits, absolute."""
    gradients_float32: float | None
    """As `gradients`."""

    def cells(self) -> list[str]:
        """As they are printed."""
        family, *numbers = self
        return [family, *("-" if number is None else figure(number) for number in numbers)]


class Checked(NamedTuple):
    """A family's two comparisons."""

    float64: Report
    float32: Report

    @property
    def figures(self) -> Figures:
        """The line of the table."""
        wide, narrow = self.float64.summary, self.float32.summary
        return Figures(
            self.float64.family,
            wide.values, wide.gradients, wide.steps, narrow.logits, narrow.gradients,
        )  # fmt: skip


class Survey(NamedTuple):
    """The comparisons of several families."""

    checked: tuple[Checked, ...]
    num_steps: int

    @property
    def passed(self) -> bool:
        """Whether all values of all families agree."""
        return not self.failed

    @property
    def failed(self) -> list[Report]:
        """The reports that say otherwise."""
        return [report for both in self.checked for report in both if not report.passed]

    @property
    def headings(self) -> tuple[str, ...]:
        """What stands over the columns of `Figures`."""
        steps = f"{self.num_steps} steps, float64"
        values, gradients = "values, float64", "gradients, float64"
        return "family", values, gradients, steps, "logits, float32", "gradients, float32"

    def to_text(self, *, verbose: bool = False, width: int = 100, color: bool = False) -> str:
        """The table for a terminal, and the report of each comparison that failed."""
        table = Table(*self.headings, box=box.SIMPLE, pad_edge=False, show_edge=False)
        for both in self.checked:
            failed = not (both.float64.passed and both.float32.passed)
            table.add_row(*both.figures.cells(), style="bold red" if failed else "")
        output = io.StringIO()
        Console(file=output, width=width, force_terminal=color, no_color=not color).print(table)
        reports = [
            report.to_text(verbose=verbose, width=width, color=color) for report in self.failed
        ]
        return "\n\n".join([output.getvalue().rstrip("\n"), *reports])

    def to_markdown(self) -> str:
        """The table for docs."""
        ruler = ["---", *["--:"] * (len(self.headings) - 1)]
        rows = [self.headings, ruler, *(both.figures.cells() for both in self.checked)]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def to_json(self) -> str:
        """The figures of every family, in full; what JSON cannot say is "inf" or "nan"."""
        families = [
            both.figures._asdict() | {"passed": both.float64.passed and both.float32.passed}
            for both in self.checked
        ]
        values = {"passed": self.passed, "num_steps": self.num_steps, "families": families}
        return json.dumps(finite(values), indent=2, allow_nan=False) + "\n"


def check_all(
    families: Iterable[str] = tuple(FAMILIES),
    *,
    size: Size = "toy",
    num_steps: int = 0,
    seed: int = 0,
    announce: Callable[[str], Any] = lambda comparison: None,
    **settings: Any,
) -> Survey:
    """Checks families with random weights in both dtypes, the optimizer steps in float64 only.

    Args:
      families: their names.
      size: as all that follows: see `families.check_family`.
      num_steps: of the comparison in float64.
      seed: of weights and sentences.
      announce: is told what is about to be compared.
      **settings: fields of every configuration.

    Raises:
      UserError: a family or setting cannot be used.
    """
    checked = []
    for family in families:
        announce(f"{family} in float64")
        wide = check_family(family, size=size, num_steps=num_steps, seed=seed, **settings)
        announce(f"{family} in float32")
        narrow = check_family(family, dtype="float32", size=size, seed=seed, **settings)
        checked.append(Checked(wide, narrow))
    return Survey(tuple(checked), num_steps)


def read_document(path: Path) -> str:
    """The text of a document that has a place for the table; of a new one, if there is no file.

    Raises:
      UserError: the file cannot be read, or has no such place.
    """
    if not path.exists():
        return f"{BEGIN}\n{END}\n"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not _PLACE.search(text):
        raise UserError(f"{path} has no place for the table: it needs the lines {BEGIN} and {END}")
    return text


def with_table(document: str, table: str) -> str:
    """The document with `table` in its place, instead of what is there."""
    return _PLACE.sub(lambda _: f"{BEGIN}\n{table}{END}", document, count=1)


_PLACE = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
