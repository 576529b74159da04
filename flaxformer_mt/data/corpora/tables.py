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
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from flaxformer_mt.config.data import Quoting
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.corpora import arrow_reader, text_files, tmx_reader
from flaxformer_mt.data.corpora.language_codes import sides_of
from flaxformer_mt.data.corpora.rows import (
    LINE_BREAKS,
    Fault,
    Reading,
    located,
    numbers_of,
    one_line,
)
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
                rows = _json_rows(path, self.columns, self.languages, given, reading)
            case "parquet":
                rows = arrow_reader.stream_rows(path, self.columns, self.languages, given)
            case "tmx":
                rows = tmx_reader.stream_rows(path, self.columns or self.languages, reading)
            case _:
                first, rows = _first(path, self._rows(path, reading))
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

    def _rows(self, path: Path, reading: Reading) -> _Rows:
        delimiter, has_quotes, remarks = self._recognized(path)
        for text in remarks:
            reading.remark(f"{path}: {text}")
        lines = text_files.lines_and_faults(path, remark=reading.remark)
        return (_csv_rows if has_quotes else _unquoted_rows)(lines, delimiter)

    @functools.cached_property
    def _recognized(self) -> Callable[[Path], tuple[str, bool, list[str]]]:
        """Returns the delimiter of a file, whether cells have quotes, and what there is to say."""

        @functools.cache  # Files are read several times.
        def recognized(path: Path) -> tuple[str, bool, list[str]]:
            is_csv, remarks = self.form == "csv", list[str]()
            has_quotes = self.quoting == "csv"
            if self.quoting == "auto":
                has_quotes = is_csv or is_quoted(path, remarks.append)
            delimiter = self._delimiter(path, has_quotes, remarks.append) if is_csv else "\t"
            return delimiter, has_quotes, remarks

        return recognized

    def _delimiter(self, path: Path, has_quotes: bool, tell: Callable[[str], object]) -> str:
        """Returns what separates the columns of a CSV file: that by which all rows have as many.

        If several do so, it is one by which the first row names the languages, or else one that no
        space follows, as it follows commas of text.
        """
        sample = [*itertools.islice(text_files.lines_and_faults(path), _SAMPLE)]
        lines = [line for line in sample if isinstance(line, str)]
        suitable: list[tuple[bool, bool, int, str]] = []
        for delimiter in _DELIMITERS:
            read = _csv_rows if has_quotes else _unquoted_rows
            rows = [cells for _, cells in read(iter(lines), delimiter)]
            widths = collections.Counter(0 if isinstance(row, Fault) else len(row) for row in rows)
            ((width, count),) = widths.most_common(1) or [(0, 0)]
            if width > 1 and count > _CONSISTENT * len(rows):
                text = "\n".join(lines)
                is_spaced = 2 * text.count(f"{delimiter} ") > text.count(delimiter)
                named = not isinstance(rows[0], Fault) and sides_of(rows[0], self.languages)
                suitable.append((not named, is_spaced, len(suitable), delimiter))
        if len(suitable) > 1 and all(not_named for not_named, *_ in suitable):
            readings = " or ".join(repr(delimiter) for *_, delimiter in sorted(suitable))
            tell(
                f"columns may be separated by {readings}: they are read as the first; a header "
                "such as source;target decides"
            )
        return min(suitable)[-1] if suitable else ","

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
            is_header = is_header or sides_of(cells, self.languages) is not None
        else:
            sides = sides_of(first, self.languages)
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


def _unquoted_rows(lines: Iterator[str | Fault], delimiter: str) -> _Rows:
    for number, line in enumerate(lines, start=1):
        yield number, line if isinstance(line, Fault) else line.split(delimiter)


_MAX_ROW_LINES = 1000
"""Limit of the lines of a row: a quote that is never closed would take the rest of the file."""


class _Unreadable(csv.Error):
    """A line within a row that is not text."""


def _csv_rows(texts: Iterator[str | Fault], delimiter: str) -> _Rows:
    """Reads rows of CSV (RFC 4180). After a malformed one, reading goes on with its second line."""
    # A limit of the whole process, by default 131,072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), text_files.MAX_LINE_BYTES))
    lines = enumerate(texts, start=1)
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
"""Lines that tell what separates columns, and lines with quotes that tell whose they are."""
_DELIMITERS = (",", ";", "\t")
_CONSISTENT = 0.9
"""The share of rows with equally many columns, above which a delimiter is one."""
_QUOTED_CELL = rb'"(?:[^"]|"")*+"'
_CSV_LINE = re.compile(rb'(?:%b|[^"\t]*)(?:\t(?:%b|[^"\t]*))*' % (_QUOTED_CELL, _QUOTED_CELL))
_ALL_QUOTED = re.compile(rb"(?:%b|[-+.\d]*)(?:\t(?:%b|[-+.\d]*))*" % (_QUOTED_CELL, _QUOTED_CELL))
_CELLS = re.compile(rb"(?:^|(?<=\t))%b" % _QUOTED_CELL)


def is_quoted(path: Path, tell: Callable[[str], object]) -> bool:
    """Returns whether a program for CSV wrote a tab-separated file, so that its cells are quoted.

    Such programs quote a cell that has quotes, and double these; some quote every cell, or every
    one that has a comma. Text that people write has quotes elsewhere. `tell` gets a warning if a
    file may be both.
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
            for line in lines:
                counts.update(_evidence(line) if b'"' in line else ["comma"] * (b"," in line))
            if counts.total() - counts["comma"] >= _SAMPLE:
                break
    if share > 0.9 and counts.total() > counts["comma"]:
        return True
    how = "data.quoting=csv or none says how to read them"
    if counts["csv"] and counts["text"]:
        tell(
            f"of the first lines with quotes, {counts['csv']} have them as CSV does and "
            f"{counts['text']} do not; {how}"
        )
    elif counts["quoted comma"] and not (counts["csv"] or counts["text"] or counts["comma"]):
        tell(f"every cell with a comma is quoted, and no other one, as in CSV: quotes go; {how}")
        return True
    return counts["csv"] > counts["text"]


def _evidence(line: bytes) -> list[str]:
    """Returns the kinds of cells of a line with quotes.

    They are those of CSV, of text, of either with a comma, or with a comma outside of quotes.
    """
    if not _CSV_LINE.fullmatch(line):
        return ["part" if line.count(b'"') % 2 else "text"]  # A cell may have several lines.
    cells = [cell[1:-1] for cell in _CELLS.findall(line)]
    kind = "text"
    if any(b'""' in cell or b"\t" in cell for cell in cells):
        kind = "csv"
    elif all(b"," in cell for cell in cells):
        kind = "quoted comma"
    return [kind, *(["comma"] * (b"," in _CELLS.sub(b"", line)))]


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
    path: Path,
    columns: Sequence[str],
    languages: tuple[str, str],
    numbers: Sequence[str],
    reading: Reading,
) -> _Rows:
    lines = text_files.lines_and_faults(path, remark=reading.remark)
    for number, line in enumerate(lines, start=1):
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
    cells = []
    for index, name in enumerate([*(columns or _members(values, languages)), *numbers]):
        cell = _member(name, values, is_number=index >= 2)
        if isinstance(cell, Fault):
            return cell
        cells.append(cell)
    return cells


def _members(values: dict[str, Any], languages: tuple[str, str]) -> Sequence[str]:
    """Returns the names of the members for two languages."""
    nested = values.get("translation")
    names = [f"translation.{name}" for name in nested] if isinstance(nested, dict) else [*values]
    sides = _cached_sides(tuple(names), languages)
    if sides is not None:
        return [names[side] for side in sides]
    return languages if nested is None else [f"translation.{code}" for code in languages]


_cached_sides = functools.lru_cache(64)(sides_of)


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
    return one_line(value)
