"""Reads the sentence pairs of a Parquet file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.corpora import headers
from flaxformer_mt.data.corpora.rows import LINE_BREAKS, Fault, decoded
from flaxformer_mt.data.corpora.text_files import opened
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import max_content

_READ_AT_ONCE = 1000  # Rows; texts that the file has once are repeated in memory.


def stream_rows(
    path: Path, columns: Sequence[str], languages: tuple[str, str]
) -> Iterator[tuple[int, Sequence[str] | Fault]]:
    """Yields the number of each row, from 1, and its source and target or what is wrong with it.

    Columns are named, numbered from 1, or found by their names, as in `tables`; the members of a
    column `translation` are `translation.en`, ...
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path} needs a package that is not installed: pip install pyarrow"
        ) from error
    with opened(path) as stream:
        try:
            file = parquet.ParquetFile(stream)
            flat = file.schema_arrow.empty_table().flatten().schema
            names = [_name(path, flat.names, column) for column in columns]
            names = names or _sides(path, flat.names, languages)
            for name in names:
                kind = str(flat.field(name).type)
                if kind not in ("string", "large_string"):
                    raise UserError(f"{path}: column {name!r} (data.columns) has no text: {kind}")
            number = 0
            claimed = sum(
                file.metadata.row_group(group).total_byte_size
                for group in range(file.num_row_groups)
            )
            if claimed > max_content(path.stat().st_size):
                raise ValueError("its columns are far larger than the file")
            for batch in file.iter_batches(_READ_AT_ONCE, columns=names):
                table = pyarrow.Table.from_batches([batch])
                validate(table)
                for pair in rows_of(table.flatten(), names):
                    number += 1
                    yield number, pair
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as Parquet: {error}") from error


def validate(table: Any) -> None:
    """Checks that an Arrow table is whole, but not that its text is UTF-8, as `rows_of` does.

    Arrow itself checks nothing: damage could end the process, or give other memory.

    Raises:
      pyarrow.ArrowInvalid: it is damaged.
    """
    table.validate()
    for column in table.flatten().itercolumns():
        kind = {"string": "binary", "large_string": "large_binary"}.get(str(column.type))
        (column.cast(kind) if kind else column).validate(full=True)


def rows_of(table: Any, names: Sequence[str]) -> Iterator[Sequence[str] | Fault]:
    """Yields the texts of two columns of an Arrow table; a missing text is ""."""
    for pair in zip(*(_texts(table[name]) for name in names), strict=True):
        fault = next((text for text in pair if isinstance(text, Fault)), None)
        yield fault or [LINE_BREAKS.sub(" ", str(text or "").rstrip("\r\n")) for text in pair]


def _texts(column: Any) -> list[str | Fault | None]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # Arrow itself does not check what it calls strings.
        return [text and decoded(text) for text in column.cast("large_binary").to_pylist()]


def _name(path: Path, names: Sequence[str], column: str) -> str:
    if column in names:
        return column
    if column.isdecimal() and 0 < int(column) <= len(names):
        return names[int(column) - 1]
    raise UserError(
        f"{path} has no column {column!r} (data.columns), only {', '.join(map(repr, names))}"
        f"{suggestion(column, names)}"
    )


def _sides(path: Path, names: Sequence[str], languages: tuple[str, str]) -> list[str]:
    nested = [f"translation.{language}" for language in languages]
    if {*nested} <= {*names}:
        return nested
    sides = headers.sides_of(names, languages) or ((0, 1) if len(names) == 2 else None)
    if sides is None:
        raise UserError(
            f"{path} has the columns {', '.join(map(repr, names))}: name the source and the target "
            "by data.columns"
        )
    return [names[side] for side in sides]
