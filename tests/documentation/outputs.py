"""Compares what a command prints with what a page shows, whose model is another one.

Numbers vary, and so do translations: what is compared is their form, and all other text.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

ELLIPSIS = "..."
"""A line that stands for any number of lines."""


def difference(command: str, shown: Sequence[str], printed: str) -> str:
    """Returns a description of the first difference, or "" if the page is right."""
    form = _form_of(command)
    lines = [line for line in printed.splitlines() if line.strip()]
    shown = [line for line in shown if line.strip()]
    if _is_training(command):
        return _missing_labels(shown, lines)
    if command.startswith("ls"):
        shown, lines = [" ".join(shown).split()], [" ".join(lines).split()]
        return "" if shown == lines else f"{shown} is now {lines}"
    pattern = [line if line.strip() == ELLIPSIS else form(line) for line in shown]
    found = [form(line) for line in lines]
    if _matches(pattern, found):
        return ""
    listed = "\n".join(lines)
    return f"the page shows\n{chr(10).join(shown)}\nbut it prints\n{listed}"


def _matches(pattern: Sequence[str], lines: Sequence[str]) -> bool:
    if not pattern:
        return not lines
    if pattern[0].strip() == ELLIPSIS:
        return any(_matches(pattern[1:], lines[start:]) for start in range(len(lines) + 1))
    return bool(lines) and pattern[0] == lines[0] and _matches(pattern[1:], lines[1:])


def _form_of(command: str) -> Callable[[str], str]:
    words = command.replace(".venv/bin/", "").split()
    translates = "flaxformer-mt translate" in " ".join(words) or words[-3:-1] == ["serve.py", "<"]
    return _form_of_translation if translates or "server.py" in command else without_numbers


def without_texts(line: str) -> str:
    """Replaces the strings of Python, too."""
    return re.sub(r"'[^']*'", "TEXT", without_numbers(line))


def without_numbers(line: str) -> str:
    """Replaces numbers, times and sizes by 0, and spaces of any number by one.

    Which value of a report is the worst depends on rounding, and so does the width of its table.
    """
    line = re.sub(r"worst \S+", "worst SITE", re.sub("─+", "─", line))
    line = re.sub(r"-?\d[\d,.:]*(e[+-]?\d+)?( (bytes|[kMGT]i?B))?", "0", line)
    return " ".join(line.replace(" *", "").split())


def _form_of_translation(line: str) -> str:
    """Keeps the fields of a line, and the keys of JSON."""
    if line.startswith("flaxformer-mt: "):
        return without_numbers(line)
    if line.startswith("{"):
        return str(_keys(json.loads(line)))
    fields = line.split(" ||| ")
    return " ||| ".join("0" if re.fullmatch(r"[-\d. ]+", field) else "TEXT" for field in fields)


def _keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_keys(value[0])] if value and isinstance(value[0], dict) else []
    return type(value).__name__


def _is_training(command: str) -> bool:
    return re.search(r"(train\.py|flaxformer-mt train) ", command) is not None


def _missing_labels(shown: Sequence[str], printed: Sequence[str]) -> str:
    """Returns what the page shows of the report of a run that the program does not print."""
    labels = {label for line in printed for label in _labels(line)}
    missing = {label for line in shown for label in _labels(line)} - labels - {ELLIPSIS}
    return f"it does not print {sorted(missing)}" if missing else ""


def _labels(line: str) -> set[str]:
    """The label of a line of the report, or those of a line of metrics."""
    if line.startswith("step "):
        names = re.findall(r"(\w[\w/]*) (?=-?\d)|(tokens/s)", line)
        return {f"step: {name or speed}" for name, speed in names}
    return {line.split()[0]} if re.match(r" *\w+  ", line) else set()
