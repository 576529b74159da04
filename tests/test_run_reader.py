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


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"step": 2, "spl', "not JSON"),
        ("7", "it has no step and split"),
        ("", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"step": ' + "9" * 5000 + "}", "too many digits"),
    ],
)
def test_a_damaged_line_of_metrics_is_named(tmp_path, line, cause):
    (tmp_path / "config.json").write_text("{}")
    good = '{"step": 1, "split": "train"}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError, match=rf"metrics\.jsonl: line 2 is damaged: .*{cause}"):
        Run(tmp_path).metrics()


def test_a_line_of_metrics_that_is_being_written_is_left_out(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n{"step": 2, "spl')
    assert Run(tmp_path).metrics() == [{"step": 1, "split": "train"}]


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(UserError, match="is not a run folder: it has no config"):
        Run(tmp_path)
    with pytest.raises(UserError, match="there is no run folder"):
        Run(tmp_path / "none")
