"""The run folder of a trained model, as scripts and notebooks use it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.runs.folder import read_config, require_run
from flaxformer_mt.runs.layout import METRICS, CheckpointSelector
from flaxformer_mt.runs.metrics_file import read_metrics
from flaxformer_mt.runs.retention import best_step

if TYPE_CHECKING:
    from flaxformer_mt.decoding.translator import Translator
    from flaxformer_mt.runs.trained_model import TrainedModel


class Run:
    """A run folder.

        run = Run("runs/quickstart")
        run.config.model.d_model
        run.metrics("valid")[-1]["bleu"]
        run.translator().translate(["three small dogs"])

    Everything is read when it is asked for; a run that is being trained may be looked at.

    Args:
      folder: the run folder.

    Raises:
      UserError: it is not a run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        require_run(folder)
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> ExperimentConfig:
        """The configuration, as it was given."""
        return read_config(self.folder)

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """Returns the rows of `metrics.jsonl`, in order.

        Args:
          split: only those of "train", "valid" or "test".

        Raises:
          UserError: the file is damaged.
        """
        rows = read_metrics(self.folder / METRICS)
        return [row for row in rows if split in (None, row["split"])]

    def checkpoints(self, announce: Callable[[str], None] = print) -> list[int]:
        """Verifies all checkpoints and returns the steps of those that are intact, ascending.

        Args:
          announce: called with one line for each damaged checkpoint.
        """
        return sorted(self._scores(announce))

    @property
    def latest_step(self) -> int | None:
        """The step of the newest intact checkpoint; None without one."""
        return max(self._scores(), default=None)

    @property
    def best_step(self) -> int | None:
        """The step of the best intact checkpoint, the newest if none was validated."""
        return best_step(self._scores())

    def model(self, checkpoint: CheckpointSelector = "best") -> "TrainedModel":
        """Loads the model of a checkpoint.

        Raises:
          UserError: it cannot be read.
        """
        from flaxformer_mt.runs.trained_model import load_run

        return load_run(self.folder, checkpoint)

    def translator(self, checkpoint: CheckpointSelector = "best") -> "Translator":
        """Loads a translator with the parameters of a checkpoint; errors as in `model`."""
        from flaxformer_mt.decoding.translator import Translator

        return Translator.from_runs([self.model(checkpoint)])

    def _scores(self, announce: Callable[[str], None] = print) -> dict[int, float]:
        from flaxformer_mt.runs.checkpoint import whole_checkpoints

        return whole_checkpoints(self.folder, announce)
