"""`benchmarks/time_to_bleu.py`: the log of MLPerf, from the metrics of a run."""

import importlib
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from flaxformer_mt.training.reporting.metrics import JsonLinesWriter
from flaxformer_mt.training.reporting.trackers import TensorBoard, Trackers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
START = 1_700_000_000
# Two reports of 10 s of training, each before a validation of 5 s.
REPORTS = [
    (100, "train", {"target_tokens": 5000, "target_tokens_per_second": 500.0}, 12),
    (100, "valid", {"bleu": 20.5, "bleu_signature": "tok:13a"}, 17),
    (200, "train", {"target_tokens": 6000, "target_tokens_per_second": 600.0}, 28),
    (200, "valid", {"bleu": 25.25, "bleu_signature": "tok:13a"}, 33),
    (300, "train", {"target_tokens": 6000, "target_tokens_per_second": 600.0}, 44),
]


@pytest.fixture
def time_to_bleu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("time_to_bleu")


@pytest.fixture
def run(tmp_path):
    """A run folder with REPORTS; the run was killed after step 200 and continued from step 100."""

    def write_events(reports):
        writer = Trackers([TensorBoard()], pytest.fail)
        writer.tell("begin", tmp_path, {})
        for step, split, values, seconds in reports:
            with mock.patch("time.time", return_value=START + seconds):
                writer.write(step, split, values)
        writer.close()

    killed = (200, "train", {"loss": 1.0}, 22)
    write_events([*REPORTS[:2], killed])
    write_events(REPORTS[2:])
    (tmp_path / "config.json").write_text("{}")
    lines = JsonLinesWriter(tmp_path / "metrics.jsonl")
    for step, split, values, _ in REPORTS:
        lines.write(step, split, values)
    lines.write(300, "test", {"bleu": 30.0})
    return tmp_path


def parsed(text):
    prefix = ":::MLLOG "
    return [json.loads(line.removeprefix(prefix)) for line in text if line.startswith(prefix)]


def test_the_log_ends_when_the_target_is_reached(time_to_bleu, run, capsys):
    assert time_to_bleu.main([str(run), "--target-bleu=25"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "BLEU 25 was reached after 31.0 s, at step 200"
    events = parsed(lines)
    assert len(events) == len(lines)
    assert [(event["key"], event["value"], event["time_ms"]) for event in events] == [
        ("run_start", None, (START + 2) * 1000),
        ("eval_accuracy", 0.205, (START + 17) * 1000),
        ("eval_accuracy", 0.2525, (START + 33) * 1000),
        ("run_stop", None, (START + 33) * 1000),
    ]
    assert [event["metadata"].get("step_num") for event in events] == [None, 100, 200, 200]
    assert events[-1]["metadata"]["status"] == "success"
    assert [events[index]["event_type"] for index in (0, 1, -1)] == [
        "INTERVAL_START", "POINT_IN_TIME", "INTERVAL_END"
    ]  # fmt: skip


def test_a_target_that_is_not_reached(time_to_bleu, run, tmp_path, capsys):
    path = tmp_path / "log"
    assert time_to_bleu.main([str(run), "--target-bleu=28.4", f"--log={path}"]) == 0
    assert capsys.readouterr().out == ("BLEU 28.4 was not reached in 42.0 s; the best was 25.25\n")
    *_, stop = parsed(path.read_text().splitlines())
    assert stop["metadata"] == {"status": "aborted", "step_num": 300}
    assert stop["time_ms"] == (START + 44) * 1000


def test_without_times_of_day_training_steps_are_counted(time_to_bleu, run, capsys):
    shutil.rmtree(run / "tensorboard")
    assert time_to_bleu.main([str(run), "--target-bleu=25"]) == 0
    shown = capsys.readouterr()
    assert "was reached after 20.0 s" in shown.out
    assert parsed(shown.out.splitlines())[0]["time_ms"] == 0
    (note,) = shown.err.splitlines()
    assert "times of day are missing" in note


def test_what_is_missing_is_one_line(time_to_bleu, run, tmp_path, capsys):
    def error():
        assert time_to_bleu.main([str(run), "--target-bleu=25"]) == 1
        return capsys.readouterr().err.splitlines()[-1]

    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[1:]))
    assert "no report of training before the first validation" in error()
    (run / "metrics.jsonl").write_text(lines[0])
    assert "has no BLEU of a validation" in error()
    JsonLinesWriter(run / "metrics.jsonl").write(400, "valid", {"bleu": 25.0})
    assert "tensorboard has no time of step 400, valid" in error()
    shutil.rmtree(run / "tensorboard")
    assert "no report of training at step 400" in error()
    (run / "config.json").unlink()
    assert "is not a run folder" in error()
