"""Unknown options: misspelled ones, and those that people know from other programs."""

import contextlib
import io
import re
import typing

import pytest

from flaxformer_mt.cli import entry_points, main, preparation, program, training
from flaxformer_mt.cli.unknown_options import COUNTERPARTS, option_names
from flaxformer_mt.exit_codes import ExitCode

COMMANDS = {name: command for group in program.COMMANDS.values() for name, command in group.items()}


def names_of(command):
    if kind := {"train": training.Flags, "prepare": preparation.PrepareFlags}.get(command):
        return [*option_names(typing.get_type_hints(kind))]
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
    "--per_device_train_batch_size=8": "--train.batch-tokens", "--max_steps": "--train.num-steps",
    "--warmup_ratio=0.1": "--optimizer.warmup",
    "--gradient_accumulation_steps": "--train.accumulation-steps",
    "--model_name_or_path": "--train.init-from", "--gradient_checkpointing": "--model.remat",
    # fairseq
    "--lr": "--optimizer.learning-rate", "--max-tokens": "--train.batch-tokens",
    "--share-all-embeddings": "--model.tie-embeddings=all",
    "--beam": "--decode.beam-size", "--lenpen": "--decode.length-penalty",
    # OpenNMT-py, JoeyNMT, Marian, T5X
    "-train_steps": "--train.num-steps", "--valid_steps": "--train.eval-every",
    "--exponential-smoothing": "--train.ema-decay", "--dim-emb": "--model.d-model",
    "--optimizer-delay": "--train.accumulation-steps", "--gin_file": "--config",
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
