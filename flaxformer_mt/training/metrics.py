"""Figures of a run: from sums on a device to lines in its folder."""

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from rich.console import Console

from flaxformer_mt.data.batches import Batch
from flaxformer_mt.training.state import Params
from flaxformer_mt.training.step import Metrics

Figures: TypeAlias = Mapping[str, float | int | str]
"""What is reported of a step, by name."""


def means(metrics: Iterable[Metrics]) -> dict[str, float]:
    """The figures of several steps together, without those that nothing counted for."""
    totals: dict[str, tuple[float, float]] = {}
    for step in jax.device_get(list(metrics)):  # from here on in float64
        for name, (value, weight) in step.items():
            total, total_weight = totals.get(name, (0.0, 0.0))
            totals[name] = (total + float(value), total_weight + float(weight))
    return {name: total / weight for name, (total, weight) in totals.items() if weight}


def validate(
    eval_step: Callable[[Params, Batch], Metrics], params: Params, batches: Iterable[Batch]
) -> dict[str, float]:
    """Loss, perplexity and accuracy of a whole corpus.

    Args:
      eval_step: as compiled by a strategy.
      params: placed by that strategy.
      batches: the corpus, placed likewise.

    Returns:
      "loss" (what training minimises), "accuracy", "cross_entropy" (the loss without label
      smoothing) and "perplexity", its exponential.
    """
    figures = means([eval_step(params, batch) for batch in batches])
    return {**figures, "perplexity": float(np.exp(figures["cross_entropy"]))}


class Writer(Protocol):
    """Something that wants to know a run's figures."""

    def rewind(self, step: int) -> None:
        """Forgets what it was told about later steps; called once, before the first `write`."""

    def write(self, step: int, split: str, figures: Figures) -> None:
        """Takes the figures of a split ("train", "valid") after a step."""

    def close(self) -> None:
        """Nothing more will come."""


class JsonLinesWriter:
    """`metrics.jsonl`: {"step": 50, "split": "train", "loss": ...}, one object a line."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def rewind(self, step: int) -> None:
        """See `Writer`. A half-written last line, of a run that was killed, goes too.

        So do figures of the test corpus: they belong to the end of a run, which is yet to come.
        """
        kept = []
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines()
            kept = [line + "\n" for line in lines if _stays(line, step)]
        replacement = self._path.with_name(self._path.name + ".new")
        replacement.write_text("".join(kept), encoding="utf-8")
        os.replace(replacement, self._path)

    def write(self, step: int, split: str, figures: Figures) -> None:
        """See `Writer`. JSON knows neither infinity nor NaN: they become null."""
        line: dict[str, float | int | str | None] = {"step": step, "split": split}
        for name, value in figures.items():
            writable = isinstance(value, str) or math.isfinite(value)
            line[name] = value if writable else None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        """See `Writer`."""


class TensorBoardWriter:
    """Event files for TensorBoard, a chart for each "split/figure"."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._first_step = 0
        self._writer: Any = None

    def rewind(self, step: int) -> None:
        """See `Writer`."""
        self._first_step = step

    def write(self, step: int, split: str, figures: Figures) -> None:
        """See `Writer`. Text is left out."""
        if self._writer is None:  # nothing to write: no import, no file
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=self._first_step + 1)
        for name, value in figures.items():
            if not isinstance(value, str):
                self._writer.add_scalar(f"{split}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `Writer`."""
        if self._writer is not None:
            self._writer.close()


class ConsoleWriter:
    """A line that is rewritten in a terminal; a line each time elsewhere."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = console or Console()
        self._status = self._console.status("")

    def rewind(self, step: int) -> None:
        """See `Writer`. Also says what is about to happen."""
        if step >= self._num_steps:
            self._print(f"nothing to train: step {step:,} of {self._num_steps:,} is reached")
            return
        if step:
            self._print(f"continuing after step {step:,}")
        self._first_step, self._started = step, time.monotonic()
        self._status.update(f"step {step + 1:,} of {self._num_steps:,}: compiling")
        self._status.start()

    def write(self, step: int, split: str, figures: Figures) -> None:
        """See `Writer`."""
        parts = [f"step {step:,}/{self._num_steps:,} {split}"]
        parts += [_FORMATS[name].format(figures[name]) for name in _FORMATS if name in figures]
        if split != "train":
            self._print("  ".join(parts))
            return
        seconds = (time.monotonic() - self._started) / (step - self._first_step)
        left = datetime.timedelta(seconds=round(seconds * (self._num_steps - step)))
        line = "  ".join([*parts, f"{left} left"])
        if self._console.is_terminal:
            self._status.update(line)
        else:
            self._print(line)

    def close(self) -> None:
        """See `Writer`."""
        self._status.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


_FORMATS = {
    "loss": "loss {:.4f}",
    "perplexity": "perplexity {:.2f}",
    "accuracy": "accuracy {:.1%}",
    "bleu": "BLEU {:.2f}",
    "chrf": "chrF {:.2f}",
    "target_tokens_per_second": "{:,.0f} tokens/s",
    "learning_rate": "rate {:.2e}",
}


def _stays(line: str, step: int) -> bool:
    """Whether a line of `metrics.jsonl` is whole and no later than `step`."""
    try:
        figures = json.loads(line)
        return figures["step"] <= step and figures["split"] != "test"
    except (json.JSONDecodeError, KeyError, TypeError):
        return False
