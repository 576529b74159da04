"""The progress of a run on the console.

On a terminal, a line at the bottom moves with every step, and metrics and translations stay above
it. Elsewhere there are plain lines only. Rich omits colors if NO_COLOR is set.
"""

import collections
import datetime
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from flaxformer_mt.memory_limits import gibibytes
from flaxformer_mt.objectives.cross_entropy import Metrics
from flaxformer_mt.runs.metrics_file import CHANGE
from flaxformer_mt.training.reporting.metrics import MetricValues

_REFRESHES_PER_SECOND = 4
_SAMPLES = 2  # Validation sentences whose translations are printed.
_RECENT = 20  # The moving line shows means of this many steps.


class Sample(NamedTuple):
    """A sentence that was translated at a validation."""

    source: str
    translation: str
    reference: str | None = None
    """None for a sentence that the user named."""

    def rows(self) -> list[tuple[str, str]]:
        """Returns the label and the text of each field that there is."""
        return [(label, text) for label, text in self._asdict().items() if text is not None]


def some_of(samples: Sequence[Sample]) -> list[Sample]:
    """Chooses the samples to print, each once: the same ones, from the middle of each part."""
    middles = (len(samples) * (2 * part + 1) // (2 * _SAMPLES) for part in range(_SAMPLES))
    return [samples[index] for index in dict.fromkeys(middles)]


def is_notebook() -> bool:
    """Returns whether the program runs in Jupyter, Colab or the like."""
    return Console().is_jupyter


def make_console(file: Any = None) -> Console:
    """Returns a console for the progress of a run; quiet in all processes but the first.

    In a notebook it prints plain lines, which become one output: Rich would show each line as an
    output of its own. The steps are another, which is updated (`notebook.py`).
    """
    in_notebook = is_notebook()
    return Console(
        file=file,
        highlight=False,
        markup=False,
        force_jupyter=False,
        force_terminal=False if in_notebook else None,
        soft_wrap=True,
        quiet=jax.process_index() > 0,
    )


class ConsoleWriter:
    """Shows the progress of a run, whose last step is `num_steps`; a `Writer`."""

    def __init__(
        self, num_steps: int, console: Console, batches_per_epoch: float | None = None
    ) -> None:
        self._num_steps = num_steps
        self._console = console
        self._batches_per_epoch = batches_per_epoch
        self._recent: collections.deque[_Step] = collections.deque(maxlen=_RECENT)
        self._samples: Sequence[Sample] = ()
        self._start: tuple[int, float] | None = None  # From this step and time on, time counts.
        self._is_compiled = False
        self._running: tuple[int, Metrics] | None = None
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.fields[state]}", markup=False),
            console=self._console,
            transient=True,
            expand=True,
            refresh_per_second=_REFRESHES_PER_SECOND,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_steps, state="")

    def rewind(self, step: int) -> None:
        if self._start is not None:
            self._bar.stop()
            self._print(f"back at step {step:,}")
            return
        self._start = step, time.monotonic()
        if step >= self._num_steps:
            self._print(f"nothing to train: step {step:,} of {self._num_steps:,} is reached")
            return
        if step:
            self._print(f"continuing after step {step:,}")
        self._bar.update(self._task, completed=step, description=self._position(step))
        self._bar.start()

    def compiling(self, begins: bool) -> None:
        self._show("compiling the training step" if begins else "")

    def validating(self) -> None:
        self._show("validating")
        self._recent.clear()  # Its time is not that of steps.

    def translated(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def after_step(self, step: int, sums: Metrics) -> None:
        """Shows the step before this one, which is finished: its sums are read without waiting."""
        if self._running is not None:
            self.advance(*self._running)
        self._running = step, sums

    def advance(self, step: int, metrics: Metrics) -> None:
        """Shows a finished step, whose metrics are each a sum and a weight."""
        if self._start is None:  # Another process, or other writers, show the run.
            return
        now = time.monotonic()
        if not self._is_compiled:  # The time of the first step is mostly that of compiling it.
            self._start, self._is_compiled = (step, now), True
        if self._bar.disable:
            return
        loss, weight = map(float, metrics.get("loss") or metrics["objective"])
        tokens = float(metrics["target_tokens"][0])
        self._recent.append(_Step(now, loss, weight, tokens))
        self._bar.update(self._task, completed=step, description=self._position(step))
        self._show("  ".join(self._state(step)))

    def write(self, step: int, split: str, values: MetricValues, is_best: bool = False) -> None:
        if split == CHANGE:
            return  # It was announced at the start.
        if values.get("skipped_steps"):
            count = values["skipped_steps"]
            what = "update" if values.get("nonfinite_update") else "loss or gradient"
            self._print(f"step {step:,}: {count} skipped: {what} was not finite", "yellow")
        parts = [*formatted(values), *(["best so far"] if is_best else [])]
        head = f"{self._position(step)} {split}"
        if not self._console.is_terminal:
            left = [f"{self._time_left(step)} left"] if split == "train" else []
            self._print("  ".join([head, *parts, *left]))
        elif split == "train":
            self._print(_fitted(head, parts, self._console.width)[0])
        else:
            for line in _fitted(head, parts, self._console.width):
                self._print(line, "bold green" if is_best else "bold")
        if split == "train":
            return
        for sample in self._samples:
            print_labelled(sample.rows(), self._console, width=11, indent=2)
        self._samples = ()

    def close(self) -> None:
        self._bar.stop()

    def _position(self, step: int) -> str:
        return f"step {step:,}/{self._num_steps:,}"

    def _show(self, state: str) -> None:
        self._bar.update(self._task, state=state)

    def _state(self, step: int) -> list[str]:
        parts = []
        if self._batches_per_epoch is not None:
            parts.append(f"epoch {step / self._batches_per_epoch:.1f}")
        weight = sum(each.weight for each in self._recent)
        if weight:
            parts.append(f"loss {sum(each.loss for each in self._recent) / weight:.3f}")
        first, *others = self._recent
        if others:
            seconds = others[-1].time - first.time
            parts.append(f"{sum(each.tokens for each in others) / seconds:,.0f} tokens/s")
            parts.append(f"{self._time_left(step)} left")
        return parts

    def _time_left(self, step: int) -> datetime.timedelta:
        assert self._start is not None
        first, start = self._start
        seconds = (time.monotonic() - start) / max(step - first, 1)
        return datetime.timedelta(seconds=round(seconds * (self._num_steps - step)))

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def formatted(values: MetricValues) -> list[str]:
    """Returns the metrics that are shown, in words: "loss 2.0340"."""
    shown = {name: values[name] for name in _FORMATS if name in values}
    if shown.get(_OF_DEVICE) == shown.get("target_tokens_per_second"):
        shown.pop(_OF_DEVICE, None)
    return [_FORMATS[name](value) for name, value in shown.items()]


def print_labelled(
    lines: Iterable[tuple[str, str]], console: Console, width: int = 8, indent: int = 0
) -> None:
    """Prints lines behind their labels; on a terminal, wrapped beside them.

    `width` is that of the column of labels, and `indent` the number of spaces before a label.
    """
    for label, text in lines:
        if not console.is_terminal:
            console.print(f"{'':<{indent}}{label:<{width}} {text}", soft_wrap=True)
            continue
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(min_width=indent + width, no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row(f"{'':<{indent}}{label}", text)
        console.print(table)


class _Step(NamedTuple):
    """When a step was finished, the sum of its loss and the weight to divide it by."""

    time: float
    loss: float
    weight: float
    tokens: float


def _fitted(head: str, parts: Sequence[str], width: int) -> list[str]:
    lines = [head]
    for part in parts:
        if cell_len(lines[-1]) + 2 + cell_len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}")
    return lines


_OF_DEVICE = "target_tokens_per_second_per_device"
_FORMATS: Mapping[str, Callable[..., str]] = {
    "loss": "loss {:.4f}".format,
    "objective": "objective {:.4f}".format,
    "perplexity": "perplexity {:.2f}".format,
    "accuracy": "accuracy {:.1%}".format,
    "bleu": "BLEU {:.2f}".format,
    "chrf": "chrF {:.2f}".format,
    "translated": "({})".format,
    "seq2seq_acc": "seq2seq_acc {:.4f}".format,
    "teacher_forced_bleu": "teacher-forced BLEU {:.2f}".format,
    "target_tokens_per_second": "{:,.0f} tokens/s".format,
    _OF_DEVICE: "{:,.0f} tokens/s per device".format,
    "mfu": "MFU {:.1%}".format,
    "memory_bytes": lambda size: f"memory {gibibytes(size)}",
    "learning_rate": "rate {:.2e}".format,
}
