"""Recognizes the first row of a table as a header, by the names of its two columns."""

import re
from collections.abc import Sequence
from pathlib import Path

_FILE = Path(__file__).with_name("language_names.txt")
_LANGUAGES = [line.split() for line in _FILE.read_text("utf-8").splitlines()]
"""The codes and names of each language."""
_ROLES = (
    {"source", "src", "original", "input", "text", "sentence"},
    {"target", "tgt", "trg", "translation", "output", "reference"},
)
"""Words that name the columns of sources and targets."""

_FURTHER = {"text", "sentence", "sentences", "segment", "language", "lang", "column"}
"""Words that may be beside one of a role or a language: "English sentence"."""


def sides_of(cells: Sequence[str], languages: tuple[str, str]) -> tuple[int, int] | None:
    """Returns the indices of the only two cells that name the source and the target.

    The languages have names ("French", "français", "fra", "fr", "fr_FR", "fr_text"); otherwise the
    sides are called "source" and "target", or likewise. None if a side has no cell, or several.
    """
    for choose in (_language_words, _role_words):
        found = [
            [index for index, cell in enumerate(cells) if _consists_of(cell, *choose(side, code))]
            for side, code in enumerate(languages)
        ]
        if [len(indices) for indices in found] == [1, 1] and found[0] != found[1]:
            return found[0][0], found[1][0]
    return None


def _consists_of(cell: str, names: set[str], further: set[str]) -> bool:
    """Returns whether a cell has one of `names`, and besides them only further words."""
    words = set(re.findall(r"[^\W_]+", cell.casefold()))
    return bool(words & names) and words <= names | further


def _language_words(side: int, code: str) -> tuple[set[str], set[str]]:
    parts = re.split("[-_]", code.casefold())
    names = {word for line in _LANGUAGES if parts[0] in line for word in line} | {parts[0]}
    return names, {*parts, *_FURTHER, *_ROLES[side]}


def _role_words(side: int, code: str) -> tuple[set[str], set[str]]:
    return _ROLES[side], _FURTHER
