"""Reads what `datasets` of Hugging Face has saved to disk (`save_to_disk`).

A data set has a feature `translation` with one text per language, or one string feature per side.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.corpora.parquet_reader import rows_of, validate
from flaxformer_mt.data.corpora.rows import BadRows, Fault, placed
from flaxformer_mt.data.corpora.text_files import Source, digest_files, source_of
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.input_files import require_regular_files

_READ_AT_ONCE = 1000  # Rows.


def is_saved(path: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk`, of a data set or of its splits."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def open_saved(
    folder: Path,
    split: str,
    columns: Sequence[str],
    languages: tuple[str, str],
    option: str,
    drops_bad_rows: bool,
) -> Source:
    """Opens a data set, or one of its splits, that `save_to_disk` has written to a folder.

    Without `columns`, the source and the target are `translation` in the two languages, or the
    features that are called like them. A missing text is "", and line breaks become spaces.
    Messages name `option`, which gave the folder.
    """
    if not is_saved(folder):
        raise UserError(
            f"{option}={folder} is not a folder that datasets' save_to_disk has written"
        )
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{option}={folder} is a data set of Hugging Face, which needs a package that is not "
            "installed: pip install datasets"
        ) from error
    import pyarrow

    require_regular_files(folder)
    try:
        rows = datasets.load_from_disk(str(folder))
        if isinstance(rows, datasets.DatasetDict):
            if split not in rows:
                raise UserError(f"{option}={folder} has no split {split}, only {', '.join(rows)}")
            rows = rows[split]
        for table in filter(None, (rows.data, rows._indices)):
            validate(table.table)
        flat = rows.flatten()  # The columns of `translation` become "translation.en", ...
    except UserError:
        raise
    except Exception as error:  # Damaged metadata can raise anything.
        raise UserError(f"{option}={folder} cannot be read: {first_line(error)}") from error
    name = f"{folder}/{split}"
    if not columns:
        prefix = "translation." if "translation" in rows.features else ""
        columns = [f"{prefix}{language}" for language in languages]
    for column in columns:
        _check_column(flat.features, column, name)
    flat = flat.select_columns([*columns]).with_format("arrow")
    files = [Path(file["filename"]) for file in rows.cache_files]

    def pairs(bad_rows: BadRows) -> Iterator[tuple[str, ...]]:
        for first in range(0, len(flat), _READ_AT_ONCE):
            try:
                part = flat[first : first + _READ_AT_ONCE]
            except (ValueError, LookupError, SystemError, OSError, pyarrow.ArrowException) as error:
                raise UserError(f"{name} cannot be read: {error}") from error
            for number, pair in enumerate(rows_of(part, columns), start=first + 1):
                if isinstance(pair, Fault):
                    bad_rows.add(None, number, pair)
                else:
                    yield placed(pair, None, number)

    def digest() -> bytes:
        return digest_files(files, repr(tuple(columns)).encode())

    return source_of(name, pairs, digest, drops_bad_rows)


def _check_column(features: Any, column: str, name: str) -> None:
    if column not in features:
        raise UserError(
            f"{name} has no column {column!r} (data.columns), only "
            f"{', '.join(map(repr, features))}{suggestion(column, features)}"
        )
    kind = str(getattr(features[column], "dtype", type(features[column]).__name__))
    if kind not in ("string", "large_string"):
        raise UserError(f"{name}: column {column!r} (data.columns) has no text: {kind}")
