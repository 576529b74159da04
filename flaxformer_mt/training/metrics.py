"""Metrics of a run: aggregation over steps, validation, and writers."""

import datetime
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from rich.console import Console

from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.memory_limits import gibibytes
from flaxformer_mt.runs import atomic, metrics_file
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.progress import Sums
from flaxformer_mt.training.step import Metrics

MetricValues: TypeAlias = Mapping[str, float | int | str]
"""Metrics as reported, by name."""


def means(metrics: Iterable[Metrics]) -> dict[str, float]:
    """Returns the weighted means of the metrics of several steps, without those of weight 0."""
    sums = Sums()
    for step in jax.device_get(list(metrics)):
        sums.add(step)
    return sums.means()


def validate(
    eval_step: Callable[[Params, Batch], Metrics], params: Params, batches: Iterable[Batch]
) -> dict[str, float]:
    """Computes the loss, perplexity and accuracy of a corpus.

    Args:
      eval_step: the evaluation step, compiled by a strategy.
      params: parameters, placed on devices by that strategy.
      batches: the corpus, placed on devices likewise.

    Returns:
      "loss" (what training minimises), "accuracy", "cross_entropy" (the loss without label
      smoothing) and "perplexity" (its exponential).
    """
    values = means([eval_step(params, batch) for batch in batches])
    return {**values, "perplexity": float(np.exp(values["cross_entropy"]))}


class Writer(Protocol):
    """Writes the metrics of a run to a file or the console."""

    def rewind(self, step: int) -> None:
        """Discards the metrics of later steps.

        Called before the first `write`, and when a run returns to its newest checkpoint.
        """

    def write(self, step: int, split: str, values: MetricValues) -> None:
        """Writes the metrics of a split ("train", "valid") after a step."""

    def close(self) -> None:
        """Called after the last `write`."""


class JsonLinesWriter:
    """Writes `metrics.jsonl`: {"step": 50, "split": "train", "loss": ...}, one object per line.

    The last member of each object, "crc32", is a checksum of the others.
    """

    def __init__(self, path: str | Path, announce: Callable[[str], None] = print) -> None:
        self._path = Path(path)
        self._announce = announce

    def rewind(self, step: int) -> None:
        """See `Writer`. Also removes damaged lines, and announces them.

        Metrics of the test corpus are removed as well: they belong to the end of the run.

        Raises:
          UserError: the file cannot be read or written.
        """
        if step and not self._path.exists():
            self._announce(f"{self._path} is missing: metrics up to step {step:,} are lost")
        kept = []
        for line in metrics_file.read_lines(self._path):
            if line.values is None:
                self._announce(
                    f"{self._path} was damaged: line {line.number} is not what was written, and "
                    f"was removed: {line.text[:200]!r}"
                )
            elif line.values["step"] <= step and line.values["split"] != "test":
                kept.append(line.text + "\n")
        atomic.write_text(self._path, "".join(kept))

    def write(self, step: int, split: str, values: MetricValues) -> None:
        """See `Writer`. Infinity and NaN, which JSON does not have, are written as null.

        Raises:
          UserError: the file cannot be written.
        """
        line: dict[str, float | int | str | None] = {"step": step, "split": split}
        for name, value in values.items():
            is_writable = isinstance(value, str) or math.isfinite(value)
            line[name] = value if is_writable else None
        # Durably: a checkpoint that is written after this line must not outlive it.
        atomic.append_text(self._path, metrics_file.format_line(line) + "\n")

    def close(self) -> None:
        """See `Writer`."""


class TensorBoardWriter:
    """Writes event files for TensorBoard, with one chart per "split/metric"."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._first_step = 0
        self._events: Any = None

    def rewind(self, step: int) -> None:
        """See `Writer`; errors as in `write`."""
        self._first_step = step
        if self._events is not None:
            self.close()
            self._open()

    def write(self, step: int, split: str, values: MetricValues) -> None:
        """See `Writer`. Metrics that are text are omitted.

        Raises:
          UserError: the files cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        if self._events is None:
            self._open()
        with atomic.explained(self._folder):
            for name, value in values.items():
                if not isinstance(value, str):
                    summary = scalar(f"{split}/{name}", value)
                    self._events.write_event(
                        Event(wall_time=time.time(), step=step, summary=summary)
                    )
            self._events.flush()

    def close(self) -> None:
        """See `Writer`."""
        events, self._events = self._events, None
        if events is not None:
            with atomic.explained(self._folder):
                events.close()

    def _open(self) -> None:
        """Opens a new file, which makes TensorBoard discard later steps of earlier files."""
        # Not SummaryWriter: it writes in a thread, and waits for it forever if the disk is full.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        with atomic.explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._events = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=self._first_step + 1, session_log=start))
            self._events.flush()


class ConsoleWriter:
    """Prints metrics: to a terminal as a status line, elsewhere line by line."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = console or Console()
        self._status = self._console.status("")
        self._has_begun = False

    def rewind(self, step: int) -> None:
        """See `Writer`. Also prints where training starts."""
        if self._has_begun:
            self._status.stop()
            self._print(f"back at step {step:,}")
            return
        self._has_begun = True
        if step >= self._num_steps:
            self._print(f"nothing to train: step {step:,} of {self._num_steps:,} is reached")
            return
        if step:
            self._print(f"continuing after step {step:,}")
        self._first_step, self._started = step, time.monotonic()
        self._status.update(f"step {step + 1:,} of {self._num_steps:,}: compiling")
        self._status.start()

    def write(self, step: int, split: str, values: MetricValues) -> None:
        """See `Writer`."""
        parts = [f"step {step:,}/{self._num_steps:,} {split}"]
        shown = {name: values[name] for name in _FORMATS if name in values}
        if shown.get(_OF_DEVICE) == shown.get("target_tokens_per_second"):
            shown.pop(_OF_DEVICE, None)
        parts += [_FORMATS[name](value) for name, value in shown.items()]
        if values.get("skipped_steps"):
            count = values["skipped_steps"]
            what = "update" if values.get("nonfinite_update") else "loss or gradient"
            self._print(f"step {step:,}: {count} skipped: {what} was not finite")
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


_OF_DEVICE = "target_tokens_per_second_per_device"
_FORMATS: Mapping[str, Callable[..., str]] = {
    "loss": "loss {:.4f}".format,
    "perplexity": "perplexity {:.2f}".format,
    "accuracy": "accuracy {:.1%}".format,
    "bleu": "BLEU {:.2f}".format,
    "chrf": "chrF {:.2f}".format,
    "target_tokens_per_second": "{:,.0f} tokens/s".format,
    _OF_DEVICE: "{:,.0f} tokens/s per device".format,
    "mfu": "MFU {:.1%}".format,
    "memory_bytes": lambda size: f"memory {gibibytes(size)}",
    "learning_rate": "rate {:.2e}".format,
}
