r"""Sentence pairs in the columns of a file: tab-separated, CSV, JSON lines, Parquet; and TMX.

Two columns are the source and the target. They are named by data.columns: by the names in a header,
by numbers from 1, or by the names of JSON members ("translation.en" is the member "en" of the
member "translation"). Without data.columns they are the columns that a header names after the two
languages, or the only two that there are.

Tab-separated files have quoted cells if a program for CSV wrote them, see `is_quoted`. Line breaks
within a sentence, which CSV and JSON can express, become spaces: a sentence is a line.
"""

import collections
import csv
import dataclasses
import functools
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from flaxformer_mt.config.data import Quoting
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.corpora import arrow_reader, headers, text_files, tmx_reader
from flaxformer_mt.data.corpora.rows import LINE_BREAKS, Fault, Reading, located, numbers_of
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import parse_json

Form: TypeAlias = Literal["tsv", "csv", "jsonl", "parquet", "tmx"]
"""How the columns of a file are written."""

_FORMS: Mapping[str, Form] = {
    ".csv": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tmx": "tmx",
}

_Rows: TypeAlias = Iterator[tuple[int, Sequence[str] | Fault]]
"""The number of the first line of each row, and its cells or what is wrong with it."""

_log = logging.getLogger(__name__)


def form_of(path: Path) -> Form:
    """Returns the form that the name of a file tells: tab-separated unless it is another one."""
    return _FORMS.get(text_files.content_name(path).suffix.lower(), "tsv")


@dataclasses.dataclass(frozen=True)
class Table:
    """How the pairs of files are written."""

    form: Form
    columns: Sequence[str]
    """The columns of source and target, or none; see above."""
    languages: tuple[str, str]
    quoting: Quoting
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Columns of numbers by the names that they get, see `DataConfig.pair_columns`."""

    def stream(self, path: Path, *, reading: Reading) -> Iterator[tuple[str, ...] | None]:
        """Yields the pairs of a file, which may be compressed; None for a malformed row."""
        given = [*self.numbers.values()]
        indices: Sequence[int] = range(2 + len(given))
        widths: tuple[int, float] = (len(indices), len(indices))
        match self.form:
            case "jsonl":
                rows = _json_rows(path, self.columns, self.languages, given)
            case "parquet":
                rows = arrow_reader.stream_rows(path, self.columns, self.languages, given)
            case "tmx":
                rows = tmx_reader.stream_rows(path, self.languages)
            case _:
                first, rows = _first(path, self._rows(path))
                indices, widths, is_header = self._layout(path, first)
                if is_header:
                    next(rows)
        least, most = widths
        source, target, *others = indices
        for number, cells in rows:
            if not isinstance(cells, Fault) and not least <= len(cells) <= most:
                cells = self._fault(len(cells), indices, most)
            fields: Any = cells
            if not isinstance(cells, Fault):
                fields = numbers_of(self.numbers, (cells[index] for index in others))
            if isinstance(fields, Fault):
                reading.add(path, number, fields)
                yield None
            else:
                yield located((cells[source], cells[target]), path, number, fields)

    def _rows(self, path: Path) -> _Rows:
        delimiter = "," if self.form == "csv" else "\t"
        if self._has_quotes(path):
            return _csv_rows(path, delimiter)
        return _unquoted_rows(path, delimiter)

    def _has_quotes(self, path: Path) -> bool:
        if self.quoting != "auto":
            return self.quoting == "csv"
        return self.form == "csv" or self._recognized(path)

    @functools.cached_property
    def _recognized(self) -> Callable[[Path], bool]:
        return functools.cache(is_quoted)  # Files are read several times.

    def _layout(
        self, path: Path, first: Sequence[str]
    ) -> tuple[Sequence[int], tuple[int, float], bool]:
        """Returns the indices of both sides and of numbers, and the least and most cells.

        Also returns whether `first` names them.
        """
        given = [*self.columns, *self.numbers.values()]
        is_header = not all(re.fullmatch("[1-9][0-9]*", name) for name in given)
        find = functools.partial(_index, path, header=first) if is_header else _index_of_number
        sides: Sequence[int] | None
        if self.columns:
            sides = [find(name) for name in self.columns]
            cells = [first[index] for index in sides if index < len(first)]
            is_header = is_header or headers.sides_of(cells, self.languages) is not None
        else:
            sides = headers.sides_of(first, self.languages)
            if sides is None:
                return (0, 1), (2, 2), False
            is_header = True
        indices = [*sides, *map(find, self.numbers.values())]
        most = len(first) if is_header else math.inf
        return indices, (max(indices) + 1, most), is_header

    def _fault(self, cells: int, indices: Sequence[int], most: float) -> Fault:
        """Describes a row with the wrong number of cells."""
        if most not in (2, math.inf) or self.columns:
            if cells > most:
                return Fault(f"{cells} columns", f", but the header has {most}")
            missing = next(index for index in indices if index >= cells)
            return Fault(f"no column {missing + 1} (data.columns)", f": it has {cells}")
        advice = _FURTHER_COLUMNS if cells > 2 else ""
        if self.form == "csv":
            advice = "separate columns by commas" if cells == 1 else advice
            return Fault(f"{cells} columns instead of a source and a target", advice=advice)
        rule = "a line must be a source, one tab and a target"
        return Fault(f"{cells - 1} tabs", advice=f"{rule}{advice and f'; {advice}'}")


_FURTHER_COLUMNS = "if there are further columns, name the two, such as 1 2 (data.columns)"


def _first(path: Path, rows: _Rows) -> tuple[Sequence[str], _Rows]:
    """Returns the first row that is not malformed, which follows those that are, and all rows."""
    faults: list[tuple[int, Fault]] = []
    for number, cells in rows:
        if not isinstance(cells, Fault):
            # The malformed rows before it come after it, which their numbers tell.
            return cells, itertools.chain([(number, cells)], faults, rows)
        faults.append((number, cells))
    if not faults:
        raise UserError(f"{path} has only blank lines")
    return (), iter(faults)


def _unquoted_rows(path: Path, delimiter: str) -> _Rows:
    for number, line in enumerate(text_files.lines_and_faults(path), start=1):
        yield number, line if isinstance(line, Fault) else line.split(delimiter)


_MAX_ROW_LINES = 1000
"""Limit of the lines of a row: a quote that is never closed would take the rest of the file."""


class _Unreadable(csv.Error):
    """A line within a row that is not text."""


def _csv_rows(path: Path, delimiter: str) -> _Rows:
    """Reads rows of CSV (RFC 4180). After a malformed one, reading goes on with its second line."""
    # A limit of the whole process, by default 131,072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), text_files.MAX_LINE_BYTES))
    lines = enumerate(text_files.lines_and_faults(path), start=1)
    again: collections.deque[tuple[int, str | Fault]] = collections.deque()
    row: list[tuple[int, str | Fault]] = []

    def text() -> Iterator[str]:
        while item := again.popleft() if again else next(lines, None):
            row.append(item)
            if isinstance(item[1], Fault):
                raise _Unreadable(f"line {item[0]}: {item[1].kind}")
            if len(row) > _MAX_ROW_LINES:
                raise csv.Error(f"a cell of more than {_MAX_ROW_LINES:,} lines")
            yield f"{item[1]}\n"

    reader = csv.reader(text(), delimiter=delimiter, strict=True)
    is_open = False
    while True:
        row.clear()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            number, first = row[0]
            advice = "double the quotes within quotes, or set data.quoting=none"
            yield (
                number,
                first if isinstance(first, Fault) else Fault("not CSV", f": {error}", advice),
            )
            again.extendleft(reversed(row[1:]))
            reader = csv.reader(text(), delimiter=delimiter, strict=True)
            is_open = True
            continue
        if cells is None:
            return
        if is_open and sum(str(line).count('"') for _, line in row) % 2:
            # The last line of a malformed row, whose first quote was on another line.
            is_open = False
            yield row[0][0], Fault("not CSV", ": the end of a malformed row")
        elif cells:  # Otherwise it is an empty line.
            yield row[0][0], [LINE_BREAKS.sub(" ", cell) for cell in cells]


_SAMPLE = 1000
"""Lines with quotes that tell whether they are those of CSV."""
_QUOTED_CELL = rb'"(?:[^"]|"")*+"'
_CSV_LINE = re.compile(rb'(?:%b|[^"\t]*)(?:\t(?:%b|[^"\t]*))*' % (_QUOTED_CELL, _QUOTED_CELL))
_ALL_QUOTED = re.compile(rb"(?:%b|[-+.\d]*)(?:\t(?:%b|[-+.\d]*))*" % (_QUOTED_CELL, _QUOTED_CELL))
_CELLS = re.compile(rb"(?:^|(?<=\t))%b" % _QUOTED_CELL)


def is_quoted(path: Path) -> bool:
    """Returns whether a program for CSV wrote a tab-separated file, so that its cells are quoted.

    Such programs quote a cell that has quotes, and double these; some quote every cell. Text that
    people write has quotes elsewhere. A warning says if a file has both.
    """
    counts: collections.Counter[str] = collections.Counter()
    share = 0.0
    with text_files.opened(path) as file, text_files.explained(str(path)):
        for number, block in enumerate(text_files.blocks(file)):
            if number and b'"' not in block:
                continue
            lines = [line.rstrip(b"\r") for line in block.removesuffix(b"\n").split(b"\n")]
            if not number:
                # A line with an odd number of quotes is a part of a row.
                whole = [line for line in lines if line.count(b'"') % 2 == 0]
                share = sum(map(bool, map(_ALL_QUOTED.fullmatch, whole))) / max(len(whole), 1)
            counts.update(_evidence(line) for line in lines if b'"' in line)
            if counts.total() >= _SAMPLE:
                break
    if counts and share > 0.9:
        return True
    if counts["csv"] and counts["text"]:
        _log.warning(
            "%s: of the first lines with quotes, %d have them as CSV does and %d do not; "
            "data.quoting=csv or none says how to read them",
            path,
            counts["csv"],
            counts["text"],
        )
    return counts["csv"] > counts["text"]


def _evidence(line: bytes) -> str:
    """Returns whether the quotes of a line are those of CSV, or of text, or may be of both."""
    if not _CSV_LINE.fullmatch(line):
        return "either" if line.count(b'"') % 2 else "text"  # A cell may have several lines.
    cells = [cell[1:-1] for cell in _CELLS.findall(line)]
    if any(b'""' in cell or b"\t" in cell for cell in cells):
        return "csv"
    return "either" if all(b"," in cell for cell in cells) else "text"


def _index_of_number(name: str) -> int:
    return int(name) - 1


def _index(path: Path, name: str, header: Sequence[str]) -> int:
    if name not in header:
        raise UserError(
            f"{path} has no column {name!r} (data.columns), only {', '.join(map(repr, header))} in "
            f"its first line{suggestion(name, header)}; without a header, give numbers: 1 2"
        )
    return header.index(name)


def _json_rows(
    path: Path, columns: Sequence[str], languages: tuple[str, str], numbers: Sequence[str]
) -> _Rows:
    for number, line in enumerate(text_files.lines_and_faults(path), start=1):
        if isinstance(line, Fault):
            yield number, line
        elif line.strip():
            yield number, _json_cells(line, columns, languages, numbers)


def _json_cells(
    line: str, columns: Sequence[str], languages: tuple[str, str], numbers: Sequence[str]
) -> list[str] | Fault:
    try:
        values = parse_json(line, "")
    except UserError as error:
        reason = str(error).removeprefix(" is damaged: ").removeprefix("not JSON: ")
        return Fault("not JSON", f": {reason}")
    if not isinstance(values, dict):
        return Fault("not a JSON object with a source and a target")
    names: Sequence[str] = columns or languages
    if not columns and "translation" in values:
        names = [f"translation.{language}" for language in languages]
    cells = []
    for index, name in enumerate([*names, *numbers]):
        cell = _member(name, values, is_number=index >= 2)
        if isinstance(cell, Fault):
            return cell
        cells.append(cell)
    return cells


def _member(name: str, values: dict[str, Any], is_number: bool) -> str | Fault:
    """Returns a member of a JSON object, "" for null; "a.b" is member "b" of member "a"."""
    value: Any = values
    for part in [name] if name in values else name.split("."):
        if not isinstance(value, dict) or part not in value:
            return Fault(
                f"no member {name!r}",
                f", only {', '.join(map(repr, values))}",
                "name the source and the target by data.columns",
            )
        value = value[part]
    if value is None:
        return ""
    if is_number and type(value) in (int, float):
        return str(value)
    if not isinstance(value, str):
        return Fault(f"{name!r} is not a string")
    return LINE_BREAKS.sub(" ", value)
