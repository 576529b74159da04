"""Rows of files: where each of them was read, and what becomes of malformed ones."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError

LINE_BREAKS = re.compile(r"\r\n|\r|\n")
"""They become spaces within a sentence."""

_LISTED = 5
"""Number of malformed rows that are described."""


class Row(tuple[str, str]):
    """The texts of a row, with its place, which they keep when other rows are dropped.

    It has one text only if it was read for a language model.

    Attributes:
      path: the file; of parallel files, the first. None if the texts are not of a file.
      number: number of the first line of the row, from 1; of a Parquet file, of the row itself.
    """

    path: Path | None = None
    number: int = 0


def with_place(texts: tuple[str, str], row: tuple[str, ...]) -> tuple[str, str]:
    """Returns texts with the place of a row, if it has one."""
    if not isinstance(row, Row):
        return texts
    placed = Row(texts)
    placed.path, placed.number = row.path, row.number
    return placed


def place_of(texts: tuple[str, ...], number: int) -> str:
    """Describes where texts were read; without a file they are pair `number` of their corpus."""
    if isinstance(texts, Row) and texts.path is not None:
        return place(texts.path, texts.number)
    return place(None, number)


def place(path: Path | str | None, number: int) -> str:
    """Describes a line of a file, a row of a Parquet file, or a pair that is not of a file."""
    return f"{path}, {_unit(path)} {number}" if path else f"pair {number}"


def _unit(path: Path | str) -> str:
    return "row" if str(path).lower().endswith(".parquet") else "line"


class Fault(NamedTuple):
    """What is wrong with a row."""

    kind: str
    """Counted together: "not UTF-8"."""
    detail: str = ""
    """Continues `kind`: " (byte 7 of the line is 0xff)"."""
    advice: str = ""
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.kind}{self.detail}{self.advice and f'; {self.advice}'}"


@dataclasses.dataclass(frozen=True)
class Dropped:
    """The pairs dropped for one reason."""

    count: int
    example: str
    """The first of them: its place and its two sides, shortened."""
    more: tuple[str, ...] = ()
    """Places of the next ones, of malformed rows."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Dropped":
        """Inverts `dataclasses.asdict`, also of values that were stored as JSON."""
        return cls(**{**values, "more": tuple(values["more"])})

    def __str__(self) -> str:
        first = "the first are" if self.more else "the first is"
        return f"{self.count:,}, {first} {'; '.join([self.example, *self.more])}"


def merged(reports: Iterable[dict[str, Dropped]]) -> dict[str, Dropped]:
    """Adds up rows that were dropped from several corpora."""
    total: dict[str, Dropped] = {}
    for report in reports:
        for reason, dropped in report.items():
            if reason in total:
                first = total[reason]
                more = (*first.more, dropped.example, *dropped.more)[: _LISTED - 1]
                dropped = Dropped(first.count + dropped.count, first.example, more)
            total[reason] = dropped
    return total


class BadRows:
    """The malformed rows that one reading of a corpus finds.

    Args:
      drops: whether they are counted in `dropped`, by kind, instead of being an error.
    """

    def __init__(self, drops: bool = False) -> None:
        self.dropped: dict[str, Dropped] = {}
        self._drops = drops
        self._errors: list[tuple[Path, int, Fault]] = []

    def add(self, path: Path, number: int, fault: Fault) -> None:
        """Counts a row; without `drops`, the fifth one raises the error of all."""
        if not self._drops:
            self._errors.append((path, number, fault))
            if len(self._errors) == _LISTED:
                self.check()
            return
        example = f"{place(path, number)}{fault.detail}"
        earlier = self.dropped.get(fault.kind)
        if earlier is None:
            self.dropped[fault.kind] = Dropped(1, example)
            return
        listed = len(earlier.more) + 1
        more = (*earlier.more, example) if listed < _LISTED else earlier.more
        self.dropped[fault.kind] = Dropped(earlier.count + 1, earlier.example, more)

    def check(self) -> None:
        """Raises `UserError` if a malformed row is an error; called at the end of each file."""
        if not self._errors:
            return
        path, number, first = self._errors[0]
        texts = [f"{place(path, number)}: {first.kind}{first.detail}"]
        for other, number, fault in self._errors[1:]:
            where = f"{_unit(path)} {number}" if other == path else place(other, number)
            texts.append(f"{where}: {fault.kind}{fault.detail}")
        advice = first.advice or "correct the file"
        these = "this row" if len(texts) == 1 else "such rows"
        raise UserError(f"{'; '.join(texts)}; {advice}; or drop {these} by data.bad_rows=drop")
