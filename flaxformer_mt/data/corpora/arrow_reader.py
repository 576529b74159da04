"""Reads tables of Arrow: Parquet files, and what `datasets` of Hugging Face has saved to disk.

A data set has a column `translation` with one text per language, or one column of text per side.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.corpora.language_codes import sides_of
from flaxformer_mt.data.corpora.rows import (
    Fault,
    Reading,
    decoded,
    located,
    numbers_of,
    one_line,
)
from flaxformer_mt.data.corpora.text_files import Source, digest_files, opened
from flaxformer_mt.errors import UserError, first_line, requiring
from flaxformer_mt.input_files import max_content, require_regular_files

_BYTES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
"""The types of text, and those of its bytes."""
_READ_AT_ONCE = 1000  # Rows; texts that the file has once are repeated in memory.


def stream_rows(
    path: Path, columns: Sequence[str], languages: tuple[str, str], numbers: Sequence[str] = ()
) -> Iterator[tuple[int, Sequence[str] | Fault]]:
    """Yields the number of each row, from 1, and its source and target or what is wrong with it.

    Columns are named, numbered from 1, or found by their names, as in `tables`; the members of a
    column `translation` are `translation.en`, ... The cells of columns of `numbers` follow.
    """
    with requiring(str(path), "pyarrow"):
        import pyarrow
        from pyarrow import parquet
    with opened(path) as stream:
        try:
            file = parquet.ParquetFile(stream)
            flat = file.schema_arrow.empty_table().flatten().schema
            names = [_name(path, flat.names, column) for column in columns]
            names = names or _sides(path, flat.names, languages)
            for name in names:
                _check_is_text(path, name, flat.field(name).type)
            names = [*names, *(_name(path, flat.names, column) for column in numbers)]
            number = 0
            claimed = sum(
                file.metadata.row_group(group).total_byte_size
                for group in range(file.num_row_groups)
            )
            if claimed > max_content(path.stat().st_size):
                raise ValueError("its columns are far larger than the file")
            for batch in file.iter_batches(_READ_AT_ONCE, columns=names):
                table = pyarrow.Table.from_batches([batch])
                _validate(table)
                for pair in _rows_of(table.flatten(), names):
                    number += 1
                    yield number, pair
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as Parquet: {error}") from error


def is_saved(path: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk`, of a data set or of its splits."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def open_saved(
    folder: Path,
    split: str,
    columns: Sequence[str],
    languages: tuple[str, str],
    option: str,
    numbers: Mapping[str, str] = MappingProxyType({}),
) -> Source:
    """Opens a data set, or one of its splits, that `save_to_disk` has written to a folder.

    Without `columns`, the source and the target are `translation` in the two languages, or the
    features that are called like them. A missing text is "", and line breaks become spaces.
    Messages name `option`, which gave the folder; `numbers` as of `tables.Table`.
    """
    given = f"{option}={folder}"
    if not is_saved(folder):
        raise UserError(f"{given} is not a folder that datasets' save_to_disk has written")
    with requiring(f"{given}, a data set of Hugging Face,", "datasets"):
        import datasets
        import pyarrow
    require_regular_files(folder)
    try:
        rows = datasets.load_from_disk(str(folder))
        if isinstance(rows, datasets.DatasetDict):
            if split not in rows:
                raise UserError(f"{given} has no split {split}, only {', '.join(rows)}")
            rows = rows[split]
        for table in filter(None, (rows.data, rows._indices)):
            _validate(table.table)
        flat = rows.flatten()  # The columns of `translation` become "translation.en", ...
    except UserError:
        raise
    except Exception as error:  # Damaged metadata can raise anything.
        raise UserError(f"{given} cannot be read: {first_line(error)}") from error
    name = f"{folder}/{split}"
    known = [*flat.features]
    columns = [_name(name, known, column) for column in columns] or _sides(name, known, languages)
    for column in columns:
        feature = flat.features[column]
        _check_is_text(name, column, getattr(feature, "dtype", type(feature).__name__))
    columns = [*columns, *(_name(name, known, column) for column in numbers.values())]
    flat = flat.select_columns([*columns]).with_format("arrow")
    files = [Path(file["filename"]) for file in rows.cache_files]

    def pairs(reading: Reading) -> Iterator[tuple[str, ...] | None]:
        for first in range(0, len(flat), _READ_AT_ONCE):
            try:
                part = flat[first : first + _READ_AT_ONCE]
            except (ValueError, LookupError, SystemError, OSError, pyarrow.ArrowException) as error:
                raise UserError(f"{name} cannot be read: {error}") from error
            for number, cells in enumerate(_rows_of(part, columns), start=first + 1):
                fields: Any = cells
                if not isinstance(cells, Fault):
                    fields = numbers_of(numbers, cells[2:])
                if isinstance(fields, Fault):
                    reading.add(None, number, fields)
                    yield None
                else:
                    yield located(cells[:2], None, number, fields)

    return Source(name, pairs, lambda: digest_files(files, repr(tuple(columns)).encode()))


def _validate(table: Any) -> None:
    """Checks that an Arrow table is whole, but not that its text is UTF-8, as `_rows_of` does.

    Arrow itself checks nothing: damage could end the process, or give other memory.

    Raises:
      pyarrow.ArrowInvalid: it is damaged.
    """
    table.validate()
    for column in table.flatten().itercolumns():
        kind = _BYTES.get(str(column.type))
        (column.cast(kind) if kind else column).validate(full=True)


def _rows_of(table: Any, names: Sequence[str]) -> Iterator[Sequence[str] | Fault]:
    """Yields the texts of columns of an Arrow table; a missing text is ""."""
    for row in zip(*(_texts(table[name]) for name in names), strict=True):
        cells = [cell if isinstance(cell, Fault) else one_line(str(cell)) for cell in row]
        fault = next((cell for cell in cells if isinstance(cell, Fault)), None)
        yield fault or [*map(str, cells)]


def _texts(column: Any) -> list[Any]:
    column = column.cast(_plain(column.type))
    try:
        cells = column.to_pylist()
    except UnicodeDecodeError:  # Arrow itself does not check what it calls strings.
        cells = column.cast(_BYTES[str(column.type)]).to_pylist()
    texts = [decoded(cell) if isinstance(cell, bytes) else cell for cell in cells]
    texts = ["" if text is None else text for text in texts]
    return [text.rstrip("\r\n") if type(text) is str else text for text in texts]


def _plain(kind: Any) -> Any:
    """Returns the type of the values of a column, which may be those of a dictionary."""
    return kind.value_type if str(kind).startswith("dictionary") else kind


def _name(path: Path | str, names: Sequence[str], column: str) -> str:
    if column in names:
        return column
    if column.isdecimal() and 0 < int(column) <= len(names):
        return names[int(column) - 1]
    raise _no_column(path, column, names)


def _no_column(where: Path | str, column: str, names: Sequence[str]) -> UserError:
    return UserError(
        f"{where} has no column {column!r} (data.columns), only {', '.join(map(repr, names))}"
        f"{suggestion(column, names)}"
    )


def _check_is_text(where: Path | str, column: str, kind: Any) -> None:
    if str(_plain(kind)) not in (*_BYTES, *_BYTES.values()):
        raise UserError(f"{where}: column {column!r} (data.columns) has no text: {kind}")


def _sides(where: Path | str, names: Sequence[str], languages: tuple[str, str]) -> list[str]:
    are_members = any(name.startswith("translation.") for name in names)
    only = (0, 1) if len(names) == 2 and not are_members else None
    sides = sides_of(names, languages) or only
    if sides is None:
        raise UserError(
            f"{where} has the columns {', '.join(map(repr, names))}, not one in each of "
            f"{' and '.join(languages)}: name the source and the target by data.columns"
        )
    return [names[side] for side in sides]
