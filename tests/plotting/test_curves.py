"""Pictures of training curves: what is read, what is drawn, and what is refused."""

import json
import re
import sys

import numpy as np
import pytest

from flaxformer_mt.cli import main
from flaxformer_mt.config import ExperimentConfig, TrainConfig, to_json
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting.curves import plot_curves
from flaxformer_mt.plotting.history import read_history, smoothed
from flaxformer_mt.runs.manifest import write_manifest
from flaxformer_mt.runs.metrics_file import format_line
from flaxformer_mt.runs.step_folders import make_record

TOKENS, SPEED = "target_tokens", "target_tokens_per_second"
LINES = [
    {"step": 2, "split": "train", "loss": 8.0, "gradient_norm": 0.0, TOKENS: 72_000, SPEED: 20.0},
    {"step": 4, "split": "train", "loss": None, "gradient_norm": 9.5, TOKENS: 36_000, SPEED: 10.0},
    {"step": 4, "split": "valid", "loss": 5.0, "bleu": 20.5, "bleu_signature": "text"},
    {"step": 6, "split": "train", "loss": 4.0, "gradient_norm": 0.4, TOKENS: 36_000, SPEED: 5.0},
    {"step": 6, "split": "valid", "loss": 4.5, "bleu": 10.0, "bleu_signature": "text"},
    {"step": 4, "split": "test", "bleu": 19.0},
]


def write_run(folder, lines=LINES):
    """A run folder whose best checkpoint, by BLEU, is that of step 4."""
    for step, bleu in ((4, 20.5), (6, 10.0)):
        checkpoint = folder / "checkpoints" / str(step)
        checkpoint.mkdir(parents=True)
        record = make_record("bleu", {"bleu": bleu}, {}, None)
        (checkpoint / "progress.json").write_text(json.dumps(record))
        write_manifest(checkpoint)
    config = ExperimentConfig(train=TrainConfig(best_metric="bleu"))
    (folder / "config.json").write_text(to_json(config))
    (folder / "metrics.jsonl").write_text("".join(f"{format_line(line)}\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "one")


def test_curves_over_steps_tokens_and_hours(run):
    history = read_history(run)
    steps, losses = history.curve("loss", "train")
    np.testing.assert_array_equal(steps, [2, 4, 6])
    np.testing.assert_array_equal(losses, [8, np.nan, 4])
    np.testing.assert_array_equal(
        history.curve("loss", "train", "tokens")[0], [72_000, 108_000, 144_000]
    )
    np.testing.assert_allclose(history.curve("loss", "train", "hours")[0], [1, 2, 4])
    np.testing.assert_allclose(history.curve("bleu", "valid", "hours")[0], [2, 4])
    np.testing.assert_allclose(history.positions(np.array([0, 1, 5]), "hours"), [0, 0.5, 3])
    assert (history.best_step, history.best()["bleu"], history.last_step) == (4, 20.5, 6)
    assert "bleu_signature" not in history.metrics()


def test_smoothing_is_a_moving_average_without_the_bias_of_its_start():
    values = np.array([4.0, np.nan, 2.0, 1.0])
    found = smoothed(values, 0.5)
    # Weights 1/2, 1/4, 1/8 of the past, divided by their sum.
    np.testing.assert_allclose(found, [4, np.nan, (2 + 4 / 2) / 1.5, (1 + 2 / 2 + 4 / 4) / 1.75])
    np.testing.assert_array_equal(smoothed(values, 0.0), values)


def test_what_the_panels_show(run, tmp_path):
    other = write_run(tmp_path / "_two $x$", LINES[:1])
    curves = plot_curves([run, other], smoothing=0.5)
    assert curves.metrics == ["loss", "bleu", "gradient_norm", SPEED]
    figure = curves.figure()
    loss, bleu, norm, speed, legend, _ = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes][:2] == ["loss", "BLEU"]
    (ring,) = (line for line in bleu.lines if line.get_markersize() == 9 and len(line.get_xdata()))
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([4], [20.5])
    # Training, smoothed and not, of each run; validations; the best one.
    assert [len(line.get_xdata()) for line in loss.lines] == [3, 3, 2, 1, 1, 1, 0, 0]
    assert norm.get_yscale() == "log"
    assert (bool(loss.get_xlabel()), speed.get_xlabel()) == (False, "step")
    labels = [text.get_text().strip() for text in legend.get_legend().get_texts()]
    assert labels == [
        "one\n BLEU 20.5 at step 4", "_two $x$", "training", "validation", "best checkpoint",
    ]  # fmt: skip
    assert curves._repr_png_().startswith(b"\x89PNG")
    assert repr(curves).startswith("Curves(one, _two $x$: loss, bleu")


def test_the_page_is_self_contained(run, tmp_path, capfd):
    page = tmp_path / "curves.html"
    other = write_run(tmp_path / "<b>")
    assert main(["plot", "--run", str(run), str(other), "--output", str(page)]) == 0
    assert capfd.readouterr() == (f"{page}\n", "")
    text = page.read_text()
    assert not re.search(r'(src|href|url)\s*[=(]\s*"?(?!#)', text.replace('xlink:href="#', ""))
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert text.count("<svg") == 1
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 5
    assert not re.search("#(0072b2|1f2328)(?!\\))", text.partition("</style>")[2])
    assert "<td>step 4</td>" in text
    assert "<td>19</td>" in text  # The test.


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_images(run, tmp_path, suffix, capfd):
    picture = tmp_path / f"curves.{suffix}"
    options = ("--metrics", "loss", "--x", "hours", "--smoothing", "0.9")
    arguments = ["--run", str(run), "--run", str(run), "--output", str(picture)]
    assert main(["plot", *arguments, *options]) == 0
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert picture.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "{run}", "--output", "c.jpg"], "c.jpg: the name of a picture must end in one"),
        (["--run", "{run}", "--output", "{run}/metrics.jsonl/c.png"], "metrics.jsonl is not a fol"),
        (["--output", "c.png"], "--run is missing"),
        (["--run", "{run}/..", "--output", "c.png"], "is not a run folder"),
        (["--run", "{empty}", "--output", "c.png"], "empty has no metrics to plot: nothing was"),
        (["--run", "{run}", "--output", "c.png", "--metrics", "los"], "did you mean loss?"),
        (
            ["--run", "{run}", "--output", "c.png", "--metrics", "x"],
            "there are bleu, g",
        ),
        (["--run", "{run}", "--output", "c.png", "--smoothing", "1"], "must be below 1"),
    ],
)
def test_errors_are_one_line(run, tmp_path, monkeypatch, capfd, options, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "empty", [])
    folders = {"run": run, "empty": tmp_path / "empty"}
    assert main(["plot", *(each.format(**folders) for each in options)]) == 1
    output, error = capfd.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    assert message in error


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    odd = {"note": [1], "flag": True, "huge": 1e308, "loss": "none"}
    run = write_run(tmp_path / "run", [*LINES, {"step": 8, "split": "train", **odd}])
    assert {"note", "flag"}.isdisjoint(read_history(run).metrics())
    assert len(read_history(run).curve("loss", "train")[0]) == 3
    plot_curves([run], ["loss", "huge"]).figure()


def test_without_matplotlib(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"pictures need matplotlib: pip install 'flaxformer_mt\[plot\]'"
    for name in ("curves.png", "curves.html"):
        with pytest.raises(UserError, match=message):
            plot_curves([run]).save(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_smoothing_without_meaning(run):
    with pytest.raises(UserError, match="smoothing=1: give a number from 0 to below 1"):
        plot_curves([run], smoothing=1.0)
    with pytest.raises(UserError, match="name at least one run folder"):
        plot_curves([])
