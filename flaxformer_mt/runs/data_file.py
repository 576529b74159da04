"""`data.json`: what a run was started with, so that everything that reads it notices a change.

    format               of the whole run folder: `FORMAT`
    train, valid, test   fingerprints of the corpora; a converted model has none
    hold_out             with data.hold_out only: the number of "lines" of the training text, of
                         pairs held out for "valid" and "test", and of others that were "left_out"
    tokenizer            fingerprints of the vocabularies
    config               the configuration
    files                size and SHA-256 of the files in `tokenizer/` and `origin/`
    trained              true once a checkpoint was written
    sha256               of all of the above but `trained`; identifies the run

Each checkpoint records the last of these.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from flaxformer_mt import atomic, run_layout
from flaxformer_mt.config.fields import shown
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import Count, checked, read_json
from flaxformer_mt.run_layout import DATA
from flaxformer_mt.runs.manifest import Entry, difference

CORPORA = ("train", "valid", "test")
HOLD_OUT, TOKENIZER, CONFIG, FILES = "hold_out", "tokenizer", "config", "files"
_FORMAT, _TRAINED, _SHA256 = "format", "trained", "sha256"
FORMAT = 1
"""The number of the format of run folders: another one cannot be read."""


class _Content(TypedDict, total=False):
    format: Required[int]
    sha256: Required[str]
    tokenizer: Required[dict[str, str]]
    config: Required[dict[str, Any]]
    files: Required[dict[str, Entry]]
    train: list[str]
    valid: list[str]
    test: list[str]
    hold_out: dict[str, Count]
    trained: Literal[True]


def write(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes the file of a new run, adding the format and `sha256` to the values."""
    values = {_FORMAT: FORMAT, **values}
    _write(folder, {**values, _SHA256: _digest(values)})


def read(folder: str | Path) -> dict[str, Any]:
    """Reads the file; {} if there is none; `UserError` if it is damaged or of another format."""
    path = Path(folder, DATA)
    if not os.path.lexists(path):
        return {}
    try:
        values: dict[str, Any] = read_json(path, dict[str, Any])
        if values.get(_FORMAT, FORMAT) == FORMAT:
            checked(values, f"{path} is", _Content)
            if values.get(_SHA256) != _digest(values):
                raise UserError(f"{path} is damaged: its checksum is that of other content")
            return values
    except UserError as error:
        raise UserError(f"{error}; restore it, or give another workdir") from error
    raise UserError(
        f"{path}: the run has format {shown(values[_FORMAT])}, and this version of flaxformer_mt "
        f"reads format {FORMAT}: use the version that wrote it"
    )


def run_id(folder: str | Path) -> str | None:
    """Returns the checksum that identifies a run; None without the file."""
    return read(folder).get(_SHA256)


def is_trained(folder: Path) -> bool:
    """Returns whether the run has written a checkpoint."""
    return read(folder).get(_TRAINED, False)


def mark_trained(folder: Path) -> None:
    """Records that the run has written a checkpoint."""
    values = read(folder)
    if values and not values.get(_TRAINED):
        _write(folder, {**values, _TRAINED: True})


def check_files(folder: str | Path) -> None:
    """Raises `UserError` unless the files of the vocabulary and in `origin/` are unchanged."""
    entries: dict[str, Entry] = checked(read(folder).get(FILES, {}), f"{DATA} is", dict[str, Entry])
    for name, entry in entries.items():
        path = Path(folder, name)
        cause = difference(path, entry, str(path))
        if cause:
            what = "the vocabulary" if name.startswith(TOKENIZER) else "the file"
            raise UserError(
                f"{cause}, so it is not {what} that the run was started with: restore it"
            )


def check_vocabulary(paths: str) -> None:
    """Checks the files of vocabularies of runs: folders, or files in `tokenizer`, after commas."""
    for path in map(Path, paths.split(",")):
        for folder in (path, path.parent, path.parent.parent):
            if (
                Path(folder, run_layout.TOKENIZER).is_dir()
                and Path(folder, run_layout.CONFIG).is_file()
            ):
                check_files(folder)


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    atomic.write_text(folder / DATA, json.dumps(values, indent=2) + "\n")


def _digest(values: Mapping[str, Any]) -> str:
    covered = {name: value for name, value in values.items() if name not in (_TRAINED, _SHA256)}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()
