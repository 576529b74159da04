"""Traces of training steps: `train.profile_steps`."""

import gzip
import json

import jax
import pytest
from test_loop import Run, power_cut, runs  # noqa: F401  (a fixture)

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.errors import UserError


def traces(run):
    """The folders of traces, each with the events of its trace in Chrome's format."""
    found = {}
    for folder in (run.folder / "profile").iterdir():
        (trace,) = folder.rglob("*.trace.json.gz")
        found[folder.name] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        (programs,) = folder.rglob("*.xplane.pb")
        assert jax.profiler.ProfileData.from_file(str(programs)).find_plane_with_name("/host:CPU")
    return found


def steps_of(events):
    return [event["args"]["step_num"] for event in events if event.get("name") == "train"]


@pytest.mark.slow
def test_a_trace_has_the_steps_of_its_range(setup, tmp_path):
    run = Run(setup.of(), tmp_path)
    run(profile_steps="2:6", evaluate=lambda params, step: {"loss": 1.0})
    ((name, events),) = traces(run).items()
    assert name == "steps_2_to_6"
    assert steps_of(events) == ["2", "3", "4", "5", "6"]
    assert all(event["dur"] < 60e6 for event in events if "dur" in event)


@pytest.mark.slow
def test_a_run_that_goes_on_traces_the_steps_that_remain(runs):  # noqa: F811
    run = runs()
    with pytest.raises(KeyboardInterrupt):
        run(batch=power_cut(4, run.tiny), profile_steps="3:5")
    assert not (run.folder / "profile").exists()
    run(profile_steps="3:5")
    assert {name: steps_of(events) for name, events in traces(run).items()} == {
        "steps_4_to_5": ["4", "5"]
    }
    run(profile_steps="3:5", num_steps=8)
    assert list(traces(run)) == ["steps_4_to_5"]


@pytest.mark.parametrize("given", ["5:3", "x", "3", "0:2", "-1:2", "1:", "1:2:3", "1 : 2"])
def test_other_ranges_are_rejected(given):
    with pytest.raises(UserError, match=r"train.profile_steps='.*must be A:B, .* such as 100:104"):
        TrainConfig(profile_steps=given)


def test_ranges_include_both_ends():
    assert TrainConfig(profile_steps="10:14").profiled_steps == range(10, 15)
    assert TrainConfig(profile_steps="7:7").profiled_steps == range(7, 8)
    assert not TrainConfig().profiled_steps
