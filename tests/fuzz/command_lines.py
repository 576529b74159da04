"""Command lines: absurd values, unknown and missing options, wrong paths, odd combinations."""

import dataclasses
import math
import random
import typing
from pathlib import Path
from typing import Any

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import Bounds, bounds_of
from fuzz.core import Case, Outcome
from fuzz.mutations import NUMBERS
from fuzz.world import World

WORDS = (
    "", "x", "best", "last", "text", "jsonl", "0", "-1", "1.5", "nan", "a=b", "=", "num_heads=0",
    "norm_epsilon=nan", "d_model=1e9", "dropout_rate=7", "\udcff", "ü", "a" * 5000, "--", "-",
    "\n", "a\nb", "words", "pieces", "tokens", "float16", "int8", "all", "torch", "marian",
)  # fmt: skip
"""Values of an option that is no number."""
OPTIONS = {
    "translate": ("run", "input", "output", "input-format", "format", "alignment", "tokens",
                  "attention", "checkpoint"),
    "score": ("run", "source", "target", "checkpoint", "normalize", "tokens", "alignment",
              "alignment-layer", "alignment-head", "contrast", "json", "summary"),
    "evaluate": ("run", "source", "reference", "checkpoint", "hypothesis", "baseline", "split",
                 "output", "metric", "tokenize", "lowercase", "confidence", "significance",
                 "resamples", "format"),
    "plot": ("run", "output", "metrics", "x", "smoothing"),
    "attention": ("run", "source", "target", "output", "checkpoint"),
    "inspect": ("run", "checkpoint", "parameters", "json"),
    "average": ("run", "last", "best", "output"),
    "lexicon": ("run", "source", "target", "output"),
    "convert": ("from", "to", "set", "accept", "quantization"),
    "parity": ("family", "checkpoint", "set", "dtype", "size", "steps", "seed", "json", "html",
               "markdown"),
    "train": ("config", "workdir", "coordinator", "num-processes", "process-id", "cluster"),
}  # fmt: skip
"""The options of every command, without those of configurations."""
LAST = {"train": ("--dry-run",), "parity": ("--html=missing/report.html",)}
"""What keeps a command from taking seconds: the second one is refused before it compares."""
DECODING = {"translate", "evaluate", "attention"}
INTEGERS = {"last", "best", "steps", "seed", "alignment-layer", "alignment-head", "num-processes",
            "resamples"}  # fmt: skip
SAMPLING = {"temperature": 1.0, "top-k": 0, "top-p": 1.0, "min-p": 0.0, "epsilon-cutoff": 0.0}
"""Options that have no effect without --sampling, and their defaults."""


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    name = rng.choice(["train", "train", *OPTIONS])
    arguments = [*world.command(name, folder / "output")[1:]]
    if name == "translate":
        arguments.pop()  # It reads standard input.
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate(rng, name, arguments, world, folder)
    arguments += LAST.get(name, ())
    command = [name, *arguments]
    if rng.random() < 0.03:
        command[0] = rng.choice(("", "trian", "translate ", "--run", "\n", "ü", "help"))
    # An argument of a process holds no zero byte.
    given = tuple(argument.replace("\0", "") for argument in command)
    return Case("command line", given, b"two\nten\n", lambda outcome: nonsense(given, outcome))


def mutate(rng: random.Random, name: str, arguments: list[str], world: World, folder: Path) -> None:
    """Changes arguments in place."""
    place = rng.randrange(len(arguments))
    option = arguments[place].partition("=")[0]
    match rng.choice(("value", "add", "add", "add", "drop", "twice", "misspell", "path")):
        case "value":
            arguments[place] = f"{option}={value_for(rng, option)}"
        case "add":
            option = rng.choice([f"--{each}" for each in OPTIONS[name]])
            numeric = fields_of(name)
            if numeric and rng.random() < 0.7:
                option = rng.choice(list(numeric))
            arguments.append(f"{option}={value_for(rng, option)}")
        case "drop":
            del arguments[place]
        case "twice":
            arguments.append(arguments[place])
        case "misspell":
            cut = rng.randrange(len(option) + 1)
            arguments[place] = option[:cut] + rng.choice("xü-=") + arguments[place][cut:]
        case "path":
            path = rng.choice(
                (folder, folder / "missing" / "deep", world.lines, Path("/dev/null"), "/", "",
                 "a" * 300, world.run / "config.json", "..", "~", Path("/proc/self/mem"))
            )  # fmt: skip
            arguments[place] = f"{option}={path}" if option.startswith("--") else str(path)
    if not arguments:
        arguments.append("--help")


def value_for(rng: random.Random, option: str) -> str:
    field = option.lstrip("-").replace("-", "_")
    is_number = option in fields_of("train") or option in fields_of("translate")
    if is_number or field.replace("_", "-") in INTEGERS:
        return rng.choice(NUMBERS)
    return rng.choice(WORDS + NUMBERS)


def fields_of(name: str) -> dict[str, tuple[Any, Bounds | None]]:
    """Returns type and bounds of every configuration field that a command has as an option."""
    kinds = {"": DecodeConfig} if name in DECODING else {}
    kinds = {f"{group}.": kind for group, kind in groups().items()} if name == "train" else kinds
    return {
        f"--{prefix}{field.name.replace('_', '-')}": (
            typing.get_type_hints(kind)[field.name],
            bounds_of(field),
        )
        for prefix, kind in kinds.items()
        for field in dataclasses.fields(kind)
    }


def nonsense(command: tuple[str, ...], outcome: Outcome) -> str:
    """Says which option of a successful command makes no sense, "" if none.

    A number that is none, infinite or out of the declared bounds; an option that has no effect
    beside the others; fewer lines of output than of input.
    """
    name, *arguments = command
    if {"-h", "--help"} & set(arguments):
        return ""
    fields = fields_of(name)
    given = dict(argument.partition("=")[::2] for argument in arguments)
    for option, value in given.items():
        hint, bounds = fields.get(option, (str, None))
        problem = number_problem(value, hint, bounds)
        if problem:
            return f"accepted {option}={value!r}: {problem}"
    names = {option.removeprefix("--") for option in given}
    ignored = {option for option in names & SAMPLING.keys() if is_changed(given, option)}
    if name in DECODING and ignored and not names & {"sampling", "mbr-samples"}:
        return f"accepted {ignored} without --sampling, which has no effect"
    if {"sampling", "mbr-samples"} <= names and given.get("--mbr-samples") != "0":
        return "accepted --sampling with --mbr-samples"
    if name == "translate" and not names & {"output", "input", "format", "n-best", "input-format"}:
        lines = outcome.out.count("\n")
        return "" if lines == 2 else f"{lines} lines for 2 sentences"
    return ""


def is_changed(given: dict[str, str], option: str) -> bool:
    """Returns whether an option is given another value than its default."""
    return float(given[f"--{option}"]) != SAMPLING[option]


def number_problem(text: str, hint: Any, bounds: Bounds | None) -> str:
    """Says why a text is no valid number of a field, "" if it is one or the field has none."""
    if hint not in (int, float):
        return ""
    try:
        number = hint(text)
    except ValueError:
        return "not a number"
    if not math.isfinite(number):
        return "not finite"
    return bounds.problem(number) if bounds is not None else "no bounds are declared"
