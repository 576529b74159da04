"""Training as a user runs it: the run folder, continuation, options."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest
from small_runs import flags, metrics

from flaxformer_mt.cli import training
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.runs.checkpoint import restore_params
from flaxformer_mt.runs.folder import read_config
from flaxformer_mt.training.optimizer import make_schedule


@pytest.mark.slow
def test_a_run_folder_is_all_that_a_model_needs(finished, text, tmp_path):
    assert {path.name for path in finished.iterdir()} == {
        "cache", "checkpoints", "config.json", "data.json", "lock", "metrics.jsonl", "tensorboard",
        "tokenizer",
    }  # fmt: skip
    assert list((finished / "tensorboard").iterdir())
    lines = metrics(finished)
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"), (4, "train"), (4, "valid"), (6, "train"), (6, "valid"), (6, "test"),
    ]  # fmt: skip
    for key in (
        "loss",
        "accuracy",
        "target_tokens_per_second",
        "target_tokens_per_second_per_device",
        "flops_per_target_token",
        "memory_bytes",
        "padding_fraction",
        "learning_rate",
    ):
        assert lines[0][key] >= 0
    assert lines[3]["compilations"] == 1
    for key in ("loss", "accuracy", "perplexity", "bleu", "chrf"):
        assert lines[2][key] >= 0
    assert "version:" in lines[5]["bleu_signature"]

    moved = tmp_path / "elsewhere"
    shutil.copytree(finished, moved)
    assert len(Translator.from_run(moved).translate(["three", "", "two hundred"])) == 3


@pytest.mark.slow
@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(finished, text, tmp_path, stop):
    workdir = tmp_path / "run"
    training.train(training.parse_flags(flags(text, workdir, f"--train.num-steps={stop}")))
    # Without --config, with the configuration of the folder.
    training.train(training.parse_flags([f"--workdir={workdir}", "--train.num-steps=6"]))
    assert restore_params(workdir, "last")[0] == 6
    chex.assert_trees_all_equal(
        restore_params(workdir, "last")[1], restore_params(finished, "last")[1]
    )
    losses = {line["step"]: line["loss"] for line in metrics(workdir) if line["split"] == "valid"}
    assert losses[6] == metrics(finished)[4]["loss"]


KILLED_AMID_A_SAVE = """
import os, signal, sys

def audit(event, arguments):
    # A checkpoint has another name until it is whole.
    if event == "os.rename" and str(arguments[1]).endswith("checkpoints/4"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(audit)
from flaxformer_mt.cli import training
training.train(training.parse_flags(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(finished, text, tmp_path):
    """Killed when all of a checkpoint but its name is written; test_kills.py kills at any time."""
    workdir = tmp_path / "run"
    arguments = flags(text, workdir, "--train.num-steps=6")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AMID_A_SAVE, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    names = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert "2" in names
    assert "4" not in names
    training.train(training.parse_flags(arguments))
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == sorted(
        path.name for path in (finished / "checkpoints").iterdir()
    )
    chex.assert_trees_all_equal(
        restore_params(workdir, "last")[1], restore_params(finished, "last")[1]
    )
    losses, expected = (
        [(line["step"], line["split"], line["loss"]) for line in metrics(folder)]
        for folder in (workdir, finished)
    )
    assert losses == expected


@pytest.mark.slow  # Decided by tests/training: test_parallel.py and test_loop.py.
def test_a_run_goes_on_with_fewer_devices(text, tmp_path):
    def run(name, num_steps, num_devices):
        options = (
            f"--train.num-steps={num_steps}",
            f"--parallel.num-devices={num_devices}",
            "--train.log-every=1",
            "--train.eval-every=100",
            "--train.checkpoint-every=100",
            "--model.dropout-rate=0.3",
        )
        training.train(training.parse_flags(flags(text, tmp_path / name, *options)))
        return [line for line in metrics(tmp_path / name) if line["split"] == "train"]

    whole = run("whole", 9, 8)
    for num_steps, num_devices in ((3, 8), (6, 4), (9, 1)):
        parts = run("parts", num_steps, num_devices)
    assert [line["step"] for line in parts] == [*range(1, 10)]
    for name in ("loss", "padding_fraction"):  # the latter tells batches apart
        np.testing.assert_allclose(
            [line[name] for line in parts], [line[name] for line in whole], rtol=0, atol=1e-5
        )


def test_a_missing_config(refuse, tmp_path):
    error = refuse("--config=configs/none.py", f"--workdir={tmp_path / 'run'}")
    assert "there is no file configs/none.py" in error


def test_without_a_config_the_folder_must_hold_a_run(refuse, begun, tmp_path, capsys):
    for workdir in (tmp_path, tmp_path / "missing"):
        error = refuse(f"--workdir={workdir}")
        assert f"--workdir={workdir} holds no run to continue: give --config to start one" in error
    with pytest.raises(SystemExit):
        training.parse_flags([f"--workdir={begun}", "--help"])
    assert "--model.d-model INT" in capsys.readouterr().out
    assert training.parse_flags([f"--workdir={begun}"]).experiment() == read_config(begun)


@pytest.mark.parametrize("name", [path.stem for path in sorted(Path("configs").glob("*.py"))])
def test_every_configuration_is_valid_also_with_few_steps(name, tmp_path):
    for options in ((), ("--train.num-steps=120",), ("--optimizer.warmup_steps=100",)):
        arguments = [f"--config=configs/{name}.py", f"--workdir={tmp_path}", *options]
        config = training.parse_flags(arguments).experiment()
        w = config.optimizer.warmup_length(config.train.num_steps)
        assert 0 < w < config.train.num_steps
        make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)
        assert not config.optimizer.warmup or "--optimizer.warmup_steps=100" not in options
