"""Every number of every configuration, wherever it is given: valid, or one line that names it."""

import jax
import numpy as np
import pytest

from flaxformer_mt.cli import main
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.training.devices import seed_key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["average", "--run", "x", "--last", "0"], "--last=0: must be at least 1"),
        (["parity", "--family", "torch", "--seed", "-1"], "--seed=-1: must be at least 0"),
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
