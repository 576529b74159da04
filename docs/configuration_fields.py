"""Writes docs/configuration.md: every field of the configuration, from the dataclasses.

    python docs/configuration_fields.py

`tests/documentation/test_reference.py` fails if the page is not what this program writes.
"""

import ast
import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

from flaxformer_mt.config import CONTINUATIONS, CorpusConfig
from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import (
    Bounds,
    FieldRole,
    bounds_of,
    choices_of,
    roles_of,
    type_hints,
)

PAGE = Path(__file__).parent / "configuration.md"
INTRODUCTION = """# Configuration fields

Every field of `ExperimentConfig`, by group, with its default, its valid values and its roles. A
field is set in a configuration file (`TrainConfig(num_steps=1000)`), on the command line
(`--train.num-steps=1000`, `--data.joint-vocabulary` and `--data.no-joint-vocabulary`), or in Python
(`run.fine_tuning_config(train={"num_steps": 1000})`). `flaxformer-mt train --config=FILE --help`
prints the same with the values of that file.

Fields that are lists take their items after each other: `--train.freeze embedding encoder/`.
"Continuing" says whether a run may be continued with another value: free; noted, because rounding
or random draws change; accepted, with `--accept-changes`; or never
([Training](training.md#changing-options)).

This page is written by `python docs/configuration_fields.py`.

## Roles

A role says what depends on the value of a field.

"""
TYPES = {int: "integer", float: "number", bool: "`True`, `False`", str: "text"}


def page() -> str:
    """Returns the text of the page."""
    roles = ["| role | what depends on the field |", "|---|---|"]
    texts = docstrings(FieldRole)
    roles += [f"| {role.value} | {prose(texts[role.name])} |" for role in FieldRole]
    parts = [INTRODUCTION + "\n".join(roles)]
    for group, kind in groups().items():
        parts.append(f"## {group}\n\n{summary(kind)}\n\n{entries(group, kind)}")
    parts.append(
        "## Corpora\n\n"
        f"{summary(CorpusConfig)} These are the values of `data.train_corpora`, "
        "`data.valid_corpora` and `data.test_corpora`.\n\n"
        f"{entries('CorpusConfig', CorpusConfig)}"
    )
    return "\n\n".join(parts) + "\n"


def summary(kind: type) -> str:
    """Returns the first paragraph of a class's docstring, and the name of the class."""
    paragraph = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return f"`{kind.__name__}`: {prose(paragraph)}"


def entries(group: str, kind: Any) -> str:
    """Returns an entry for each field of a configuration class."""
    texts, hints = docstrings(kind), type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        name = f"{group}.{field.name}"
        roles = ", ".join(sorted(role.value for role in roles_of(field)))
        # The corpora of a list are identified by the fingerprint of their text.
        default = "free" if roles == "running" else "accepted"
        continuation = CONTINUATIONS.get(name, default)
        found.append(
            f"### {name}\n\n{prose(texts[field.name])}\n\n"
            f"Default: {default_of(field)}. Values: {values_of(field, hints[field.name])}. Roles: "
            f"{roles}. Continuing: {continuation}."
        )
    return "\n\n".join(found)


def default_of(field: dataclasses.Field[Any]) -> str:
    """Returns the default of a field as code, or a word for an empty one."""
    return "empty" if field.default in ("", ()) else f"`{field.default}`"


def values_of(field: dataclasses.Field[Any], hint: Any) -> str:
    """Returns the valid values of a field: its choices, or its type and bounds."""
    choices = choices_of(hint)
    if choices:
        return ", ".join(f"`{choice}`" if choice != "" else "empty" for choice in choices)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        inner = choices_of(item) or typing.get_args(item)
        if choices_of(item):
            return f"several of {', '.join(f'`{choice}`' for choice in inner)}"
        kind = "pairs of texts" if inner else f"several: {TYPES.get(item, f'`{item.__name__}`')}"
    else:
        kind = TYPES[hint]
    return prose(f"{kind} {interval_of(bounds_of(field))}".strip())


def interval_of(bounds: Bounds | None) -> str:
    """Returns the bounds of a number; `--help` leaves out that it is not negative."""
    if bounds is None:
        return ""
    if bounds.is_limit and bounds.lowest == 0 and not bounds.excludes_lowest:
        return " or ".join([">= 0", *map(str, bounds.also)])
    return str(bounds)


def prose(text: str) -> str:
    """Returns a text in which no character is markup, except for backquotes."""
    flowing = " ".join(text.split())
    for character, written in {"&": "&amp;", "<": "&lt;", "|": "\\|", "*": "\\*"}.items():
        flowing = flowing.replace(character, written)
    return flowing


def docstrings(kind: type) -> dict[str, str]:
    """Returns the docstring below each field of a class, by name."""
    tree = ast.parse(inspect.getsource(kind))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign | ast.Assign):
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text:
            found[target.id] = following.value.value
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
