"""Every number of every configuration, wherever it is given: valid, or one line that names it."""

import contextlib
import dataclasses
import io

import jax
import numpy as np
import pytest
import safetensors.numpy

from flaxformer_mt.cli import main, training
from flaxformer_mt.config import (
    CorpusConfig,
    DataConfig,
    ExperimentConfig,
)
from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import bounds_of, type_hints
from flaxformer_mt.config.files import load_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.runs import parameter_file
from flaxformer_mt.training.devices import seed_key

VALUES = ["nan", "inf", "-inf", "-1", "0", "1e9", "1e20", "10**20"]
IN_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "10**20": str(10**20)}
NUMERIC = [
    (group, field)
    for group, kind in groups().items()
    for field in dataclasses.fields(kind)
    if bounds_of(field) is not None
]


def is_tuple(group, field):
    return type_hints(groups()[group])[field.name] == tuple[int, ...]


def assert_accepted_or_named(load, group, field):
    """Either the configuration is whole and has a number within the bounds, or a line names it."""
    try:
        config = load()
    except UserError as error:
        message = str(error)
        assert message.isprintable()
        assert len(message) < 400
        assert field.name in message or "parameters" in message
        return
    config = getattr(config, group) if isinstance(config, ExperimentConfig) else config
    value = getattr(config, field.name)
    for number in value if isinstance(value, tuple) else (value,):
        assert bounds_of(field).problem(number) == ""


@pytest.mark.parametrize(
    ("group", "field"),
    [
        pytest.param(group, field, id=field.name, marks=[pytest.mark.slow] if index % 6 else [])
        for index, (group, field) in enumerate(NUMERIC)
    ],
)
def test_in_configuration_files_and_metadata(tmp_path, group, field):
    for value in VALUES:
        text = f"({value},)" if is_tuple(group, field) else value
        (tmp_path / "config.py").write_text(
            "from math import inf, nan\nfrom flaxformer_mt.config import *\n"
            f"GROUP = dict({field.name}={text})\n"
            "def get_config():\n"
            f"    kind = type(ExperimentConfig().{group})\n"
            f"    return ExperimentConfig({group}=kind(**GROUP))\n"
        )
        assert_accepted_or_named(lambda: load_config(tmp_path / "config.py"), group, field)
        number = IN_JSON.get(value, value)
        number = f"[{number}]" if is_tuple(group, field) else number
        (tmp_path / "config.json").write_text(f'{{"{group}": {{"{field.name}": {number}}}}}')
        assert_accepted_or_named(lambda: load_config(tmp_path / "config.json"), group, field)
        if group == "model":
            metadata = {"format": "flaxformer_mt", "config": f'{{"{field.name}": {number}}}'}
            file = tmp_path / "model.safetensors"
            safetensors.numpy.save_file({"x": np.zeros(1, np.float32)}, file, metadata)
            assert_accepted_or_named(
                lambda file=file: parameter_file.read(file).config, group, field
            )


def parse(*options):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            return training.parse_flags(["--workdir=run", *options, "--config=configs/forkme.py"])
        except SystemExit as end:
            raise UserError(" ".join(error.getvalue().split())[:300]) from end


def check_on_the_command_line(group, field, value):
    option = f"--{group}.{field.name.replace('_', '-')}"
    try:
        flags = parse(option, value)
    except UserError as error:
        message = str(error)
        assert field.name in message or option in message or "parameters" in message
        return
    assert_accepted_or_named(flags.experiment, group, field)


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        (group, field, value)
        for (group, field), value in zip(NUMERIC[::9], VALUES * 2, strict=False)
    ],
)
def test_on_the_command_line(group, field, value):
    check_on_the_command_line(group, field, value)


@pytest.mark.slow  # All of what test_on_the_command_line samples.
@pytest.mark.parametrize(("group", "field"), NUMERIC, ids=lambda value: getattr(value, "name", ""))
def test_all_on_the_command_line(group, field):
    for value in VALUES:
        check_on_the_command_line(group, field, value)


@pytest.mark.parametrize("value", [float(value) for value in VALUES if "*" not in value])
def test_in_a_list_of_corpora(value):
    with contextlib.suppress(UserError):
        data = DataConfig(train_corpora=(CorpusConfig(weight=value),))
        assert 0 < data.train_corpora[0].weight <= 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["average", "--run", "x", "--last", "0"], "--last=0: must be at least 1"),
        (["average", "--run", "x", "--best", "-1"], "--best=-1: must be at least 1"),
        (["average", "--run", "x", "--last", str(10**20)], "--last=100000000000000000000: must be"),
        (["parity", "--family", "torch", "--seed", "-1"], "--seed=-1: must be at least 0"),
        (["parity", "--family", "torch", "--seed", str(10**20)], "--seed=100000000000000000000: "),
        (["parity", "--family", "torch", "--steps", "-1"], "--steps=-1: must be at least 0"),
        (["parity", "--family", "torch", "--steps", "1000000000"], "--steps=1000000000: must be"),
    ],
)
def test_numbers_of_other_commands(capsys, arguments, message):
    assert main(arguments) == (ExitCode.USAGE if arguments[0] == "parity" else ExitCode.FAILURE)
    error = capsys.readouterr().err
    assert error.startswith(f"flaxformer-mt: error: {message}")
    assert error.count("\n") == 1


def test_every_bit_of_a_seed_counts():
    seeds = (0, 1, 2**31, 2**32 - 1, 2**32, 2**33, 2**63 - 1)
    keys = {tuple(np.asarray(jax.random.key_data(seed_key(seed))).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)
    assert (jax.random.key_data(seed_key(7)) == jax.random.key_data(jax.random.key(7))).all()
