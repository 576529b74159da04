"""Reads our parameters from a file: what `flaxformer-mt convert --to flaxformer_mt` writes.

It is a .safetensors: the model's arrays with their paths as names, the configuration as JSON in its
metadata, Adam's state under "adam/", and under "carried/" what another toolkit's file had besides.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors

from flaxformer_mt.config import TransformerConfig, from_dict
from flaxformer_mt.errors import UserError

FORMAT = "flaxformer_mt"
"""What the metadata calls such a file."""
ADAM, CARRIED = "adam/", "carried/"
"""How the names of arrays begin that are no parameters of the model."""


class ParameterFile(NamedTuple):
    """What is in a file."""

    config: TransformerConfig
    tensors: dict[str, np.ndarray]
    """All arrays by name."""
    metadata: dict[str, str]

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The arrays of the model, by path."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not name.startswith((ADAM, CARRIED))
        }


def read(path: Path) -> ParameterFile:
    """Reads a file of parameters.

    Raises:
      UserError: there is no such file, or it is damaged or of another kind.
    """
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise UserError("its metadata has no configuration")
    with refusing_damaged_metadata():
        config = from_dict(json.loads(metadata["config"]), TransformerConfig)
    return ParameterFile(config, tensors, metadata)


@contextlib.contextmanager
def refusing_damaged_metadata() -> Iterator[None]:
    """Turns what goes wrong where metadata is not as it was written into a `UserError`."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"its metadata is damaged: {error!r}") from error


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a safetensors file, and the strings that stand beside them.

    Raises:
      UserError: there is no such file, or it is damaged or of another kind.
    """
    first_bytes(path)
    try:
        with safetensors.safe_open(path, framework="np") as file:
            # The file is no dict: it has keys, but cannot be iterated over.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except Exception as error:  # Whatever the parser trips over, the file is unusable.
        raise UserError(f"a damaged safetensors file, or none: {first_line(error)}") from error


def first_bytes(path: Path) -> bytes:
    """The first nine bytes of a file, fewer if it has not so many.

    Raises:
      UserError: it cannot be read, or is empty.
    """
    if path.is_dir():
        raise UserError("a folder, not a file")
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error
    if not start:
        raise UserError("an empty file")
    return start


def first_line(error: Exception) -> str:
    """What an error says, shortened to a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
