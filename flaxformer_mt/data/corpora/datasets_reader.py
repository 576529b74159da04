"""Reads what `datasets` of Hugging Face has saved to disk (`save_to_disk`).

A data set has a feature `translation` with one text per language, or one string feature per side.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.corpora.tables import LINE_BREAKS
from flaxformer_mt.data.corpora.text_files import digest_file
from flaxformer_mt.errors import UserError

_READ_AT_ONCE = 1000  # Rows.


def is_saved(path: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk`, of a data set or of its splits."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


@dataclasses.dataclass(frozen=True)
class SavedSplit:
    """The pairs of a data set."""

    rows: Any
    """The `datasets.Dataset`, which is memory-mapped."""
    columns: tuple[str, str]
    """The source and the target: features, or members of one ("translation.en")."""
    name: str

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields the stored pairs; a missing text is "", and line breaks become spaces.

        Raises:
          UserError: a file is damaged.
        """
        import pyarrow

        for first in range(0, len(self.rows), _READ_AT_ONCE):
            try:
                part = self.rows[first : first + _READ_AT_ONCE]
                texts = [_texts(part, column) for column in self.columns]
            except (ValueError, SystemError, OSError, pyarrow.ArrowException) as error:
                raise UserError(f"{self.name} cannot be read: {error}") from error
            yield from zip(*texts, strict=True)

    def digest(self) -> bytes:
        """Returns the SHA-256 of the columns and of the data set's files."""
        digest = hashlib.sha256(repr(self.columns).encode())
        for file in self.rows.cache_files:
            digest.update(digest_file(Path(file["filename"])))
        return digest.digest()


def open_saved(
    folder: Path, split: str, columns: Sequence[str], languages: tuple[str, str], option: str
) -> SavedSplit:
    """Opens a data set, or one of its splits, that `save_to_disk` has written to a folder.

    Without `columns`, the source and the target are `translation` in the two languages, or the
    features that are called like them. Messages name `option`, which gave the folder.

    Raises:
      UserError: `datasets` is not installed, the folder is damaged, or has no such split or column.
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

    try:
        rows = datasets.load_from_disk(str(folder))
    # IndexError: it has no rows.
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{option}={folder} cannot be read: {error}") from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise UserError(f"{option}={folder} has no split {split}, only {', '.join(rows)}")
        rows = rows[split]
    name = f"{folder}/{split}"
    if not columns:
        prefix = "translation." if "translation" in rows.features else ""
        columns = [f"{prefix}{language}" for language in languages]
    source, target = (_checked(rows, column, name) for column in columns)
    return SavedSplit(rows, (source, target), name)


def _checked(rows: Any, column: str, name: str) -> str:
    known = _columns(rows.features)
    if column not in known:
        raise UserError(
            f"{name} has no column {column!r} (data.columns), only "
            f"{', '.join(map(repr, known))}{suggestion(column, known)}"
        )
    if known[column] not in ("string", "large_string"):
        raise UserError(f"{name}: column {column!r} (data.columns) has no text: {known[column]}")
    return column


def _columns(features: Any) -> dict[str, str]:
    types: dict[str, str] = {}
    for name, feature in features.items():
        if type(feature).__name__ == "Translation":
            types |= {f"{name}.{language}": "string" for language in feature.languages}
        elif isinstance(feature, dict):
            types |= {f"{name}.{key}": _type(member) for key, member in feature.items()}
        else:
            types[name] = _type(feature)
    return types


def _type(feature: Any) -> str:
    return str(getattr(feature, "dtype", type(feature).__name__))


def _texts(part: dict[str, list[Any]], column: str) -> list[str]:
    if column in part:
        values = part[column]
    else:
        name, _, member = column.partition(".")
        values = [None if value is None else value[member] for value in part[name]]
    return ["" if text is None else LINE_BREAKS.sub(" ", text.rstrip("\r\n")) for text in values]
