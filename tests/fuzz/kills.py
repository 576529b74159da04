"""Kills at random moments of every command that writes.

Given again, a killed command has the result of one that was not killed, or says in one line what to
do; in the end nothing of the killed one is left.
"""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fuzz.core import Case, Outcome, listing, run_command
from fuzz.damage import described
from fuzz.world import REPOSITORY, World

PROGRAM = "import sys; from flaxformer_mt.cli import main; sys.exit(main())"
OUTPUT = "output"
COMMANDS = (
    "train", "train", "average", "convert", "export", "translate", "resume", "evaluate", "prepare",
    "lexicon",
)  # fmt: skip


def arguments(command: str, world: World, output: Path) -> tuple[str, ...]:
    """Returns a command line that writes a file or a folder."""
    run, train = str(world.run), [str(world.text / f"train.{each}") for each in ("en", "de")]
    match command:
        case "train":
            return "train", *world.training(output)
        case "average":
            return "average", "--run", run, "--last", "2", "--output", str(output)
        case "convert":
            given = ("--from", "flaxformer_mt", "--to", "marian", run)
            return "convert", *given, f"{output}.safetensors"
        case "export":
            return "convert", "--from", "flaxformer_mt", "--to", "marian", run, str(output)
        case "translate":
            return "translate", "--run", run, "--input", str(world.lines), "--output", str(output)
        case "resume":
            return *arguments("translate", world, output), "--resume"
        case "evaluate":
            texts = ("--source", str(world.lines), "--reference", str(world.lines))
            return "evaluate", "--run", run, *texts, "--output", str(output)
        case "prepare":
            languages = ("--source-language", "en", "--target-language", "de")
            return "prepare", "--path", str(world.text), "--output", str(output), *languages
        case _:
            files = ("--source", train[0], "--target", train[1])
            return "lexicon", "--run", run, *files, "--output", str(output)


def result(command: str, folder: Path) -> Any:
    """Returns what a command has written into a folder."""
    if command in ("train", "average"):
        return described(folder / OUTPUT)
    return {name: contents(folder / name) for name in listing(folder)}


def contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def baseline(command: str, world: World) -> tuple[Any, float]:
    """Returns the result of an undisturbed process, and its duration in seconds."""
    key = f"kills of {command}"
    if key not in world.results:
        folder = world.folder / key
        folder.mkdir()
        start = time.monotonic()
        with started(arguments(command, world, folder / OUTPUT)) as process:
            assert process.wait() == 0
        world.results[key] = result(command, folder), time.monotonic() - start
    return world.results[key]


def started(given: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    silent = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *given], cwd=REPOSITORY, stdout=silent, stderr=silent
    )


def problem(rng: random.Random, world: World, folder: Path) -> tuple[Case, Outcome, str]:
    """Kills a command and gives it again; returns it, its outcome, and what is wrong."""
    command = rng.choice(COMMANDS)
    expected, duration = baseline(command, world)
    moment = rng.uniform(0.3, 1) * duration
    given = arguments(command, world, folder / OUTPUT)
    with started(given) as process:
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.kill()
    was_finished = process.returncode == 0
    case = Case(f"killed after {moment:.2f} of {duration:.2f} s", given, may_write=True)
    if was_finished:
        outcome = Outcome(0, "", "")
    else:
        outcome = run_command(given, seconds=600)
    found = case.problem(outcome)
    if found or outcome.code != 0:
        return case, outcome, found
    if result(command, folder) != expected:
        return case, outcome, "the result is another"
    left = {name for name in listing(folder) if not name.startswith(OUTPUT)}
    return case, outcome, f"{sorted(left)[:3]} are left" if left else ""
