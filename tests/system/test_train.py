"""Training as a user runs it: the run folder, continuation, options."""

import shutil
from pathlib import Path

import pytest
from small_runs import metrics

from flaxformer_mt.cli import training
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.runs.folder import read_config
from flaxformer_mt.training.optimizer import make_schedule, warmup_length


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
        w = warmup_length(config.optimizer, config.train.num_steps)
        assert 0 < w < config.train.num_steps
        make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)
        assert not config.optimizer.warmup or "--optimizer.warmup_steps=100" not in options
