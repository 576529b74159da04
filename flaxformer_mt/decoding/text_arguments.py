"""Checks what callers pass: texts (a string is iterable, but not a list of texts) and paths."""

import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError


def require_iterable(values: Any, name: str, items: str) -> Iterable[Any]:
    """Returns `values` if they are a list or another iterable with an order.

    A single string, a mapping, a set, and what is not iterable are a TypeError.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {items}, not {_kind(values)}")
    return values


def require_text(value: Any, name: str) -> str:
    """Returns `value` if it is a string, otherwise raises TypeError.

    A lone surrogate, which no text file can contain, is a UserError.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} has a character that is not valid Unicode: {value[error.start]!r}"
        ) from error
    return value


def require_texts(values: Any, name: str) -> list[str]:
    """Returns an iterable of strings as a list; errors are those of the functions above."""
    listed = require_iterable(values, name, "strings")
    return [require_text(value, f"{name}[{index}]") for index, value in enumerate(listed)]


def require_path(value: Any, name: str, expected: str = "a path") -> Path:
    """Returns a string or path as a path; otherwise raises TypeError."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be {expected}, not {type(value).__name__}")
    return Path(value)


def _kind(value: Any) -> str:
    return "a single string" if isinstance(value, str) else type(value).__name__
