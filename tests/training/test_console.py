"""The progress of a run on the console: lines, the moving line, translations."""

import io
import re
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from flaxformer_mt.training.reporting.console import ConsoleWriter, Sample, some_of
from flaxformer_mt.training.reporting.notebook import NotebookProgress


@pytest.mark.parametrize("terminal", [True, False])
def test_console_says_where_training_is(terminal):
    out = io.StringIO()
    writer = ConsoleWriter(100, Console(file=out, force_terminal=terminal, width=200))
    writer.rewind(10)
    metrics = {"loss": 2.5, "target_tokens_per_second": 1234.5, "mfu": 0.5, "memory_bytes": 2**30}
    writer.write(20, "train", metrics)
    writer.write(20, "valid", {"loss": 2.0, "bleu": 31.5})
    writer.close()
    assert "continuing after step 10" in out.getvalue()
    assert "step 20/100 valid  loss 2.0000  BLEU 31.50" in out.getvalue()
    if not terminal:
        line = "step 20/100 train  loss 2.5000  1,234 tokens/s  MFU 50.0%  memory 1.0 GiB"
        assert line in out.getvalue()
        assert "0:00:00 left" in out.getvalue()


def test_console_says_what_was_skipped_and_that_it_goes_back():
    out = io.StringIO()
    writer = ConsoleWriter(100, Console(file=out, width=200))
    writer.rewind(10)
    writer.write(20, "train", {"loss": 2.5, "skipped_steps": 3})
    writer.rewind(15)
    writer.close()
    lines = out.getvalue().splitlines()
    assert "step 20: 3 skipped: loss or gradient was not finite" in lines
    assert lines[-1] == "back at step 15"


# On a terminal.

VALIDATION = {
    "loss": 2.34567,
    "perplexity": 8.123,
    "accuracy": 0.5678,
    "bleu": 31.5,
    "chrf": 55.25,
    "bleu_signature": "x",
    "translated": "first 100 of 1,285 sentences",
}


class Terminal:
    """A terminal of some width, and what a run writes to it."""

    def __init__(self, width=80, num_steps=50_000, **options):
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, width=width, color_system="truecolor", **options
        )
        self.writer = ConsoleWriter(num_steps, self.console, batches_per_epoch=400)

    def moving_line(self):
        """The line at the bottom as it is drawn now."""
        screen = Console(file=io.StringIO(), width=self.console.width)
        screen.print(self.writer._bar.get_renderable())
        return screen.file.getvalue().rstrip("\n")

    @property
    def text(self):
        return plain(self.file.getvalue())


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def step_metrics(loss=3.5, tokens=1000):
    return {
        "loss": (np.float32(loss * tokens), np.float32(tokens)),
        "target_tokens": (np.float32(tokens), np.float32(1)),
    }


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("width", [80, 120])
def test_the_line_moves_with_every_step_and_fits(clock, width):
    terminal = Terminal(width)
    writer = terminal.writer
    writer.rewind(12_000)
    writer.compiling(True)
    assert "compiling the training step" in terminal.moving_line()
    clock[0] += 60
    writer.compiling(False)
    assert "compiling" not in terminal.moving_line()
    lines = []
    for step in range(12_001, 12_005):
        clock[0] += 0.5
        writer.advance(step, step_metrics(loss=step - 12_000))
        lines.append(terminal.moving_line())
    assert len({*lines}) == 4
    assert all(len(line) <= width and "\n" not in line for line in lines)
    # The minute of the compilation counts neither for the speed nor for the time left.
    for part in ("step 12,004/50,000", "epoch 30.0", "loss 2.500", "2,000 tokens/s"):
        assert part in lines[-1]
    assert "5:16:38 left" in lines[-1]
    assert "━" in lines[-1]
    writer.validating()
    assert "validating" in terminal.moving_line()
    clock[0] += 100
    writer.advance(12_005, step_metrics())
    assert "validating" not in terminal.moving_line()
    writer.close()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_of_metrics_stay_above_and_fit(width):
    terminal = Terminal(width)
    terminal.writer.rewind(0)
    training = {"loss": 2.5, "target_tokens_per_second": 123456.7, "learning_rate": 1e-3}
    terminal.writer.write(11_000, "train", {**training, "memory_bytes": 2**34})
    terminal.writer.translated(
        [Sample("Il pleut. " * 12, "It rains. " * 12, "It rains."), Sample("Neu", "New")]
    )
    terminal.writer.write(11_000, "valid", VALIDATION, is_best=True)
    terminal.writer.write(11_500, "valid", VALIDATION)
    terminal.writer.close()
    written = [line for line in re.split(r"[\n\r]+", terminal.text) if "━" not in line]
    assert all(len(line.rstrip()) <= width for line in written)
    text = " ".join(" ".join(written).split())
    assert "step 11,000/50,000 train loss 2.5000" in text
    assert ("rate" in text) == (width == 120)
    line = (
        "step 11,000/50,000 valid loss 2.3457 perplexity 8.12 accuracy 56.8% BLEU 31.50 chrF 55.25"
    )
    assert f"{line} (first 100 of 1,285 sentences) best so far source" in text
    assert text.count("best so far") == 1
    assert text.count("It rains.") == 13
    assert "source Neu translation New step 11,500/50,000" in text


def test_elsewhere_there_are_plain_lines_only(clock):
    out = io.StringIO()
    writer = ConsoleWriter(100, Console(file=out), batches_per_epoch=4)
    writer.rewind(0)
    writer.compiling(True)
    writer.compiling(False)
    clock[0] += 60
    for step in range(1, 11):
        clock[0] += 1
        writer.advance(step, step_metrics())
    writer.write(10, "train", {"loss": 2.5})
    writer.validating()
    writer.translated([Sample("Il pleut. " * 20, "It rains.", "It is raining.")])
    writer.write(10, "valid", {"loss": 2.0}, is_best=True)
    writer.close()
    assert out.getvalue().splitlines() == [
        "step 10/100 train  loss 2.5000  0:01:30 left",
        "step 10/100 valid  loss 2.0000  best so far",
        f"  source      {'Il pleut. ' * 20}",
        "  translation It rains.",
        "  reference   It is raining.",
    ]


def test_samples_are_from_all_of_a_set():
    samples = [Sample(str(number), "") for number in range(8)]
    assert [sample.source for sample in some_of(samples)] == ["2", "6"]
    assert some_of(samples[:1]) == samples[:1]


def test_a_notebook_has_one_output_that_is_updated(monkeypatch):
    shown = []
    display = types.ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda text, display_id: types.SimpleNamespace(update=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    progress = NotebookProgress()
    progress.begin(Path("run"), {"train": {"num_steps": 8}})
    progress.log(4, {"train/loss": 3.0})
    progress.translated(8, [Sample("a <b>", "c", "d")])
    progress.log(8, {"valid/loss": 2.0, "valid/bleu": 30.0})
    assert "<progress value=8 max=8" in shown[-1]
    assert shown[-1].count("<polyline") == 2
    assert ">valid</span> loss 2.0000  BLEU 30.00" in shown[-1]
    assert "source: a &lt;b&gt;" in shown[-1]
    progress.rewind(4)
    assert shown[-1].count("<polyline") == 0
