"""The commands that write: their arguments, and what they have written."""

from pathlib import Path
from typing import Any

from fuzz.core import listing
from fuzz.damage import described
from fuzz.world import World

OUTPUT = "output"
COMMANDS = (
    "average", "convert", "evaluate", "export", "lexicon", "resume", "train", "translate",
)  # fmt: skip


def arguments(command: str, world: World, output: Path) -> tuple[str, ...]:
    """Returns a command line that writes a file or a folder."""
    match command:
        case "export":
            *options, _ = world.command("convert", output)
            return *options, str(output)
        case "translate" | "evaluate":
            return *world.command(command, output), f"--output={output}"
        case "resume":
            return *arguments("translate", world, output), "--resume"
        case _:
            return world.command(command, output)


def result(command: str, folder: Path) -> Any:
    """Returns what a command has written into a folder."""
    if command in ("train", "average"):
        return described(folder / OUTPUT)
    return {name: contents(folder / name) for name in listing(folder)}


def contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
