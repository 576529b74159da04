"""Suggestions for unknown options: misspelled ones, and those that other programs have."""

import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from flaxformer_mt.exit_codes import ExitCode


class Counterpart(NamedTuple):
    """An option of ours, and its names in fairseq, OpenNMT, JoeyNMT, Marian, Transformers, T5X."""

    option: str
    """With its group, which commands other than `train` leave out, and its value if it has one."""
    names: str
    """Separated by spaces. Those that resemble ours need no entry."""
    note: str = ""
    """What differs."""

    def within(self, known: Collection[str]) -> str:
        """Returns the option under the name that a command has for it; "" if it has none."""
        forms = (self.option, self.option.rpartition(".")[2])
        return next((form for form in forms if form.partition("=")[0] in known), "")


_FILE = Path(__file__).with_name("counterparts.tsv")
COUNTERPARTS = [Counterpart(*line.split("\t")) for line in _FILE.read_text("utf-8").splitlines()]


def option_names(hints: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the options of a command, given the types of its parameters by name."""
    return (name for name, _ in option_hints(hints))


def option_hints(hints: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the names and types of the options of a command, given those of its parameters.

    Groups of options whose types are annotated leave out their prefix.
    """
    for name, hint in hints.items():
        annotations = getattr(hint, "__metadata__", ())
        if name in ("return", "_") or tyro.conf.Positional in annotations:
            continue
        kind = hint.__origin__ if annotations else hint
        if dataclasses.is_dataclass(kind):
            group = prefix if annotations else f"{prefix}{name}."
            yield from option_hints(typing.get_type_hints(kind), group)
        else:
            given = next(filter(None, (getattr(each, "name", None) for each in annotations)), name)
            yield f"{prefix}{given}".replace("_", "-"), kind


def require_known(arguments: Sequence[str], known: Sequence[str], program: str) -> None:
    """Exits with `USAGE` and a line of suggestions if there are unknown options.

    Args:
      arguments: the command line.
      known: the names of all options, without "--".
      program: the program and its command, for the message.
    """
    if {"-h", "--help"} & set(arguments):
        return
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [each.partition("=")[0] for each in arguments[:end]]
    unknown = [each for each in options if _is_option(each) and not _is_known(each, known)]
    if unknown:
        hints = (_suggestion(each, known) or f"; see {program} --help" for each in unknown)
        parts = (f"unknown option {each}{hint}" for each, hint in zip(unknown, hints, strict=True))
        print(f"{program}: error: {' '.join(parts)}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)


def _is_option(argument: str) -> bool:
    """Returns whether tyro takes an argument for an option: not numbers, not "- a dash"."""
    is_number = argument.lower() in ("-inf", "-infinity", "-nan")
    return argument.startswith("-") and argument.lstrip("-")[:1].isalpha() and not is_number


def _is_known(option: str, known: Sequence[str]) -> bool:
    name = option.removeprefix("--").replace("_", "-")
    switched_off = re.sub(r"(^|\.)no-", r"\1", name)
    listed = re.sub(r"\.\d+\..*", "", name)  # data.train-corpora.0.path
    return option.startswith("--") and not {name, switched_off, listed}.isdisjoint(known)


def _suggestion(option: str, known: Sequence[str]) -> str:
    name = option.lstrip("-").lower().replace("_", "-")
    for counterpart in COUNTERPARTS:
        ours = counterpart.within(known)
        if ours and name in counterpart.names.split():
            note = f" ({counterpart.note})" if counterpart.note else ""
            return f"; did you mean --{ours}{note}?"
    # With or without its group; of equal names, that of the first group.
    forms = {each.rpartition(".")[2]: each for each in reversed(known)}
    forms |= {each: each for each in known}
    close = difflib.get_close_matches(name, forms, n=1)
    return f"; did you mean --{forms[close[0]]}?" if close else ""
