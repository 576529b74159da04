"""Power that is lost at any moment of a command, by replaying the calls that it made."""

import os
import random
import shutil

import pytest
from commands import COMMANDS, OUTPUT, arguments, result
from disk import Disk, losses, read, write
from fuzz.core import listing

THREE_SAVES = "--train.num-steps=6"


@pytest.mark.slow
@pytest.mark.timeout(7200)  # Each state costs a start of a command.
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_given_again_after_a_loss_of_power(commands, world, tmp_path, command):
    folder = tmp_path / "all"
    given = arguments(command, world, folder / OUTPUT)
    if command == "train":
        given += (THREE_SAVES,)
    folder.mkdir()
    start, log = Disk(folder), tmp_path / "log"
    code, said, _ = commands.run(given, folder, FAULT_LOG=log)
    assert code == 0, said
    expected, files = result(command, folder), read(folder)
    states = list(losses(start, log))
    *_, last = after = list(start.states())
    assert last == files, "the record is not complete"
    for state in after:  # What a finished command has written is not lost.
        found = described(state, folder, command)
        assert {name: found[name] for name in expected} == expected

    # FAULT_STATES=100 tries so many of them.
    number = min(int(os.environ.get("FAULT_STATES", len(states))), len(states))
    for state in random.Random(0).sample(states, number):
        described(state, folder, command)
        code, said, _ = commands.run(given, folder)
        assert "Traceback" not in said, (listing(folder), said)
        assert code == 0 or ("error: " in said and "exists" in said), (listing(folder), said)
        found = result(command, folder)
        if command == "train":  # That an old checkpoint was deleted may be lost as well.
            kept = {step: found["checkpoints"].get(step) for step in expected["checkpoints"]}
            found |= {"checkpoints": kept}
        assert found == expected, listing(folder)
        assert {name for name in listing(folder) if not name.startswith(OUTPUT)} == set()
    print(f"{command}: {len(states)} states, {number} tried")


def described(state, folder, command):
    """Writes a state into the folder; returns what is compared of it."""
    shutil.rmtree(folder)
    folder.mkdir()
    write(folder, state)
    return result(command, folder)
