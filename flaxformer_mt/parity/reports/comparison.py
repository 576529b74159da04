"""The results of a comparison, independent of how they are presented."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from flaxformer_mt.parity.program.diagnosis import Diagnosis
from flaxformer_mt.parity.trajectories import Trajectory

Section = Literal["values", "losses", "gradients", "steps"]

Verdict = Literal["agrees", "accepted", "differs"]

_SECTIONS: dict[str, Section] = {"loss": "losses", "gradient": "gradients", "steps": "steps"}


class Row(NamedTuple):
    """The difference of one value that both models compute."""

    site: str
    """A site of `trace.py`; "loss", "loss/<family>"; "gradient/<name in the reference>"; or
    "steps/<quantity>"."""
    shape: tuple[int, ...]
    max_abs: float
    """The largest absolute difference; inf where only one side is masked, infinite or NaN."""
    max_rel: float
    """The same, relative to the reference's largest magnitude at the site or, for gradients, over
    all parameters."""
    tolerance: float
    """The largest `max_abs` that passes."""
    reference_shape: tuple[int, ...] | None = None
    accepted: str = ""
    """Why a difference is accepted; empty unless a baseline has it."""

    @property
    def passed(self) -> bool:
        """Whether both sides agree; False where either is NaN."""
        return bool(self.max_abs <= self.tolerance)

    @property
    def verdict(self) -> Verdict:
        """The result in a word."""
        return "agrees" if self.passed else "accepted" if self.accepted else "differs"

    @property
    def section(self) -> Section:
        """The section of the report that the row belongs to."""
        return _SECTIONS.get(self.site.split("/")[0], "values")

    @property
    def excess(self) -> float:
        """The difference relative to the tolerance; above 1, or inf, if the row fails."""
        if self.passed:
            return self.max_abs / self.tolerance if self.max_abs else 0.0
        return self.max_abs / self.tolerance if self.tolerance > 0 else math.inf


class Finding(NamedTuple):
    """A site whose computation differs even from the reference's own preceding values."""

    site: str
    difference: float
    diagnosis: Diagnosis | None

    def sentence(self) -> str:
        """The difference and its cause."""
        differs = f"{self.site} differs by {format_difference(self.difference)}"
        if self.diagnosis is None:
            return f"{differs}: no known cause."
        cause, explanation, residual = self.diagnosis
        explained = (
            1.0 if residual < self.difference == math.inf else 1 - residual / self.difference
        )
        return f"{differs}: {cause}; {explanation}. This explains {explained:.4%} of it."


class SettingDifference(NamedTuple):
    """A setting that a module has otherwise than our configuration."""

    name: str
    ours: Any
    theirs: Any
    where: str
    """Where the reference's value was found, such as "encoder.layers.0.self_attn.num_heads"."""

    def __str__(self) -> str:
        return f"{self.name} is {self.ours} here, but {self.theirs} in {self.where}"


class Summary(NamedTuple):
    """The worst difference of each kind; None where nothing of that kind was compared."""

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
class Comparison:
    """The differences between our model and a reference, in the order of computation."""

    family: str
    dtype: str
    rows: tuple[Row, ...]
    untapped: tuple[str, ...] = ()
    """Sites that were not compared, because the reference has no tap for them."""
    kinks: int = 0
    """Hidden units of real tokens whose pre-activation has another sign on the other side, and no
    gradient there. In float32, rounding causes this for about one unit in ten million."""
    diagnosis: Diagnosis | None = None
    findings: tuple[Finding, ...] = ()
    never_run: tuple[str, ...] = ()
    """Sites that the reference does not compute: the modules of their taps were never called."""
    trajectory: Trajectory | None = None
    settings: tuple[SettingDifference, ...] = ()
    """Settings that the reference has otherwise, found before any value was computed."""
    notes: tuple[str, ...] = ()
    """What the comparison rests on, one sentence each."""

    @property
    def passed(self) -> bool:
        """Whether all settings and values agree, apart from accepted differences."""
        return not self.settings and self.first_divergence is None

    @property
    def first_divergence(self) -> Row | None:
        """The first row that differs, of `findings` or `never_run` if there are any.

        Later differences may be its consequence. Accepted differences do not count.
        """
        failed = [row for row in self.rows if row.verdict == "differs"]
        found = {finding.site for finding in self.findings} | {*self.never_run}
        return next((row for row in failed if row.site in found), failed[0] if failed else None)

    @property
    def summary(self) -> Summary:
        """The worst difference of each kind."""
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
        """The rows whose site is `prefix` or is nested below it."""
        return tuple(
            row for row in self.rows if row.site == prefix or row.site.startswith(f"{prefix}/")
        )

    def headline(self) -> str:
        """The result in one line."""
        compared = f"{self.family} in {self.dtype}: {len(self.rows)} values compared"
        first = self.first_divergence
        if self.settings:
            compared += f", settings differ ({', '.join(each.name for each in self.settings)})"
        accepted = sum(row.verdict == "accepted" for row in self.rows)
        if accepted:
            compared += f", {accepted} accepted differences"
        if first is None:
            return f"{compared}, all {'others ' if accepted else ''}agree"
        count = sum(row.verdict == "differs" for row in self.rows)
        return f"{compared}, {count} differ, the first is {first.site}"

    def explanation(self) -> str:
        """Why the sides differ, in a few sentences; empty if they agree."""
        found = [f"{each}: give {each.name}={each.theirs}." for each in self.settings]
        return " ".join(filter(None, [*found, self._explanation_of_values()]))

    def further(self) -> list[str]:
        """The other differences, one sentence each."""
        others = self.findings[1:]
        if not self.findings:
            return []
        if not others:
            return ["After correcting it, all other values agree."]
        return [
            f"After correcting it, {len(others)} more differ by themselves:",
            *(finding.sentence() for finding in others),
        ]

    def _explanation_of_values(self) -> str:
        first = self.first_divergence
        if first is None or (self.settings and self.diagnosis is None):
            return ""
        if first.reference_shape is not None:
            return (
                f"{first.site} has shape {first.reference_shape} in the reference, but "
                f"{first.shape} here: compare the settings that determine it, such as num_heads. "
                "If the module has another layout there, give taps=."
            )
        if self.diagnosis is not None:
            cause, explanation, residual = self.diagnosis
            left = f"This leaves a relative difference of {format_difference(residual)}."
            return f"Likely cause: {cause}; {explanation}. {left}"
        step = self.trajectory and self.trajectory.first_divergence
        if first.section == "steps" and step:
            return f"The {step.quantity} of step {step.step} differs: {step.explanation}."
        return {
            "values": f"No known cause explains it. Every value compared before {first.site} "
            "agrees: inspect the operation that computes it, or add taps for its inputs.",
            "losses": "The logits agree and no known convention explains the loss: check the "
            "smoothing, the padding, and the normalizer of the sum.",
            "gradients": "The losses agree and the gradients do not: check for detached, frozen or "
            "tied parameters.",
            "steps": "",
        }[first.section]

    def remarks(self) -> list[str]:
        """Caveats about the rows, one sentence each."""
        found = list(self.notes)
        if self.untapped:
            found.append(
                f"Not compared, because they have no tap: {len(self.untapped)} sites, the first is "
                f"{self.untapped[0]}."
            )
        if self.kinks and self.dtype == "float32":  # In float64, rounding is not the cause.
            found.append(
                f"Rounding gives {self.kinks} hidden units different signs before the ReLU, so "
                "their gradients may differ; repeat with another batch or in float64."
            )
        return found

    def closing(self) -> str:
        """The summary in one line."""
        summary = self.summary
        named = {
            "values": summary.values,
            "losses": summary.losses,
            "gradients": summary.gradients,
            "losses of the steps": summary.steps,
        }
        worst = ", ".join(
            f"{name} {format_difference(x)}" for name, x in named.items() if x is not None
        )
        parts = [f"worst relative differences: {worst}"] if worst else []
        if summary.logits is not None:
            parts.append(f"largest difference of the logits: {format_difference(summary.logits)}")
        return "; ".join([*parts, self.dtype])


def format_difference(value: float) -> str:
    """Formats a difference with two significant digits; "0" only if it is exactly 0."""
    return "0" if value == 0 else f"{value:.1e}"


def _largest(differences: Iterable[float]) -> float | None:
    return max((math.inf if math.isnan(x) else float(x) for x in differences), default=None)
