"""Configurations and metadata: wrong types, NaN, infinity, huge, missing, unknown, nested."""

import json
import math
import random
import typing
from pathlib import Path
from typing import Any

from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import bounds_of
from flaxformer_mt.runs.manifest import write_manifest
from fuzz import damage
from fuzz.core import Case, Outcome
from fuzz.mutations import mutate_json, python_value, replace_file
from fuzz.world import CONFIG, World

PYTHON = (
    "", "x", "def get_config(", "import nothing_of_this_name", "get_config = 3", "raise ValueError",
    "def get_config():\n    return None", "def get_config():\n    return 1 / 0", "\0", "\ufeff",
    "def get_config():\n\treturn x\n        y", "import sys\nsys.exit(3)", "assert False",
    "def get_config(name):\n    return name", "raise KeyError", "from os import nothing",
    "def get_config():\n    raise OSError", "def get_config():\n    return get_config()",
    "class get_config: pass", "'''", "# -*- coding: nothing -*-", "def get_config():\n  exec('(')",
)  # fmt: skip
"""Configuration files that give no configuration."""
MISTAKES = (
    ("num_steps=", "num_step="), ("d_model=128", "d_model='128'"), ("d_model=128", "d_model=-1"),
    ("learning_rate=5e-3", "learning_rate=float('nan')"), ("DataConfig", "DataConfg"),
    ("beam_size=4", "beam_size=4.5"), ("vocab_size=10000", "vocab_size=10**30"),
    ("ExperimentConfig(", "dict("), ('corpus="text"', "corpus=None"), ("presets", "preset"),
    ("eval_every=448,", "eval_every=448"), ("model=presets.marian(", "model=dict("),
    ("return ExperimentConfig(", "yield ExperimentConfig("), ("pad_id=0", "pad_id=10**9"),
    ("num_heads=4", "num_heads=0"), ('schedule="one', 'schedule="One'), (":\n", "\n"),
)  # fmt: skip
"""Edits of a configuration file that make it invalid."""
RUN_FILES = ("config.json", "config.json", "data.json", "store", "progress")


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    way = rng.choice(("json", "json", "run", "run", "run", "python"))
    return {"json": config_json, "run": run_metadata, "python": config_file}[way](
        rng, world, folder
    )


def config_json(rng: random.Random, world: World, folder: Path) -> Case:
    """The configuration of a run as the configuration file of another."""
    values = json.loads((world.run / "config.json").read_text())
    text, done, where, new = mutate_json(rng, values)
    path = folder / "config.json"
    path.write_text(text)
    arguments = ("train", f"--config={path}", f"--workdir={folder / 'output'}", "--dry-run")
    return Case(
        f"config.json: {done}",
        arguments,
        check=lambda outcome: field_problem(where, new),
        names=("config.json", *names_of(where)),
    )


def run_metadata(rng: random.Random, world: World, folder: Path) -> Case:
    """A JSON file of a run folder."""
    run = world.copy_run(folder)
    kind = rng.choice(RUN_FILES)
    name = {"store": "cache/train-0/store.json", "progress": "checkpoints/4/progress.json"}.get(
        kind, kind
    )
    text, done, where, new = mutate_json(rng, json.loads((run / name).read_text()))
    replace_file(run / name, text.encode(errors="surrogatepass"))
    is_forged = "/" in name and rng.random() < 0.5
    if is_forged:  # Any result may be right.
        write_manifest((run / name).parent)
    commands = ("translate", "score", "inspect", "average", "convert")
    command = rng.choice(commands) if kind != "store" else "continue"
    if rng.random() < 0.1:
        command = "continue"

    def check(outcome: Outcome) -> str:
        if is_forged:
            return ""
        problem = field_problem(where, new) if kind == "config.json" else ""
        return problem or damage.difference(command, name, world, run, folder, outcome)

    return Case(
        f"{name}: {done}",
        damage.arguments(command, world, run, folder),
        check=check,
        names=(*damage.mentions(name), *names_of(where)),
        may_write=command == "continue",
    )


def config_file(rng: random.Random, world: World, folder: Path) -> Case:
    """A configuration file in Python."""
    path = folder / "config.py"
    if rng.random() < 0.5:
        text = done = rng.choice(PYTHON)
    else:
        old, new = rng.choice(MISTAKES)
        text, done = CONFIG.read_text().replace(old, new), f"{old!r} -> {new!r}"
        assert text != CONFIG.read_text(), old
    path.write_bytes(text.encode())
    arguments = world.training(folder / "output")[1:]
    return Case(
        f"config.py: {done}",
        ("train", f"--config={path}", *arguments, "--dry-run"),
        check=lambda outcome: "accepted a configuration file that gives no configuration",
        names=(str(path), "="),
    )


def names_of(where: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns how messages name the field at a place in a configuration."""
    names = [str(each) for each in where if not isinstance(each, int)]
    return tuple(name for each in names for name in (each, each.replace("_", "-")))


def field_problem(where: tuple[Any, ...], new: Any) -> str:
    """Says why the new value at a place in a configuration is nonsense, "" if it may be valid."""
    if where == ("unknown",) and new is not None:
        return "accepted an unknown field"
    if len(where) < 2 or new is None:
        return ""
    kind = groups().get(where[0])
    value = python_value(new)
    hints = typing.get_type_hints(kind) if kind else {}
    if kind is None or where[1] not in hints or len(where) > 2:
        return ""
    hint = hints[where[1]]
    if isinstance(value, str) and value.startswith("@") and hint is not str:
        return f"accepted {new} for {where}"
    if hint not in (int, float):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | (float if hint is float else int)):
        return f"accepted {value!r} for {where}, which is no {hint.__name__}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"accepted {value!r} for {where}"
    fields = kind.__dataclass_fields__
    bounds = bounds_of(fields[where[1]])
    problem = bounds.problem(value) if bounds else "no bounds are declared"
    return f"accepted {value!r} for {where}: {problem}" if problem else ""
