"""Damage to each file of a run folder, before each command that reads it.

A command on a damaged run either names the damage, or its result has the bits of the undamaged
run's.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import FieldRole, names_with
from fuzz.core import Case, Outcome, run_command
from fuzz.mutations import damage_file
from fuzz.world import World

EDITABLE = frozenset(
    f"{group}.{name}"
    for group, kind in groups().items()
    for name in names_with(
        kind, FieldRole.RUNNING, FieldRole.SEARCH, FieldRole.START, FieldRole.SELECTION
    )
)
"""Fields of `config.json` that a person may edit by hand, and with them the result."""
COMMANDS = ("translate", "score", "evaluate", "inspect", "average", "convert", "continue")
WEIGHTS = (4, 4, 1, 4, 2, 4, 1)
UNREAD = ("tensorboard", "lock")
"""Files that are written only: no result depends on them."""


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    run = world.copy_run(folder)
    name = rng.choice(files_by_group(rng, run))
    others = sorted(file for file in world.run.rglob("*") if file.is_file())
    twin = world.other / name.rpartition("/")[2]
    other = twin if twin.is_file() and rng.random() < 0.5 else rng.choice(others)
    done = damage_file(rng, run / name, folder / "outside", other)
    command = rng.choices(COMMANDS, WEIGHTS)[0]
    return Case(
        f"{done} of a run: {name}",
        arguments(command, world, run, folder),
        check=lambda outcome: difference(command, name, world, run, folder, outcome),
        names=mentions(name),
        may_write=command == "continue",
    )


def files_by_group(rng: random.Random, run: Path) -> list[str]:
    """Returns the files of one part of a run folder: configuration, tokenizer, store, ..."""
    groups: dict[str, list[str]] = {}
    for path in sorted(run.rglob("*")):
        if path.is_file():
            name = path.relative_to(run).as_posix()
            parts = name.split("/")
            key = "/".join(parts[:1] + parts[2:3]) if parts[0] == "checkpoints" else parts[0]
            groups.setdefault(key, []).append(name)
    return groups[rng.choice(sorted(groups))]


def arguments(command: str, world: World, run: Path, folder: Path) -> tuple[str, ...]:
    """Returns a command line that reads a run, and writes into a folder."""
    if command == "continue":
        return "train", *world.training(run)
    return world.command(command, folder / "output", run)


def result(command: str, run: Path, folder: Path, outcome: Outcome) -> Any:
    """Returns what a command has computed."""
    match command:
        case "average":
            return described(folder / "output")
        case "convert":
            return (folder / "output.safetensors").read_bytes()
        case "continue":
            return described(run)
        case "inspect":
            return without_editable(json.loads(outcome.out))
        case _:
            return outcome.out


def described(run: Path) -> Any:
    """Returns what `inspect` prints of a run."""
    outcome = run_command(("inspect", "--run", str(run), "--json"))
    return without_editable(json.loads(outcome.out)) if outcome.code == 0 else outcome.err


def without_editable(description: dict[str, Any]) -> dict[str, Any]:
    for field in EDITABLE:
        group, name = field.split(".")
        description["config"].get(group, {}).pop(name, None)
    return description


def baseline(command: str, world: World) -> Any:
    """Returns the result of a command on the undamaged run; each is computed once."""
    if command not in world.results:
        folder = world.folder / f"baseline-{command}"
        folder.mkdir()
        run = world.copy_run(folder)
        outcome = run_command(arguments(command, world, run, folder))
        assert outcome.code == 0, outcome
        world.results[command] = result(command, run, folder, outcome)
        shutil.rmtree(folder)
    return world.results[command]


def difference(
    command: str, name: str, world: World, run: Path, folder: Path, outcome: Outcome
) -> str:
    """Says how a success on a damaged run is wrong, "" if it is right or names the damage."""
    if any(each in outcome.text for each in mentions(name) if each not in UNREAD):
        return ""
    if name == "config.json" and changed_fields(world.run / name, run / name) <= EDITABLE:
        return ""
    if result(command, run, folder, outcome) == baseline(command, world):
        return ""
    return f"{command} gives another result without a word about {name}"


def changed_fields(intact: Path, damaged: Path) -> set[str]:
    """Returns the names of the fields in which two configurations differ."""
    try:
        ours, theirs = (
            {
                (f"{group}.{name}", str(value))
                for group, fields in json.loads(path.read_text()).items()
                for name, value in fields.items()
            }
            for path in (intact, damaged)
        )
    except (OSError, ValueError, AttributeError):
        return {"all of them"}
    return {name for name, _ in ours ^ theirs}


def mentions(name: str) -> tuple[str, ...]:
    """Returns what a message about a file may call it: itself, or a folder that it is in."""
    parts = name.split("/")
    if parts[0] == "checkpoints":
        return (f"checkpoints/{parts[1]}", "checkpoints holds", parts[-1])
    return (parts[0], parts[-1])
