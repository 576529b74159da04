"""A run folder, as scripts and notebooks use it."""

import pytest

from flaxformer_mt import Run
from flaxformer_mt.errors import UserError


def test_what_a_run_holds(trained_run):
    run = Run(trained_run)
    assert run.config.model.d_model == 32
    assert run.checkpoints() == [run.latest_step] == [run.best_step] == [200]
    assert run.model().step == 200
    (validation,) = run.metrics("valid")
    assert validation["step"] == 200
    assert validation in run.metrics()
    sentence = "seven kilometers"
    (translation,) = run.translator().translate([sentence])
    assert translation


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(UserError, match="is not a run folder: it has no config"):
        Run(tmp_path)
    with pytest.raises(UserError, match="there is no run folder"):
        Run(tmp_path / "none")
