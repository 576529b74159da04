"""The progress of a run: what the training loop keeps besides the training state."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from flaxformer_mt.data.stream.batches import DataPosition


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

    def to_json(self) -> dict[str, Any]:
        """Uses the keys of checkpoints of earlier versions."""
        return {"merit": self.score, "validations_since": self.validations_since}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BestSoFar":
        """Returns the inverse of `to_json`."""
        return cls(values["merit"], values["validations_since"])


@dataclasses.dataclass
class Sums:
    """Metrics of several steps, summed in float64, and the time that the steps took."""

    metrics: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """For each metric the sum, and the weight to divide it by."""
    seconds: float = 0.0
    """Time of the steps, without validations and checkpoints."""
    seconds_waited: float = 0.0
    """Time of that spent waiting for batches."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a step, each a sum and a weight, as `train_step` returns them."""
        for name, (value, weight) in metrics.items():
            total, total_weight = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (total + float(value), total_weight + float(weight))

    def means(self) -> dict[str, float]:
        """Returns each metric divided by its weight, without those of weight 0."""
        return {name: total / weight for name, (total, weight) in self.metrics.items() if weight}

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            # As in checkpoints of earlier versions. A copy: the checkpoint is written later.
            "figures": dict(self.metrics),
            "seconds": self.seconds,
            "seconds_waited": self.seconds_waited,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Sums":
        """Returns the inverse of `to_json`."""
        metrics = {name: (total, weight) for name, (total, weight) in values["figures"].items()}
        if "loss" in metrics:  # Earlier versions do not have the following.
            metrics.setdefault("target_tokens", (metrics["loss"][1], 1.0))
        return cls(metrics, values["seconds"], values["seconds_waited"])


@dataclasses.dataclass
class Progress:
    """The progress of a run; saved with every checkpoint."""

    position: DataPosition = dataclasses.field(default_factory=DataPosition)
    """Position of the next batch in the data."""
    interval: Sums = dataclasses.field(default_factory=Sums)
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
        """Returns JSON values."""
        return {
            "position": self.position._asdict(),
            "interval": self.interval.to_json(),
            "skipped": self.skipped,
            "skipped_in_a_row": [*self.skipped_in_a_row],
            "best": self.best.to_json(),
            "stopping": self.stopping.to_json(),
            "batch_shapes": self.batch_shapes,
            "validation_is_due": self.validation_is_due,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Progress":
        """Returns the inverse of `to_json`."""
        return cls(
            position=DataPosition(**values["position"]),
            interval=Sums.from_json(values["interval"]),
            skipped=values["skipped"],
            best=BestSoFar.from_json(values["best"]),
            stopping=BestSoFar.from_json(values["stopping"]),
            # Earlier versions do not have the following.
            skipped_in_a_row=[*values.get("skipped_in_a_row", ())],
            batch_shapes=tuple(values.get("batch_shapes", ())),
            validation_is_due=values.get("validation_is_due", False),
        )
