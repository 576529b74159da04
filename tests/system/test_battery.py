"""`benchmarks/battery.py`: what a GPU runs, on a CPU and too small to measure anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import xla_flags

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What a machine with a GPU may lack.
ABSENT = ("tyro", "babel", "num2words", "tensorboardX", "tensorflow_datasets", "array_record",
          "matplotlib", "ctranslate2")  # fmt: skip


@pytest.fixture
def battery(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import battery

    return battery


def run_tiny(battery, tmp_path, parts):
    """Runs parts in an environment without the packages in `ABSENT`; returns their results."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    out = tmp_path / "out"
    ended = subprocess.run(
        [sys.executable, BENCHMARKS / "battery.py", f"--out={out}", "--tiny", "--parts", *parts],
        # One device: the others of the tests only cost time.
        env=os.environ | {"PYTHONPATH": str(absent), "XLA_FLAGS": xla_flags()},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line.split()[:2] for line in ended.stdout.splitlines()] == [
        [part, "done"] for part in parts
    ]
    return {name: json.loads((out / f"{name}.json").read_text())["results"] for name in parts}


# The others are timed.
FIRST = ("parity", "attention", "continuing")


@pytest.mark.slow
def test_what_has_to_be_equal_is_compared(battery, tmp_path, monkeypatch):
    results = run_tiny(battery, tmp_path, FIRST)
    assert results["parity"]["families"]["torch"]["passed"]
    assert results["attention"]["float32"].keys() >= {"einsum", "pallas_gpu", "pallas_tpu"}
    continued = results["continuing"]["as_usual"]["continued"]
    assert continued["parameters_that_differ"] == []
    assert continued["first_step_whose_metrics_differ"] is None

    page = tmp_path / "accelerators.md"
    monkeypatch.setattr(battery.accelerators_page, "PAGE", page)
    battery.accelerators_page.write(tmp_path / "out", [])
    text = page.read_text()
    assert "Not compiled yet." in text
    assert "0, equal to the bit" in text
    assert text.count(battery.accelerators_page.NOT_RUN) == len(battery.PARTS) - len(FIRST)
