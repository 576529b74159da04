"""The learning-rate range test: what it suggests, when it stops, and that it leaves no trace."""

import dataclasses
import hashlib
import re
import shutil

import jax
import numpy as np
import pytest

from flaxformer_mt import Run, atomic, experiment
from flaxformer_mt.cli import main
from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment import rate_range
from flaxformer_mt.training.optimizer import make_schedule


def content(folder):
    """The SHA-256 of each file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_it_finds_a_sensible_rate_and_changes_no_file(trained_run, tmp_path, capfd):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    before = content(tmp_path)
    options = [f"--config={run / 'config.json'}", f"--workdir={run}", "--find-learning-rate"]
    assert main(["train", *options]) == 0
    out = capfd.readouterr().out
    picture = tmp_path / "run-learning-rate.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert content(tmp_path) == {**before, **content_of(picture)}
    suggested = re.search(r"try a tenth of it: --optimizer.learning-rate=(\S+)\n", out)
    # The run was trained with a peak of 1e-2.
    assert 1e-3 < float(suggested[1]) < 2e-2


def content_of(path):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.fixture
def losses(monkeypatch, trained_run):
    """Lets the test see given losses instead of training; returns how many were read."""

    def replace(values):
        read = []

        def made_up(prepared, steps):
            for value in values(np.geomspace(rate_range.LOWEST, rate_range.HIGHEST, steps)):
                read.append(value)
                yield value

        monkeypatch.setattr(rate_range, "_losses", made_up)
        return read

    def begin(*_, cache):
        # Which the next start deletes, if this process is killed.
        assert atomic.is_workspace_name(cache.name)

    monkeypatch.setattr(rate_range, "begin", begin)
    monkeypatch.setattr(rate_range, "Experiment", lambda *_, **__: None)
    monkeypatch.setattr(rate_range, "report", lambda _: ())
    return replace


def valley(rates):
    """Losses that fall from 8 to 2 up to a rate of 0.01, and rise beyond."""
    distance = np.abs(np.log10(rates) + 2)
    return np.minimum(8, np.where(rates < 0.01, 2 + 2 * distance, 2 + 8 * distance))


def test_the_rate_is_a_tenth_of_the_best_and_divergence_ends_the_test(
    losses, trained_run, tmp_path
):
    read = losses(valley)
    found = experiment.find_learning_rate(Run(trained_run).config, tmp_path / "new")
    assert found.peak == pytest.approx(1e-3, rel=0.3)
    assert found.learning_rate == pytest.approx(found.peak)
    assert len(found.rates) == len(found.losses) == len(found.smoothed) == len(read) - 1 < 190
    assert found.rates[-1] < 0.1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("schedule", ["noam", "tensor2tensor", "one_cycle", "cosine", "constant"])
def test_the_schedule_has_the_suggested_peak(losses, trained_run, tmp_path, schedule):
    losses(valley)
    config = Run(trained_run).config
    optimizer = OptimizerConfig(schedule=schedule, learning_rate=3.0, warmup_steps=60)
    config = dataclasses.replace(config, optimizer=optimizer)
    found = experiment.find_learning_rate(config, tmp_path / "new")
    optimizer = dataclasses.replace(optimizer, learning_rate=found.learning_rate)
    schedule = make_schedule(optimizer, config.model.d_model, 200)
    assert np.max(jax.vmap(schedule)(np.arange(200))) == pytest.approx(found.peak, rel=1e-4)


@pytest.mark.parametrize("values", [lambda rates: [8.0] * len(rates), lambda rates: [8.0, 2.0]])
def test_a_model_that_does_not_learn_gets_no_suggestion(losses, trained_run, tmp_path, values):
    losses(values)
    with pytest.raises(UserError, match="no learning rate from 1e-06 to 1 made the loss fall in "):
        experiment.find_learning_rate(Run(trained_run).config, tmp_path / "new")
