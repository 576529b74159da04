"""Reads parameter files, as written by `flaxformer-mt convert --to flaxformer_mt`.

A parameter file is a safetensors file: the model's arrays, named by their paths; the configuration
as JSON in the metadata; Adam's state under "adam/"; and under "carried/" the carried tensors, which
another toolkit's file had and our model has no use for.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from flaxformer_mt.config import TransformerConfig, from_dict
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.input_files import MAX_SETTINGS_BYTES, open_regular, parse_json

FORMAT = "flaxformer_mt"
"""Value of `format` in the metadata."""
ADAM, CARRIED = "adam/", "carried/"
"""Prefixes of the names of arrays that are not parameters."""

_MAX_TENSORS = 20_000


class ParameterFile(NamedTuple):
    """The content of a parameter file."""

    config: TransformerConfig
    tensors: dict[str, np.ndarray]
    """All arrays by name."""
    metadata: dict[str, str]

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters of the model, by path."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not name.startswith((ADAM, CARRIED))
        }


def read(path: Path) -> ParameterFile:
    """Reads a parameter file; `UserError` if there is none, or it is damaged."""
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise UserError("its metadata holds no configuration")
    with refusing_damaged_metadata():
        values = parse_json(metadata["config"], "its metadata", dict[str, Any])
        config = from_dict(values, TransformerConfig)
    return ParameterFile(config, tensors, metadata)


@contextlib.contextmanager
def refusing_damaged_metadata() -> Iterator[None]:
    """Converts errors of parsing damaged metadata into `UserError`."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"its metadata is damaged: {error!r}") from error


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads the arrays and the metadata of a safetensors file."""
    size = int.from_bytes(first_bytes(path)[:8], "little")
    if size > MAX_SETTINGS_BYTES:
        raise UserError(f"not a safetensors file, or a damaged one: a header of {size:,} bytes")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            if len(file.keys()) > _MAX_TENSORS:
                raise ValueError(f"more than {_MAX_TENSORS:,} tensors")
            # Not a dict: it has keys(), but cannot be iterated over.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except Exception as error:  # Any error of the parser means that the file is unusable.
        raise UserError(f"not a safetensors file, or a damaged one: {first_line(error)}") from error


def first_bytes(path: Path) -> bytes:
    """Returns the first nine bytes of a file, or all if it is shorter; an empty one is an error."""
    with open_regular(path) as file:
        start = file.read(9)
    if not start:
        raise UserError("an empty file")
    return start
