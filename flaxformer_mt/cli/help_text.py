"""Formats docstrings as help: prose is wrapped to the terminal, examples keep their lines.

By itself, tyro neither wraps descriptions nor joins the lines of a docstring's source.
"""

import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import docstring_parser
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from flaxformer_mt.config.fields import Bounds, bounds_of, require, shown
from flaxformer_mt.remote.reading import local
from flaxformer_mt.urls import require_local

MAX_HELP_WIDTH = 100
"""Prose is wrapped to this width on wider terminals."""


def call(function: Callable[..., Any], prog: str, arguments: Sequence[str], **defaults: Any) -> Any:
    """Calls a function with parameters parsed from the command line.

    Its docstring is the help: the section "Args:" describes the options, and indented lines of the
    description are kept as they are. `Annotated[int, Bounds(...)]` declares the bounds of a number,
    outside of which it is a `UserError`. `defaults` replace those of the parameters.
    """
    description, _, options = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    documentation = dict(re.findall(r"^ *(\w+): (.+)$", join_lines(options), re.MULTILINE))
    types = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters

    def checked(**values: Any) -> Any:
        for name, value in values.items():
            for each in getattr(types[name], "__metadata__", ()):
                if isinstance(each, Bounds) and value is not None:
                    problem, option = each.problem(value), name.replace("_", "-")
                    require(not problem, f"--{option}={shown(value)}: {problem}")
        return function(**{name: _local(name, value) for name, value in values.items()})

    checked.__annotations__ = {
        name: Annotated[types[name], _described(documentation[name], parameter.default)]
        for name, parameter in parameters.items()
    }
    checked.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in parameters.items()
        ]
    )
    if {"-h", "--help"} & set(arguments):
        print(wrap(description), end="\n\n")
    return tyro.cli(
        checked,
        prog=prog,
        description="",  # tyro would join its lines again.
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        registry=registry,
    )


_OUTPUTS = {"output_file", "output_folder", "json_file", "html", "junit", "markdown"}
"""Parameters of commands that are written to."""


def _local(name: str, value: Any) -> Any:
    """Returns the value of a parameter with local copies in place of URLs; refuses outputs."""
    if isinstance(value, tuple):
        return tuple(_local(name, each) for each in value)
    if not isinstance(value, Path) or name == "workdir":
        return value
    if name in _OUTPUTS:
        require_local(value)
    return local(value)


def _described(text: str, default: object) -> Any:
    is_empty = default is None or default == ()
    return tyro.conf.arg(help=text, help_behavior_hint="(optional)" if is_empty else None)


def wrap(text: str) -> str:
    """Wraps paragraphs to the width of the terminal, except for indented lines."""
    width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH)
    unwrapped = re.sub(r"(?<=\S)\n(?=\S)", " ", text.strip())
    lines = (
        line if line.startswith(" ") else textwrap.fill(line, width)
        for line in unwrapped.splitlines()
    )
    return "\n".join(lines)


def join_lines(text: str) -> str:
    """Joins each line that is indented by more than two spaces to the one before."""
    return re.sub(r"\n {3,}", " ", text)


registry = ConstructorRegistry()
"""Rules for tyro: help texts of dataclass fields are joined lines, with bounds."""


@registry.struct_rule
def _dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    if not dataclasses.is_dataclass(info.type):
        return None
    types = typing.get_type_hints(info.type, include_extras=True)
    # Elements of a tuple of dataclasses have no default.
    defaults = info.default if isinstance(info.default, info.type) else info.type()
    documentation = _field_docstrings(info.type)
    fields = [
        StructFieldSpec(
            name=field.name,
            type=Annotated[types[field.name], _default_and_bounds(field)],  # type: ignore[arg-type]
            default=getattr(defaults, field.name),
            helptext=documentation.get(field.name, ""),
        )
        for field in dataclasses.fields(info.type)
    ]
    return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))


def _default_and_bounds(field: dataclasses.Field[Any]) -> Any:
    """Returns an argument whose help ends with the default, unless it is empty, and the bounds."""
    bounds = str(bounds_of(field) or "")

    def hint(default: str) -> str:
        parts = [f"default: {default}"] if default not in ("", "''") else []
        parts += [bounds] if bounds else []
        return f"({'; '.join(parts) or 'optional'})"

    is_special = bounds or field.default in ("", ())
    return tyro.conf.arg(help_behavior_hint=hint if is_special else None)


@functools.cache
def _field_docstrings(cls: type) -> dict[str, str]:
    """Returns the docstrings of all fields, read from the source, each as one line."""
    documented = (docstring_parser.parse_from_object(base) for base in cls.__mro__[:-1])
    return {
        parameter.arg_name: join_lines(parameter.description or "")
        for docstring in documented
        for parameter in reversed(docstring.params)
    }
