"""Trackers: what each library wrote, read back by its own reader."""

import json
import subprocess
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.reporting import trackers
from flaxformer_mt.training.reporting.console import Sample
from flaxformer_mt.training.reporting.trackers import TensorBoard, Tracker, Trackers

CONFIG = {
    "model": {"d_model": 8, "encoder_bias": None},
    "data": {"train_corpora": ({"path": "a.tsv", "weight": 2.0},), "path": ""},
    "system": {"devices": 2, "device_kind": "cpu", "device_memory_bytes": 2**30},
}
SAMPLES = [Sample("a | b", "ein\nSatz", "ein Satz"), Sample("watched", "gesehen")]
TABLE = """\
| source | translation | reference |
| --- | --- | --- |
| a \\| b | ein Satz | ein Satz |
| watched | gesehen |  |"""


def events_of(folder):
    """(step, tag) of each value, and ("start", step) where TensorBoard is to forget."""
    events = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name.rpartition(".")[2]):
        data = path.read_bytes()
        while data:  # length, checksum, event, checksum
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                events.append(("start", event.step))
            events += [(event.step, value.tag) for value in event.summary.value]
    return events


def tensorboard(folder):
    tracker = TensorBoard()
    tracker.begin(folder, CONFIG)
    return tracker


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"file/tensorboard cannot be written: Not a directory"):
        tensorboard(tmp_path / "file").log(1, {"train/loss": 1.0})


def test_tensorboard_forgets_what_a_run_goes_back_behind(tmp_path):
    tracker = tensorboard(tmp_path)
    tracker.rewind(0)
    tracker.log(5, {"train/loss": 3.0})
    tracker.rewind(2)
    tracker.close()
    again = tensorboard(tmp_path)
    again.rewind(2)
    again.log(3, {"train/loss": 4.0})
    again.close()
    assert events_of(tmp_path / "tensorboard") == [
        ("start", 1), (0, "config/text_summary"), (5, "train/loss"),
        ("start", 3), (2, "config/text_summary"),
        ("start", 3), (2, "config/text_summary"), (3, "train/loss"),
    ]  # fmt: skip


class Recorder(Tracker):
    """Fails in one of its methods."""

    def __init__(self, failing=""):
        self.calls, self.failing = [], failing

    def __getattribute__(self, name):
        if name not in ("begin", "rewind", "log", "translated", "close"):
            return super().__getattribute__(name)

        def method(*arguments):
            self.calls.append((name, *arguments))
            if name == self.failing:
                raise SystemExit("no network\nat all") if name == "begin" else ValueError(name)

        return method


def drive(tracking, folder, first=0):
    tracking.tell("begin", folder, CONFIG)
    tracking.rewind(first)
    tracking.write(first + 1, "train", {"loss": 3.5, "target_tokens": 7})
    tracking.tell("translated", first + 2, SAMPLES)
    tracking.write(first + 2, "valid", {"bleu": 30.0, "perplexity": float("inf"), "note": "x"})
    tracking.write(first + 2, "change", {"changed": "seed"})
    tracking.close()


@pytest.mark.parametrize("failing", ["begin", "rewind", "log", "translated", "close"])
def test_a_tracker_that_fails_is_announced_once_and_others_go_on(tmp_path, failing):
    first, second, lines = Recorder(failing), Recorder(), []
    drive(Trackers([first, second], lines.append), tmp_path)
    (line,) = lines
    reason = "no network" if failing == "begin" else failing
    assert line == f"warning: Recorder failed, the run goes on without it: {reason}"
    assert first.calls[-1][0] == failing
    assert second.calls == [
        ("begin", tmp_path, CONFIG),
        ("rewind", 0),
        ("log", 1, {"train/loss": 3.5, "train/target_tokens": 7}),
        ("translated", 2, SAMPLES),
        ("log", 2, {"valid/bleu": 30.0, "valid/perplexity": float("inf")}),
        ("close",),
    ]


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A folder, and no settings of the user."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "my run").mkdir()
    return tmp_path / "my run"


def drive_twice(name, folder):
    """A run of two steps, continued from the first one for two more."""
    lines = []
    drive(Trackers([trackers.BY_NAME[name]()], lines.append), folder)
    drive(Trackers([trackers.BY_NAME[name]()], lines.append), folder, first=1)
    assert lines == []


def test_tensorboard_reads_what_was_written(run_folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drive_twice("tensorboard", run_folder)
    events = EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("valid/bleu")] == [(3, 30.0)]
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [
        (1, 3.5), (2, 3.5),
    ]  # fmt: skip
    (*_, table) = events.Tensors("translations/text_summary")
    assert table.tensor_proto.string_val[0].decode() == TABLE
    (*_, config) = events.Tensors("config/text_summary")
    assert '"device_kind": "cpu"' in config.tensor_proto.string_val[0].decode()


@pytest.mark.filterwarnings("ignore")
def test_wandb_reads_what_was_written(run_folder):
    pytest.importorskip("wandb")
    drive_twice("wandb", run_folder)
    logs = sorted(run_folder.glob("trackers/wandb/offline-run-*/*.wandb"))
    assert len({log.name for log in logs}) == 1, "both parts are one run"
    assert len(logs) == 2
    for first, log in enumerate(logs):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        records = [json.loads(line) for line in output.splitlines()]
        text = output.replace(" ", "")
        assert "device_kind" in text, records
        assert "d_model" in text
        summary = [*command[:-1], "--summary", command[-1]]
        output = subprocess.run(summary, capture_output=True, text=True, check=True).stdout
        shown = json.loads(output)
        assert shown["summary"]["train/loss"] == 3.5, shown
        assert shown["summary"]["valid/bleu"] == 30
        assert shown["summary"]["_step"] == first + 2
    (table, *_) = run_folder.rglob("*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["source", "translation", "reference"]
    assert content["data"] == [["a | b", "ein\nSatz", "ein Satz"], ["watched", "gesehen", None]]
