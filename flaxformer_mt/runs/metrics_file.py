"""The lines of `metrics.jsonl`: JSON objects, each with a checksum.

The last member of a line is the CRC-32 of what precedes it.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import Count, open_regular, parse_json
from flaxformer_mt.run_layout import METRICS

CHANGE = "change"
"""The split of a line about options that were changed in the course of a run."""
_CHECKSUM = "crc32"
_BEFORE_CHECKSUM = f', "{_CHECKSUM}": '.encode()


class Line(NamedTuple):
    """One line of the file."""

    number: int
    """Counted from 1."""
    text: str
    """With its checksum, and without a line feed."""
    values: dict[str, Any] | None
    """"step", "split" and the metrics; None if the line is damaged."""


def format_line(values: Mapping[str, Any]) -> str:
    """Returns the line of "step", "split" and metrics, without a line feed."""
    return _with_checksum(json.dumps(values, allow_nan=False).encode()).decode()


def read_lines(path: str | Path) -> list[Line]:
    """Reads the complete lines of the file; none if it does not exist.

    A last line without a line feed is omitted: its writer was killed, or has not finished.
    """
    if not os.path.lexists(path):
        return []
    with prefixed(f"{path}: "), open_regular(path) as file:
        *lines, _ = file.read().split(b"\n")
    return [_parse(number, line) for number, line in enumerate(lines, start=1)]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads "step", "split" and the metrics of all lines; `UserError` if one is damaged."""
    rows = []
    for line in read_lines(path):
        if line.values is None:
            raise UserError(f"{path} is damaged: line {line.number} is not what was written")
        rows.append(line.values)
    return rows


class _Row(TypedDict):
    step: Count
    split: str


def _parse(number: int, line: bytes) -> Line:
    content, _, _ = line.rpartition(_BEFORE_CHECKSUM)
    values = None
    if line == _with_checksum(content + b"}"):
        with contextlib.suppress(UserError):
            values = parse_json(content + b"}", METRICS, _Row)
    return Line(number, line.decode(errors="replace"), values)


def _with_checksum(line: bytes) -> bytes:
    content = line.removesuffix(b"}")
    return content + _BEFORE_CHECKSUM + f'"{zlib.crc32(content):08x}"}}'.encode()
