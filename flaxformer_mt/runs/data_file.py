"""`data.json`: what a run was started with, so that everything that reads it notices a change.

    train, valid, test   fingerprints of the corpora; a converted model has none
    hold_out             with data.hold_out only: the number of "lines" of the training text, of
                         pairs held out for "valid" and "test", and of others that were "left_out";
                         "one_in" of so many sources was held out by earlier versions
    tokenizer            fingerprints of the vocabularies
    config               the configuration
    files                size and SHA-256 of the files in `tokenizer/` and `origin/`
    trained              true once a checkpoint was written
    sha256               of all of the above but `trained`; identifies the run

Each checkpoint records the last of these. Files that earlier versions wrote have fingerprints only,
and nothing else is compared then.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import parse_json, read_bytes
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import DATA
from flaxformer_mt.runs.manifest import Entry, difference

CORPORA = ("train", "valid", "test")
HOLD_OUT, TOKENIZER, CONFIG, FILES = "hold_out", "tokenizer", "config", "files"
_TRAINED, _SHA256 = "trained", "sha256"


def write(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes the file of a new run, adding `sha256` to the values."""
    _write(folder, {**values, _SHA256: _digest(values)})


def read(folder: str | Path) -> dict[str, Any]:
    """Reads the file; {} if there is none; `UserError` if it is damaged."""
    path = Path(folder, DATA)
    if not os.path.lexists(path):
        return {}
    advice = "restore it, or give another --workdir"
    try:
        values = parse_json(read_bytes(path), "it")
    except UserError as error:
        raise UserError(f"{path} cannot be read ({error}): {advice}") from error
    is_known = isinstance(values, dict) and values.get(_TRAINED, True) is True
    # A file of an earlier version has no checksum.
    if not is_known or (
        values.keys() - {*CORPORA, TOKENIZER, _TRAINED} and values.get(_SHA256) != _digest(values)
    ):
        raise UserError(f"{path} is damaged: {advice}")
    return values


def run_id(folder: str | Path) -> str | None:
    """Returns the checksum that identifies a run; None for one that an earlier version started."""
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
    for name, entry in read(folder).get(FILES, {}).items():
        path = Path(folder, name)
        cause = difference(path, Entry(**entry), str(path))
        if cause:
            what = "the vocabulary" if name.startswith(TOKENIZER) else "the file"
            raise UserError(
                f"{cause}, so it is not {what} that the run was started with: restore it"
            )


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    atomic.write_text(folder / DATA, json.dumps(values, indent=2) + "\n")


def _digest(values: Mapping[str, Any]) -> str:
    covered = {name: value for name, value in values.items() if name not in (_TRAINED, _SHA256)}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()
