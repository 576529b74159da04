"""Unknown options: misspelled ones, and those that people know from other programs."""

import contextlib
import io
import re
import typing

import pytest

from flaxformer_mt.cli import entry_points, main, program, training
from flaxformer_mt.cli.unknown_options import COUNTERPARTS, option_names
from flaxformer_mt.exit_codes import ExitCode

COMMANDS = {name: command for group in program.COMMANDS.values() for name, command in group.items()}


def names_of(command):
    if command == "train":
        return [*option_names(typing.get_type_hints(training.Flags))]
    return [*option_names(typing.get_type_hints(COMMANDS[command], include_extras=True))]


def message_of(command, *options):
    """Returns what a command prints about options, which is one line."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        main([command, *options])
    assert stop.value.code == ExitCode.USAGE
    (line,) = errors.getvalue().splitlines()
    name = options[0].partition("=")[0]
    start = f"flaxformer-mt {command}: error: unknown option {name}"
    assert line.startswith(start)
    return line.removeprefix(start)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_are_those_of_the_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")  # No help text is wrapped.
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = re.findall(r"(?m)(?:^| |-\w,) +--([a-z][^\s,]*)", capsys.readouterr().out)
    # Those of corpora are numbered: data.train-corpora.0.path
    corpora = {f"data.{role}-corpora" for role in ("train", "valid", "test")}
    assert {*shown} - {"help"} == {*names_of(command)} - corpora


def test_every_counterpart_is_an_option_and_no_name_of_theirs_is_one_of_ours():
    known = {command: names_of(command) for command in COMMANDS}
    for counterpart in COUNTERPARTS:
        having = [command for command in COMMANDS if counterpart.within(known[command])]
        assert having, counterpart
        # Names that are options already would never be looked up.
        assert any(
            name not in known[command] for name in counterpart.names.split() for command in having
        ), counterpart
    names = [name for counterpart in COUNTERPARTS for name in counterpart.names.split()]
    assert len(names) > 150


FOREIGN = {
    # Transformers
    "--output_dir": "--workdir", "--learning_rate": "--optimizer.learning-rate",
    "--per_device_train_batch_size=8": "--train.batch-tokens", "--max_steps": "--train.num-steps",
    "--num_train_epochs": "--train.num-steps", "--warmup_steps": "--optimizer.warmup-steps",
    "--warmup_ratio=0.1": "--optimizer.warmup",
    "--gradient_accumulation_steps": "--train.accumulation-steps",
    "--save_steps": "--train.checkpoint-every", "--eval_steps": "--train.eval-every",
    "--logging_steps": "--train.log-every", "--seed": "--train.seed",
    "--save_total_limit": "--train.keep-last", "--fp16": "--model.dtype=bfloat16",
    "--metric_for_best_model": "--train.best-metric", "--optim": "--optimizer.kind",
    "--max_grad_norm": "--optimizer.clip-norm", "--adam_beta2": "--optimizer.beta2",
    "--label_smoothing_factor": "--train.label-smoothing", "--num_beams": "--decode.beam-size",
    "--lr_scheduler_type": "--optimizer.schedule", "--weight_decay": "--optimizer.weight-decay",
    "--model_name_or_path": "--train.init-from", "--gradient_checkpointing": "--model.remat",
    "--source_lang": "--data.source-language", "--max_source_length": "--data.source-row-length",
    # fairseq
    "--lr": "--optimizer.learning-rate", "--max-tokens": "--train.batch-tokens",
    "--batch-size": "--train.batch-tokens", "--update-freq": "--train.accumulation-steps",
    "--max-update": "--train.num-steps", "--max-epoch": "--train.num-steps",
    "--epochs": "--train.num-steps", "--warmup-updates": "--optimizer.warmup-steps",
    "--clip-norm": "--optimizer.clip-norm", "--dropout": "--model.dropout-rate",
    "--attention-dropout": "--model.attention-dropout-rate", "--save-dir": "--workdir",
    "--label-smoothing": "--train.label-smoothing", "--patience": "--train.early-stopping-patience",
    "--adam-eps": "--optimizer.epsilon", "--encoder-layers": "--model.num-encoder-layers",
    "--decoder-layers": "--model.num-decoder-layers", "--encoder-embed-dim": "--model.d-model",
    "--encoder-ffn-embed-dim": "--model.d-ff", "--log-interval": "--train.log-every",
    "--share-all-embeddings": "--model.tie-embeddings=all",
    "--save-interval-updates": "--train.checkpoint-every",
    "--beam": "--decode.beam-size", "--lenpen": "--decode.length-penalty",
    # OpenNMT-py, JoeyNMT, Marian, T5X
    "-train_steps": "--train.num-steps", "--valid_steps": "--train.eval-every",
    "--hidden_size": "--model.d-model", "--heads": "--model.num-heads",
    "--transformer_ff": "--model.d-ff", "--mini-batch": "--train.batch-tokens",
    "--after-batches": "--train.num-steps", "--disp-freq": "--train.log-every",
    "--exponential-smoothing": "--train.ema-decay", "--dim-emb": "--model.d-model",
    "--optimizer-delay": "--train.accumulation-steps", "--gin_file": "--config",
    "--beam-size": "--decode.beam-size",
    # Misspelled
    "--optimizer.learning_rat": "--optimizer.learning-rate", "--wordir": "--workdir",
    "--model.dmodel": "--model.d-model", "--train.num-step": "--train.num-steps",
}  # fmt: skip


@pytest.mark.parametrize("option", FOREIGN)
def test_an_option_of_another_program_names_ours(option):
    found = message_of("train", option)
    assert re.match(rf"; did you mean {FOREIGN[option]}( \([^()]+\))?\?$", found), found


@pytest.mark.parametrize(
    ("command", "option", "ours"),
    [
        ("translate", "--num_beams", "--beam-size"),
        ("translate", "--batch-size", "--batch-tokens"),
        ("translate", "--model", "--run"),
        ("translate", "--nbest", "--n-best"),
        ("evaluate", "--ref", "--reference"),
        ("convert", "--frm", "--from"),
        ("attention", "--src", "--source"),
        ("configs", "--copi", "--copy"),
    ],
)
def test_every_command_suggests_its_own_options(command, option, ours):
    assert message_of(command, option).startswith(f"; did you mean {ours}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--decode.length-penalty", "-1"],
        ["--train.seed=-1"],
        ["--model.no-final-norm", "--no-dry-run"],
        ["--model.num_heads", "4", "--data.valid_corpora.0.path", "x"],
        ["--", "--zzz"],
        ["--zzz", "--help"],
    ],
)
def test_what_is_not_an_unknown_option(arguments, capsys):
    with contextlib.suppress(SystemExit):
        entry_points.train([*arguments, "--config=missing"])
    assert "unknown option" not in capsys.readouterr().err
