"""A run folder, as scripts and notebooks use it."""

import sys

import numpy as np
import pytest

from flaxformer_mt import Run
from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.run_reader import CheckpointScore, CheckpointScores, MetricRows


def test_what_a_run_holds(trained_run):
    run = Run(trained_run)
    assert run.config.model.d_model == 32
    (checkpoint,) = run.checkpoints
    assert checkpoint.step == run.latest_step == run.best_step == 200
    assert (checkpoint.metric, checkpoint.is_best) == ("loss", True)
    assert checkpoint.value == run.metrics("valid")[0]["loss"]
    assert run.model().step == 200
    (validation,) = run.metrics("valid")
    assert validation["step"] == 200
    assert validation in run.metrics()
    sentence = "seven kilometers"
    translator = run.translator()
    (translation,) = translator.translate([sentence])
    assert translation == translator.translate(sentence)


def test_metrics_are_rows_and_a_data_frame(trained_run):
    run = Run(trained_run)
    assert run.metrics == run.metrics() == [*run.metrics("train"), *run.metrics("valid")]
    with pytest.raises(UserError, match="split='dev': choose train, valid or test"):
        run.metrics("dev")
    frame = run.metrics.frame()
    assert list(frame["split"]) == [row["split"] for row in run.metrics]
    assert np.isnan(frame["perplexity"][0])
    assert frame["perplexity"].iloc[-1] == run.metrics[-1]["perplexity"]


def test_what_a_notebook_shows(trained_run, monkeypatch):
    run = Run(trained_run)
    assert repr(run) == f"Run('{trained_run}')"
    page = run._repr_html_()
    assert page.count('<svg role="img"') == 1
    assert "en to de, 2 + 2 layers of width 32" in page
    assert run.plot(["loss"])._repr_png_().startswith(b"\x89PNG")
    rows = MetricRows([{"step": 1, "split": "valid", "loss": None, "bleu": 12.5}] * 30)
    table = rows._repr_html_()
    assert table.count("<tr>") == 21
    assert "<td>–</td><td>12.5</td>" in table
    assert "the last 20 of 30 rows" in table
    best = CheckpointScores([CheckpointScore(200, "loss", 2.5, True)])._repr_html_()
    assert "<tr><td>step<td>metric<td>value<td>is_best<tr><td>200<td>loss<td>2.5<td>True" in best
    assert run.checkpoints._repr_html_().count("<tr>") == 2
    assert repr(run.model()) == f"<TrainedModel {str(trained_run)!r}, step 200>"
    config = run.config
    assert repr(config).startswith("ExperimentConfig(model=TransformerConfig(")
    assert "d_model=32" in repr(config)
    assert "label_smoothing" not in repr(config)
    kinds = (DataConfig, OptimizerConfig, ParallelConfig, TrainConfig, TransformerConfig)
    names = {kind.__name__: kind for kind in (ExperimentConfig, *kinds)}
    assert eval(repr(config), names) == config
    attention = run.attention("seven kilometers", "sieben Kilometer")
    assert repr(attention) == "AttentionPicture('seven kilometers' -> 'sieben Kilometer')"
    assert attention._repr_html_().startswith("<iframe")
    # Without matplotlib, or metrics, the rest is shown.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "flaxformer_mt[plot]" in run._repr_html_()


def test_curves_of_several_runs(trained_run):
    run = Run(trained_run)
    curves = run.plot("loss", x="tokens", smoothing=0.5, beside=[run, str(trained_run)])
    assert (len(curves.histories), curves.metrics) == (3, ["loss"])
    assert curves.axis == "tokens"
    with pytest.raises(UserError, match="x='days': choose steps, tokens, hours"):
        run.plot(x="days")
    with pytest.raises(UserError, match="checkpoint='bset': choose"):
        run.model("bset")


def test_the_configuration_of_fine_tuning(trained_run):
    config = Run(trained_run).fine_tuning_config(
        data={"path": "mine.tsv"}, train={"num_steps": 7}, optimizer={"learning_rate": 1e-5}
    )
    assert config.train.init_from == str(trained_run)
    assert (config.train.num_steps, config.data.path) == (7, "mine.tsv")
    assert config.model == Run(trained_run).config.model


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(UserError, match="is not a run folder: it has no config"):
        Run(tmp_path)
    with pytest.raises(UserError, match="there is no run folder"):
        Run(tmp_path / "none")
