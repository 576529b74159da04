"""The progress of a run: what the training loop keeps besides the training state."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.input_files import checked


@dataclasses.dataclass(frozen=True)
class BestSoFar:
    """The best validation of a run so far, by one metric."""

    score: float | None = None
    """Its `ranking_score`; None before the first validation that has the metric."""
    validations_since: int = 0
    """Number of validations after it, none of which was better."""

    def after(self, score: float, min_delta: float = 0.0) -> "BestSoFar":
        """Returns the best after one more validation, which must improve by over `min_delta`."""
        if math.isfinite(score) and (self.score is None or score > self.score + min_delta):
            return BestSoFar(score)
        return BestSoFar(self.score, self.validations_since + 1)


@dataclasses.dataclass
class Interval:
    """Metrics of several steps, summed in float64, and the time that the steps took."""

    metrics: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """For each metric the sum, and the weight to divide it by."""
    seconds: float = 0.0
    """Time of the steps, without validations and checkpoints."""
    seconds_waited: float = 0.0
    """Time of that spent waiting for batches."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        for name, (value, weight) in metrics.items():
            total, total_weight = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (total + float(value), total_weight + float(weight))

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.metrics.items() if weight}


@dataclasses.dataclass
class Progress:
    """The progress of a run; saved with every checkpoint."""

    position: DataPosition = dataclasses.field(default_factory=DataPosition)
    """Position of the next batch in the data."""
    interval: Interval = dataclasses.field(default_factory=Interval)
    """Metrics of the steps since training metrics were last written."""
    skipped: int = 0
    """Number of steps skipped since the start."""
    best: BestSoFar = BestSoFar()
    """By `train.best_metric`."""
    stopping: BestSoFar = BestSoFar()
    """By `train.early_stopping_metric`."""
    batch_shapes: tuple[str, ...] = ()
    """Shapes for which the training step was compiled, in the order of their first batches."""
    skipped_in_a_row: list[str] = dataclasses.field(default_factory=list)
    """Causes for which the most recent steps were skipped; empty if the last one was not."""
    validation_is_due: bool = False
    """Whether the validation after the last step failed, and has to be repeated."""

    def add_shapes(self, batch_shapes: Iterable[str]) -> None:
        """Adds the shapes for which this process has compiled the training step."""
        self.batch_shapes = tuple(dict.fromkeys([*self.batch_shapes, *batch_shapes]))

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values. With several processes, each has to call this."""
        # A copy: the checkpoint is written later.
        return {**dataclasses.asdict(self), "position": self.position.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Progress":
        """Returns the inverse of `to_json`."""
        subject = "the progress of a checkpoint is"
        saved: dict[str, Any] = checked(values, subject, _Saved)
        position = DataPosition.from_json(saved["position"])
        return checked({**saved, "position": position}, subject, cls)


class _Saved(TypedDict):
    position: dict[str, Any]
