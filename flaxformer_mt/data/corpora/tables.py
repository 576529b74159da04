r"""Sentence pairs in the columns of a file: tab-separated, CSV, JSON lines.

Two columns are the source and the target. They are named by data.columns: by the names in a header,
by numbers from 1, or by the names of JSON members ("translation.en" is the member "en" of the
member "translation"). Without data.columns they are the columns called like the two languages, if
the file has a header with both, or the only two that there are.

Line breaks within a sentence, which CSV and JSON can express, become spaces: a sentence is a line.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.corpora.text_files import COMPRESSED, MAX_LINE_BYTES, stream_lines
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import parse_json

Form: TypeAlias = Literal["tsv", "csv", "jsonl"]
"""How the columns of a file are written."""

_FORMS: Mapping[str, Form] = {
    ".csv": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
LINE_BREAKS = re.compile(r"\r\n|\r|\n")


def form_of(path: Path) -> Form:
    """Returns the form that the name of a file tells: tab-separated unless it is another one."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return _FORMS.get(name.suffix.lower(), "tsv")


def stream_table(
    path: Path, form: Form, columns: Sequence[str], languages: tuple[str, str]
) -> Iterator[tuple[str, str]]:
    """Yields the pairs of a file, which may be compressed, in two columns, see above."""
    if form == "jsonl":
        yield from _stream_json(path, columns, languages)
        return
    rows = _csv_rows(path) if form == "csv" else _tab_rows(path)
    number, first = next(rows, (0, []))
    if not number:
        raise UserError(f"{path} has only blank lines")
    by_name = columns and not all(re.fullmatch("[1-9][0-9]*", column) for column in columns)
    if by_name or (not columns and {*languages} <= {*first}):
        names: Sequence[str] = columns or languages
        indices = [_index(path, name, first) for name in names]
    else:
        indices = [int(column) - 1 for column in columns]
        yield _chosen(path, form, number, first, indices)
    for number, row in rows:
        yield _chosen(path, form, number, row, indices)


def _tab_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(stream_lines(path), start=1):
        yield number, line.split("\t")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the last line, and the cells, of each row (RFC 4180)."""
    # A limit of the whole process, by default 131,072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    reader = csv.reader((f"{line}\n" for line in stream_lines(path)), strict=True)
    try:
        for row in reader:
            if row:  # An empty line.
                yield reader.line_num, [LINE_BREAKS.sub(" ", cell) for cell in row]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not CSV: {error}") from error


def _index(path: Path, name: str, header: Sequence[str]) -> int:
    if name not in header:
        raise UserError(
            f"{path} has no column {name!r} (data.columns), only {', '.join(map(repr, header))} in "
            f"its first line{suggestion(name, header)}; without a header, give numbers: 1 2"
        )
    return header.index(name)


def _chosen(
    path: Path, form: Form, number: int, row: Sequence[str], indices: Sequence[int]
) -> tuple[str, str]:
    """Returns the source and the target of a row; without indices, its only two columns."""
    if not indices:
        if len(row) != 2:
            advice = _ADVICE if len(row) > 2 else ""
            raise UserError(f"{path}, line {number}: {_NOT_TWO[form](len(row))}{advice}")
        return row[0], row[1]
    for index in indices:
        if index >= len(row):
            raise UserError(
                f"{path}, line {number}: no column {index + 1} (data.columns): it has {len(row)}"
            )
    source, target = indices
    return row[source], row[target]


_NOT_TWO: Mapping[Form, Callable[[int], str]] = {
    "tsv": lambda cells: f"{cells - 1} tabs; a line must be a source, one tab and a target",
    "csv": lambda cells: f"{cells} columns instead of a source and a target",
}
_ADVICE = "; if there are further columns, name the two, such as 1 2 (data.columns)"


def _stream_json(
    path: Path, columns: Sequence[str], languages: tuple[str, str]
) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(stream_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        values = parse_json(line, where)
        if not isinstance(values, dict):
            raise UserError(f"{where}: not a JSON object with a source and a target")
        names: Sequence[str] = columns or languages
        if not columns and "translation" in values:
            names = [f"translation.{language}" for language in languages]
        source, target = (_member(where, name, values) for name in names)
        yield source, target


def _member(where: str, name: str, values: dict[str, Any]) -> str:
    """Returns a member of a JSON object; "a.b" is member "b" of member "a"."""
    value: Any = values
    for part in [name] if name in values else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(
                f"{where}: no member {name!r}, only {', '.join(map(repr, values))}: name the "
                "source and the target by data.columns"
            )
        value = value[part]
    if not isinstance(value, str):
        raise UserError(f"{where}: {name!r} is not a string")
    return LINE_BREAKS.sub(" ", value)
