"""What the generators have found before, literally: each is refused in one line.

Each function returns a case, whose files are in `folder`.
"""

from pathlib import Path

from fuzz.core import Case
from fuzz.world import World


def refused(message: str, *arguments: object, stdin: bytes = b"") -> Case:
    given = tuple(map(str, arguments))
    return Case(message, given, stdin, check=lambda _: "accepted", names=(message,))


def a_path_that_is_too_long(world: World, folder: Path) -> Case:
    return refused("File name too long", "translate", "--run", "a" * 300)


def two_dashes_as_a_path(world: World, folder: Path) -> Case:
    return refused("run folder --", "translate", "--run=--")


def a_line_end_in_a_name(world: World, folder: Path) -> Case:
    return refused("a\\nb", "convert", "--from", "marian", "a\nb", folder / "o.pt")


def half_a_character_in_json(world: World, folder: Path) -> Case:
    given = ("translate", "--run", world.run, "--input-format", "jsonl")
    return refused("standard input, line 1", *given, stdin=b'{"text": "\\ud800"}\n')


LITERAL_CASES = (half_a_character_in_json,)
WITHOUT_A_RUN = (a_path_that_is_too_long, two_dashes_as_a_path, a_line_end_in_a_name)
"""These need no model: they are in every test run."""
