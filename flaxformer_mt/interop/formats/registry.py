"""Which module of this package reads and writes which format of whole models."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.families import FAMILIES
from flaxformer_mt.interop.formats.bundle import ModelBundle
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.interop.formats.own_format import OWN

Notes = tuple[str, ...]
"""What was changed or lost, in one line each."""
BundleReader = Callable[..., tuple[ModelBundle, Notes]]
"""Reads a whole model: (path, configuration fields that override its own)."""
BundleWriter = Callable[..., Notes]
"""Writes one: (bundle, folder, accepted switches)."""

# Modules of `formats` with a function `read`, ...
READERS = {
    **dict.fromkeys(HUB_FAMILIES, "huggingface"),
    "fairseq": "fairseq_folder",
    "opennmt": "opennmt_folder",
    "marian-native": "marian_folder",
    "jax": "jax_export",
}
# ... and with a function `write`. They are imported at use, since some need optional packages.
WRITERS = {
    **dict.fromkeys(HUB_FAMILIES, "huggingface"),
    "marian-native": "marian_folder",
    "ctranslate2": "ctranslate2",
    "jax": "jax_export",
}


def read_bundle(
    family: str, source: Path, overrides: Mapping[str, Any]
) -> tuple[ModelBundle, Notes]:
    """Reads a folder with a whole model, given configuration fields that override its own.

    Raises:
      UserError: it is not a folder of that family, or is damaged.
    """
    if family in READERS and (source.is_dir() or family not in FAMILIES):
        read: BundleReader = function_of(READERS[family], "read")
        return read(source, overrides, **({"family": family} if family in HUB_FAMILIES else {}))
    if not source.is_dir():
        raise UserError(f"{source} is not a folder, so it has no vocabulary: a folder is needed")
    if family != OWN:
        raise UserError(f"{source} is a folder: {family} is read from a file")
    if overrides:
        raise UserError(f"{source} contains {next(iter(overrides))}: fields cannot be overridden")
    return ModelBundle.of_run(source), ()


def function_of(module: str, name: str) -> Any:
    """Returns a function of a module of this package."""
    return getattr(importlib.import_module(f"flaxformer_mt.interop.formats.{module}"), name)
