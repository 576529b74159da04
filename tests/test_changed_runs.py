"""Runs that are continued with changed options."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import flaxformer_mt
from flaxformer_mt.cli import main
from flaxformer_mt.config import (
    CONTINUATIONS,
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.errors import UserError
from flaxformer_mt.plotting.curves import plot_curves
from flaxformer_mt.run_reader import Run
from flaxformer_mt.runs.folder import read_config
from flaxformer_mt.trained_model import describe_run, load_run, parameters_sha256

TEXT = [f"{a} {b} {c}\t{c} {b} {a}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr"]


def experiment_of(folder):
    for name, lines in (("train", TEXT), ("more", TEXT[::2] * 3), ("valid", TEXT[:6])):
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    corpora = {
        f"{role}_corpora": (flaxformer_mt.config.CorpusConfig(path=str(folder / f"{role}.tsv")),)
        for role in ("train", "valid")
    }
    return ExperimentConfig(
        model=TransformerConfig(
            d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1
        ),
        data=DataConfig(
            test_split="", vocab_size=280, target_row_length=32, source_row_length=32, **corpora
        ),
        train=TrainConfig(
            num_steps=4, batch_tokens=256, eval_every=2, checkpoint_every=4, log_every=2,
            eval_sentences=1, best_metric="loss",
        ),
        decode=DecodeConfig(beam_size=1, max_length_factor=0, max_length_extra=2),
        parallel=ParallelConfig(num_devices=1),
    )  # fmt: skip


def more_text(config):
    """Returns the values of a corpus with other lines."""
    path = config.data.train_corpora[0].path.replace("train.tsv", "more.tsv")
    return {"train_corpora": (dataclasses.replace(config.data.train_corpora[0], path=path),)}


CHANGES = (
    ("optimizer.learning_rate", lambda config: {"optimizer": {"learning_rate": 5e-4}}),
    ("text of train", lambda config: {"data": more_text(config)}),
    ("train.accumulation_steps", lambda config: {"train": {"accumulation_steps": 2}}),
    ("optimizer.kind", lambda config: {"optimizer": {"kind": "adafactor", "clip_norm": 0.0}}),
)


def longer(config, steps):
    train = {"num_steps": config.train.num_steps + steps}
    return with_changes(config, {"train": train})


def stop_at(step):
    hooks = flaxformer_mt.Hooks()
    hooks.add_hook(lambda info: info.step >= step)
    return hooks


@pytest.mark.slow
def test_changes_are_recorded_and_bit_exact_after_a_stop(tmp_path, capsys):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    config = experiment_of(tmp_path)
    for workdir in (whole, stopped):
        flaxformer_mt.train(config, workdir)
    for name, change in CHANGES:
        changed = longer(with_changes(config, change(config)), 4)
        start = config.train.num_steps
        if name != "train.accumulation_steps":
            with pytest.raises(UserError, match=r"--accept-changes") as refused:
                flaxformer_mt.train(changed, whole)
            assert "\n" not in str(refused.value)
            assert name.removeprefix("text of ") in str(refused.value)
        config = changed
        accepts = {"accept_changes": name != "train.accumulation_steps"}
        capsys.readouterr()
        flaxformer_mt.train(config, whole, **accepts)
        assert f"changed after step {start}: " in capsys.readouterr().out
        assert name in " ".join(describe_run(whole)["changes"] or ())
        # The second run is stopped twice: at once, and amid the new steps.
        flaxformer_mt.train(config, stopped, **accepts, hooks=stop_at(start + 2))
        flaxformer_mt.train(config, stopped)
        runs = load_run(whole, "last"), load_run(stopped, "last")
        jax.tree.map(np.testing.assert_array_equal, runs[0].params, runs[1].params)
    assert parameters_sha256(runs[0].params) == parameters_sha256(runs[1].params)
    history = json.loads((whole / "config.json").read_text())["history"]
    assert [entry["step"] for entry in history] == [4 * n for n in range(1, len(CHANGES) + 1)]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if line["split"] == "change"]
    assert [event["step"] for event in events] == [entry["step"] for entry in history]
    assert len(describe_run(whole)["changes"]) == len(CHANGES)
    curves = plot_curves([whole])
    (axes, *_) = curves.figure().axes
    assert sum(line.get_linestyle() == ":" for line in axes.lines) == len(CHANGES)
    assert read_config(whole).train.num_steps == config.train.num_steps


@pytest.mark.slow
def test_what_cannot_change_names_the_way_to_a_new_run(tmp_path, capsys):
    config = experiment_of(tmp_path)
    flaxformer_mt.train(config, tmp_path / "run")
    for changes in ({"model": {"d_ff": 32}}, {"data": {"vocab_size": 300}}, {"train": {"seed": 1}}):
        with pytest.raises(UserError, match=r"train\.init_from=") as refused:
            flaxformer_mt.train(
                with_changes(config, changes), tmp_path / "run", accept_changes=True
            )
        assert "--accept-changes" not in str(refused.value)
    new = {"init_from": str(tmp_path / "run"), "init_optimizer": True, "freeze": ("encoder/",)}
    capsys.readouterr()
    flaxformer_mt.train(with_changes(config, {"train": new | {"seed": 1}}), tmp_path / "new")
    assert f"the optimizer's moments are those of {tmp_path / 'run'}\n" in capsys.readouterr().out
    assert not Run(tmp_path / "new").fine_tuning_config().train.init_optimizer


@pytest.mark.slow
def test_a_changed_history_is_noticed(tmp_path, capsys):
    config = experiment_of(tmp_path)
    run = tmp_path / "run"
    flaxformer_mt.train(config, run)
    changed = with_changes(
        config, {"optimizer": {"learning_rate": 5e-4}, "train": {"num_steps": 6}}
    )
    flaxformer_mt.train(changed, run, accept_changes=True)
    path = run / "config.json"
    values = json.loads(path.read_text())
    del values["history"]
    path.write_text(json.dumps(values))
    assert main(["inspect", "--run", str(run)]) == 1
    assert "config.json is damaged or was changed" in capsys.readouterr().err


def test_every_option_has_a_continuation():
    assert set(CONTINUATIONS.values()) == {"free", "noted", "accepted", "never"}
    assert CONTINUATIONS["model.d_model"] == CONTINUATIONS["data.vocab_size"] == "never"
    assert CONTINUATIONS["model.dtype"] == CONTINUATIONS["optimizer.learning_rate"] == "accepted"
    assert CONTINUATIONS["train.accumulation_steps"] == "noted"
    assert CONTINUATIONS["decode.beam_size"] == CONTINUATIONS["train.num_steps"] == "free"
