"""What a comparison found, and its forms: text for a terminal, JSON, a page of HTML."""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from flaxformer_mt.parity.diagnosis.diagnose import Diagnosis
from flaxformer_mt.parity.trajectory import Trajectory

Section = Literal["values", "losses", "gradients", "steps"]

_SECTIONS: dict[str, Section] = {"loss": "losses", "gradient": "gradients", "steps": "steps"}


class Row(NamedTuple):
    """One value that both sides have computed."""

    site: str
    """A site of `trace.py`; "loss", "loss/<family>"; "gradient/<name in the reference>"; or
    "steps/<quantity>"."""
    shape: tuple[int, ...]
    max_abs: float
    """The largest difference; inf where one side hides or lacks what the other has."""
    max_rel: float
    """The same, as a share of the reference's largest magnitude: at the site, or, for gradients,
    of all of them."""
    tolerance: float
    """What `max_abs` may be."""

    @property
    def passed(self) -> bool:
        """Whether both sides agree; never where one of them is NaN."""
        return bool(self.max_abs <= self.tolerance)

    @property
    def section(self) -> Section:
        """What kind of value this is."""
        return _SECTIONS.get(self.site.split("/")[0], "values")

    @property
    def excess(self) -> float:
        """The difference as a share of the tolerance; above 1, or inf, if the sides differ."""
        if self.passed:
            return self.max_abs / self.tolerance if self.max_abs else 0.0
        return self.max_abs / self.tolerance if self.tolerance > 0 else math.inf


class Summary(NamedTuple):
    """The worst figure of each kind; None where nothing of that kind was compared."""

    values: float | None
    """Relative."""
    logits: float | None
    """Absolute."""
    losses: float | None
    """Relative, over all conventions."""
    gradients: float | None
    """Relative to the largest gradient."""
    steps: float | None
    """Relative, of the loss, over all optimizer steps."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A comparison of our model with a reference, in the order of computation."""

    family: str
    dtype: str
    rows: tuple[Row, ...]
    untapped: tuple[str, ...] = ()
    """Sites of which it is not known where the reference computes them; they are not compared."""
    kinks: int = 0
    """Hidden units of real tokens that rounding has put on the two sides of the ReLU's kink, so
    that one side has their gradient and the other has none. It happens in float32, to one unit in
    ten million or so, and is nobody's fault; another batch has others, or none."""
    diagnosis: Diagnosis | None = None
    """The cause of the first difference, if there is one and it is among the known ones."""
    trajectory: Trajectory | None = None
    """The optimizer steps, if any were asked for."""

    @property
    def passed(self) -> bool:
        """Whether all values agree."""
        return all(row.passed for row in self.rows)

    @property
    def first_divergence(self) -> Row | None:
        """The first row out of tolerance: whatever follows may be its consequence."""
        return next((row for row in self.rows if not row.passed), None)

    @property
    def summary(self) -> Summary:
        """The figures that one would quote."""
        of_section = {
            section: _largest(row.max_rel for row in self.rows if row.section == section)
            for section in ("values", "losses", "gradients")
        }
        return Summary(
            logits=_largest(row.max_abs for row in self.select("logits")),
            steps=_largest(row.max_rel for row in self.select("steps/loss")),
            **of_section,
        )

    def select(self, prefix: str) -> tuple[Row, ...]:
        """The rows whose site is `prefix` or lies below it."""
        return tuple(
            row for row in self.rows if row.site == prefix or row.site.startswith(f"{prefix}/")
        )

    def headline(self) -> str:
        """The result, in one line."""
        compared = f"{self.family} in {self.dtype}: {len(self.rows)} values compared"
        first = self.first_divergence
        if first is None:
            return f"{compared}, all agree"
        count = sum(not row.passed for row in self.rows)
        return f"{compared}, {count} differ, the first is {first.site}"

    def explanation(self) -> str:
        """Why the sides differ, in one or two sentences; empty if they do not."""
        first = self.first_divergence
        if first is None:
            return ""
        if self.diagnosis is not None:
            return (
                f"Likely cause: {self.diagnosis.cause}; {self.diagnosis.explanation}. "
                f"This leaves a relative difference of {figure(self.diagnosis.residual)}."
            )
        step = self.trajectory and self.trajectory.first_divergence
        if first.section == "steps" and step:
            return f"The {step.quantity} of step {step.step} differs: {step.explanation}."
        return {
            "values": f"No known cause explains it. All that was compared before {first.site} "
            "agrees: look at what computes it, or compare more of what goes into it.",
            "losses": "The logits agree and no known convention explains the loss: look at the "
            "smoothing, at padding, and at what the sum is divided by.",
            "gradients": "The losses agree and the gradients do not: look at what is detached, "
            "frozen or tied.",
            "steps": "",
        }[first.section]

    def remarks(self) -> list[str]:
        """What else one has to know to read the rows, a sentence each."""
        found = []
        if self.untapped:
            found.append(
                f"Not compared, because they have no tap: {len(self.untapped)} sites, the first is "
                f"{self.untapped[0]}."
            )
        if self.kinks:
            found.append(
                f"Rounding puts {self.kinks} hidden units on the two sides of the ReLU's kink, so "
                "gradients may differ there; another batch or float64 tells."
            )
        return found

    def closing(self) -> str:
        """The figures of the summary, in one line."""
        summary = self.summary
        named = {
            "values": summary.values,
            "losses": summary.losses,
            "gradients": summary.gradients,
            "losses of the steps": summary.steps,
        }
        worst = ", ".join(f"{name} {figure(x)}" for name, x in named.items() if x is not None)
        parts = [f"worst relative differences: {worst}"] if worst else []
        if summary.logits is not None:
            parts.append(f"largest difference of the logits: {figure(summary.logits)}")
        return "; ".join([*parts, self.dtype])

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, verbose: bool = False, width: int = 100, color: bool = False) -> str:
        """A table for the terminal; without `verbose`, what agrees has one line a layer."""
        from flaxformer_mt.parity.reports.text import to_text

        return to_text(self, verbose, width, color)

    def to_html(self) -> str:
        """A page of its own: all rows, and the plot of the steps if there were any.

        Raises:
          UserError: there were steps, and matplotlib is not installed.
        """
        from flaxformer_mt.parity.reports.html import to_html

        return to_html(self)

    def to_json(self) -> str:
        """All rows and figures; what JSON cannot say is "inf", "-inf" or "nan"."""
        first = self.first_divergence
        values = {
            "family": self.family,
            "dtype": self.dtype,
            "passed": self.passed,
            "summary": self.summary._asdict(),
            "untapped": self.untapped,
            "kinks": self.kinks,
            "first_divergence": first and first.site,
            "diagnosis": self.diagnosis and self.diagnosis._asdict(),
            "rows": [
                row._asdict() | {"section": row.section, "passed": row.passed} for row in self.rows
            ],
            "trajectory": self.trajectory and _trajectory_as_dict(self.trajectory),
        }
        return json.dumps(finite(values), indent=2, allow_nan=False) + "\n"


def figure(value: float) -> str:
    """A difference with as many digits as mean something; "0" only if there is none."""
    return "0" if value == 0 else f"{value:.1e}"


def finite(value: Any) -> Any:
    """`value` in which numbers that JSON does not know are strings."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
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


def _largest(figures: Iterable[float]) -> float | None:
    """The largest, NaN counting as inf; None if there are none."""
    return max((math.inf if math.isnan(x) else float(x) for x in figures), default=None)
