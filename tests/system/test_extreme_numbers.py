"""The ends of every number's bounds: a run of two steps, or one line that says why not."""

import dataclasses
import math

import pytest
from small_runs import flags

from flaxformer_mt.cli import entry_points
from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import FieldRole, bounds_of, roles_of
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.runs.metrics_file import read_metrics

pytestmark = pytest.mark.slow  # A run for each number.


LENGTHS = ("min_length", "max_length", "max_length_factor", "max_length_extra")
"""Numbers of steps of a search: high ones are valid, and take that long."""


def ends(field):
    """The lowest and the highest valid number; of lengths and of sizes of a model only the lowest.

    A model that fits into the memory of the machine may be as large as that.
    """
    bounds, kind = bounds_of(field), type(field.default)
    lowest, highest = bounds.lowest, bounds.highest
    if kind is float:
        lowest = math.nextafter(lowest, math.inf) if bounds.excludes_lowest else float(lowest)
        highest = math.nextafter(highest, 0) if bounds.excludes_highest else float(highest)
    has_no_highest = field.name in LENGTHS or FieldRole.SHAPES in roles_of(field)
    return [lowest] if has_no_highest else [lowest, highest]


CASES = [
    (f"--{group}.{field.name.replace('_', '-')}", end)
    for group, kind in groups().items()
    for field in dataclasses.fields(kind)
    if bounds_of(field) and field.name != "num_steps"  # It is how long the run takes.
    for end in ends(field)
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("option", "value"), CASES)
def test_a_run_succeeds_or_says_why_not(text, tmp_path, capfd, option, value):
    run = tmp_path / "run"
    arguments = flags(text, run, "--train.num-steps=2", "--train.eval-every=2", f"{option}={value}")
    code = entry_points.train(arguments)
    error = capfd.readouterr().err
    if code == ExitCode.SUCCESS:
        rows = read_metrics(run / "metrics.jsonl")
        assert {line["split"] for line in rows} >= {"train", "valid"}
        losses = [line["loss"] for line in rows if "loss" in line]
        assert all(map(math.isfinite, losses)), losses
    else:
        assert code == ExitCode.FAILURE
        (line,) = [line for line in error.splitlines() if line.startswith("train.py: error: ")]
        name = option.rpartition(".")[2].replace("-", "_")
        assert name in line.replace("-", "_") or "was not finite" in line, line
