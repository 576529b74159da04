"""Rows of files: where each of them was read, and what becomes of malformed ones."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from flaxformer_mt.errors import UserError

LINE_BREAKS = re.compile(r"\r\n|\r|\n")
"""They become spaces within a sentence."""

_LISTED = 5
"""Number of malformed rows that are described."""


class Row(tuple[str, str]):
    """The texts of a row, with its location, which they keep when other rows are dropped.

    It has one text only if it was read for a language model.

    Attributes:
      path: the file; of parallel files, the first. None if the texts are not of a file.
      number: number of the first line of the row, from 1; of a Parquet file or a prepared data set,
        of the row itself.
      fields: what the row has beside its texts, by the name of its `PairField`.
    """

    path: Path | None = None
    number: int = 0
    fields: Mapping[str, Any] = MappingProxyType({})


def with_location(texts: tuple[str, str], row: tuple[str, ...]) -> tuple[str, str]:
    """Returns texts with the location and the fields of a row, if it has them."""
    return located(texts, row.path, row.number, row.fields) if isinstance(row, Row) else texts


def location_of(texts: tuple[str, ...], number: int) -> str:
    """Describes where texts were read; without a location, they are pair `number`."""
    if isinstance(texts, Row):
        return location(texts.path, texts.number)
    return location(None, number)


def location(path: Path | str | None, number: int) -> str:
    """Describes a line of a file, a row of a Parquet file, or a pair that is not of a file."""
    return f"{path}, {_unit(path)} {number}" if path else f"{_unit(None)} {number}"


def _unit(path: Path | str | None) -> str:
    if path is None:
        return "pair"
    return "row" if str(path).lower().endswith(".parquet") else "line"


def located(
    texts: Iterable[str], path: Path | None, number: int, fields: Mapping[str, Any] = Row.fields
) -> Row:
    """Returns texts as a row with its location and its fields."""
    row = Row(cast(tuple[str, str], texts))
    row.path, row.number, row.fields = path, number, fields
    return row


def with_field(row: tuple[str, str], name: str, value: Any) -> Row:
    """Returns a row with one more field."""
    known = row if isinstance(row, Row) else Row(row)
    return located(known, known.path, known.number, {**known.fields, name: value})


COLUMN = "column."
"""What the names of fields that are columns of numbers begin with."""
WEIGHT = f"{COLUMN}weight"
"""The field of the weights of pairs in the loss."""


class Fault(NamedTuple):
    """What is wrong with a row, or why it was not read."""

    kind: str
    """Counted together: "not UTF-8"."""
    detail: str = ""
    """Continues `kind`: " (byte 7 of the line is 0xff)"."""
    advice: str = ""
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.kind}{self.detail}{self.advice and f'; {self.advice}'}"


def numbers_of(names: Iterable[str], cells: Iterable[str]) -> dict[str, float] | Fault:
    """Returns the numbers in cells of a row, by the names of their columns."""
    numbers = {}
    for name, cell in zip(names, cells, strict=True):
        field = COLUMN + name
        try:
            numbers[field] = float(cell)
        except ValueError:
            numbers[field] = math.nan
        if not math.isfinite(numbers[field]) or (field == WEIGHT and numbers[field] < 0):
            kind = "not a weight, a number from 0 on," if field == WEIGHT else "not a number"
            return Fault(kind, f": {cell[:40]!r} in the column of {name!r}")
    return numbers


def decoded(text: bytes, whole: str = "text") -> str | Fault:
    """Decodes UTF-8; `whole` is what a byte that is not is counted in."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return Fault(
            "not UTF-8",
            f" (byte {error.start + 1} of the {whole} is {text[error.start]:#04x})",
            "convert it to UTF-8, as Western text by iconv -f WINDOWS-1252 -t UTF-8",
        )


def one_line(cell: str | Fault) -> str | Fault:
    """Returns the text of a cell with spaces for line breaks, or what is wrong with it."""
    if isinstance(cell, Fault):
        return cell
    if "\0" in cell:
        return Fault("a NUL character", f" (character {cell.index(chr(0)) + 1} of the text)")
    return LINE_BREAKS.sub(" ", cell)


NOT_WANTED = Fault("not wanted")
"""In place of a line that is not read."""


@dataclasses.dataclass(frozen=True)
class Dropped:
    """The pairs dropped, or worth a note, for one reason."""

    count: int
    example: str
    """The first of them: its location and, of filtered pairs, its two sides, shortened."""
    more: tuple[str, ...] = ()
    """Locations of the next ones, unless they are of filtered pairs."""

    @classmethod
    def at(cls, reason: str, locations: Sequence[str]) -> "dict[str, Dropped]":
        """Returns those at some locations by their reason, unless there are none."""
        return (
            {reason: cls(len(locations), locations[0], (*locations[1:_LISTED],))}
            if locations
            else {}
        )

    def __add__(self, later: "Dropped") -> "Dropped":
        more = (*self.more, later.example, *later.more)[: _LISTED - 1]
        return Dropped(self.count + later.count, self.example, more)

    def __str__(self) -> str:
        first = "the first are" if self.more else "the first is"
        return f"{self.count:,}, {first} {'; '.join([self.example, *self.more])}"


def merged(reports: Iterable[Mapping[str, Dropped]]) -> dict[str, Dropped]:
    """Adds up rows that were dropped from several corpora."""
    total: dict[str, Dropped] = {}
    for report in reports:
        for reason, dropped in report.items():
            total[reason] = total[reason] + dropped if reason in total else dropped
    return total


def added_up(earlier: Mapping[str, Dropped], later: Mapping[str, Dropped]) -> dict[str, Dropped]:
    """Adds up the pairs that filters have dropped, with the first example of each reason."""
    total = dict(earlier)
    for reason, dropped in later.items():
        known = total.get(reason, Dropped(0, dropped.example))
        total[reason] = dataclasses.replace(known, count=known.count + dropped.count)
    return total


class Reading:
    """One reading of a corpus: the malformed rows that it finds, and the rows that are wanted.

    Args:
      drops: whether malformed rows are counted in `dropped`, by kind, instead of being an error.
      name: origin of rows that are not of a file, for the message of the error.
      is_wanted: whether any row is wanted from the first of a range, counted from 0, to before the
        last. The others need not be read: `None` stands for each of them.
    """

    def __init__(
        self,
        drops: bool = False,
        name: str = "",
        is_wanted: Callable[[int, int], bool] = lambda first, last: True,
    ) -> None:
        self.dropped: dict[str, Dropped] = {}
        self.left_out: dict[str, Dropped] = {}
        """Rows that are no pair in the wanted languages, by reason. They are in `dropped`, too."""
        self.remarks: list[str] = []
        """What else there is to say about the text."""
        self.is_wanted = is_wanted
        self.rows_before = 0
        """Number of rows in the files that were read."""
        self._drops = drops
        self._name = name
        self._errors: list[tuple[Path | None, int, Fault]] = []

    def add(self, path: Path | None, number: int, fault: Fault) -> None:
        """Counts a row; without `drops`, the fifth one raises the error of all."""
        if not self._drops:
            self._errors.append((path, number, fault))
            if len(self._errors) == _LISTED:
                self.check()
            return
        self._count(path, number, fault)

    def leave_out(self, path: Path | None, number: int, fault: Fault) -> None:
        """Counts a row that is not malformed, but has no text in the wanted languages."""
        self.left_out = merged([self.left_out, self._count(path, number, fault)])

    def _count(self, path: Path | None, number: int, fault: Fault) -> dict[str, Dropped]:
        row = {fault.kind: Dropped(1, f"{location(path, number)}{fault.detail}")}
        self.dropped = merged([self.dropped, row])
        return row

    def remark(self, text: str) -> None:
        """Adds a remark, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    def take(self) -> dict[str, Dropped]:
        """Returns the rows that were dropped since the last call."""
        dropped, self.dropped = self.dropped, {}
        return dropped

    def check(self) -> None:
        """Raises `UserError` if a malformed row is an error; called at the end of each file."""
        if not self._errors:
            return
        path, number, first = self._errors[0]
        origin = "" if path else f"{self._name}, "
        texts = [f"{origin}{location(path, number)}: {first.kind}{first.detail}"]
        for other, number, fault in self._errors[1:]:
            where = f"{_unit(path)} {number}" if other == path else location(other, number)
            texts.append(f"{where}: {fault.kind}{fault.detail}")
        advice = first.advice or "correct the file"
        these = "this row" if len(texts) == 1 else "such rows"
        raise UserError(f"{'; '.join(texts)}; {advice}; or drop {these} by data.bad_rows=drop")
