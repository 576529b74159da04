"""Conversions in which a folder with a whole model stands on either side.

A whole model has a vocabulary and says how it is searched (`run_folders.Package`); a file of
`convert.py` has weights alone.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import FAMILIES
from flaxformer_mt.interop import convert as checkpoint_files
from flaxformer_mt.interop.adam import TrainingState
from flaxformer_mt.interop.checkpoint_files import TORCH_SUFFIXES
from flaxformer_mt.interop.convert import OWN
from flaxformer_mt.interop.formats import run_folders
from flaxformer_mt.interop.formats.run_folders import Package
from flaxformer_mt.presets import canonical_family
from flaxformer_mt.runs import atomic

Notes = tuple[str, ...]
"""What was done, or got lost, a line each."""
Read = Callable[[Path, Mapping[str, Any]], tuple[Package, Notes]]
"""Reads a whole model; with fields of the configuration that shall have other values."""
Write = Callable[..., Notes]
"""Writes one: (package, folder, switches in which it may compute something slightly else)."""

# Modules with a function `read`, ...
READERS = {
    "marian": "huggingface",
    "marian-native": "marian_native",
}
# ... and with a function `write`. Imported at use: some need more than others.
WRITERS = {
    "marian": "huggingface",
    "marian-native": "marian_native",
    "ctranslate2": "ctranslate2",
    "jax": "jax_export",
}
FILE_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
"""An output so called is a file with weights alone."""


def convert(
    source_family: str,
    target_family: str,
    source: Path,
    target: Path,
    overrides: Mapping[str, Any] = {},
    accepted: Collection[str] = (),
    quantization: str | None = None,
) -> Notes:
    """Turns a model into that of another family; arguments as in `convert.convert`.

    Either side may be a folder with a whole model: a run (of the family `OWN`), or what a key of
    `READERS` is published as; to be written, one of `WRITERS`. `quantization` is for "ctranslate2",
    see there.

    Returns:
      What was done to the weights, and what got lost beside them, a line each.

    Raises:
      UserError: as `convert.convert`; the output folder exists; a vocabulary is missing.
    """
    source_family, target_family = canonical_family(source_family), canonical_family(target_family)
    _check_family("--from", source_family, {OWN, *READERS, *FAMILIES})
    _check_family("--to", target_family, {OWN, *WRITERS, *FAMILIES})
    options = {} if quantization is None else {"quantization": quantization}
    if options and target_family != "ctranslate2":
        raise UserError("--quantization is for --to ctranslate2 only: leave it out")
    if target.suffix in FILE_SUFFIXES:
        if not source.is_dir() and source_family in (OWN, *FAMILIES):
            return checkpoint_files.convert(
                source_family, target_family, source, target, overrides, accepted
            )
        package, notes = _read(source_family, source, overrides)
        state = TrainingState(package.config.model, package.params, None)
        return notes + checkpoint_files.write(state, OWN, target_family, target, accepted)
    if target_family not in (OWN, *WRITERS):
        raise UserError(f"{target}: give it the suffix .safetensors or .pt")
    atomic.require_absent(target)  # Before anything is read.
    package, notes = _read(source_family, source, overrides)
    if target_family == OWN:
        run_folders.write(package, target)
        return notes
    write: Write = _function(WRITERS[target_family], "write")
    try:
        return notes + write(package, target, accepted, **options)
    except UserError as error:
        raise UserError(f"{source} cannot become {target_family}: {error}") from error


def _read(family: str, source: Path, overrides: Mapping[str, Any]) -> tuple[Package, Notes]:
    if family in READERS and (source.is_dir() or family not in FAMILIES):
        read: Read = _function(READERS[family], "read")
        return read(source, overrides)
    if not source.is_dir():
        raise UserError(f"{source} is no folder, so it has no vocabulary: give a folder")
    if family != OWN:
        raise UserError(f"{source} is a folder: for {family} give a file")
    if overrides:
        raise UserError(f"{source} tells {next(iter(overrides))} itself: do not give any fields")
    return run_folders.read(source), ()


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"flaxformer_mt.interop.formats.{module}"), name)


def _check_family(option: str, family: str, known: Collection[str]) -> None:
    if family not in known:
        raise UserError(
            f"{option} {family}: unknown family; choose one of {', '.join(sorted(known))}"
        )
