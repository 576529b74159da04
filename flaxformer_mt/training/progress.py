"""What a run has to remember besides its state, as plain values that JSON can hold."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config import ValidationMetric
from flaxformer_mt.data.stream.batches import DataPosition

_LESS_IS_BETTER = {"loss", "cross_entropy", "perplexity"}


def merit(metric: ValidationMetric, figures: Mapping[str, Any]) -> float:
    """How good a validation is by one of its figures; more is better.

    Returns:
      The figure, with its sign changed if less of it is better; -inf if it is missing or not
      finite.
    """
    value = figures.get(metric, math.nan)
    if not math.isfinite(value):
        return -math.inf
    return -value if metric in _LESS_IS_BETTER else value


@dataclasses.dataclass(frozen=True)
class BestSoFar:
    """The best of a run's validations by one figure."""

    merit: float | None = None
    """See `merit`; None before the first validation that has the figure."""
    validations_since: int = 0
    """Validations after it, none of which was better."""

    def after(self, merit: float, min_delta: float = 0.0) -> "BestSoFar":
        """The same after one more validation, which is better if it is so by over `min_delta`."""
        if math.isfinite(merit) and (self.merit is None or merit > self.merit + min_delta):
            return BestSoFar(merit)
        return BestSoFar(self.merit, self.validations_since + 1)


@dataclasses.dataclass
class Sums:
    """The figures of some steps, added up in float64, and the time that they took."""

    figures: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """For each figure the sum, and the weight to divide it by."""
    seconds: float = 0.0
    """Time of the steps alone, without validations and checkpoints."""
    seconds_waited: float = 0.0
    """Part of it in which there was no batch."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the figures of a step: for each a sum and a weight, as `train_step` returns them."""
        for name, (value, weight) in metrics.items():
            total, total_weight = self.figures.get(name, (0.0, 0.0))
            self.figures[name] = (total + float(value), total_weight + float(weight))

    def means(self) -> dict[str, float]:
        """Each figure by its weight, but for those that nothing counted for."""
        return {name: total / weight for name, (total, weight) in self.figures.items() if weight}


@dataclasses.dataclass
class Progress:
    """Where a run stands."""

    position: DataPosition = dataclasses.field(default_factory=DataPosition)
    """Of the next batch."""
    interval: Sums = dataclasses.field(default_factory=Sums)
    """Of the steps since the last line of training figures."""
    skipped: int = 0
    """Steps that changed nothing, since the start."""
    best: BestSoFar = BestSoFar()
    """By `train.best_metric`."""
    stopping: BestSoFar = BestSoFar()
    """By `train.early_stopping_metric`."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**dataclasses.asdict(self), "position": self.position._asdict()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Progress":
        """The inverse of `to_json`."""
        interval = values["interval"]
        figures = {name: (total, weight) for name, (total, weight) in interval["figures"].items()}
        return cls(
            position=DataPosition(**values["position"]),
            interval=Sums(figures, interval["seconds"], interval["seconds_waited"]),
            skipped=values["skipped"],
            best=BestSoFar(**values["best"]),
            stopping=BestSoFar(**values["stopping"]),
        )
