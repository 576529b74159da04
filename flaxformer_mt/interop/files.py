"""Reads and writes checkpoint files of other toolkits, and never runs what stands in them.

PyTorch is imported when a PyTorch file is touched, and not before: safetensors files and state
dicts of numpy arrays need none.
"""

import argparse
import collections
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from flaxformer_mt.errors import UserError

Tensors = Mapping[str, np.ndarray]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Where a checkpoint that is more than a state dict keeps it.
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict")


class Checkpoint(NamedTuple):
    """What a reference was saved as. Lookups that fail raise a `UserError` naming the tensor."""

    tensors: Tensors
    settings: Mapping[str, Any]
    """The training options that some publications save along; else empty."""

    def size(self, *witnesses: tuple[str, int]) -> int:
        """The length that most of these tensors have along these axes.

        Several are asked so that one of a wrong shape is found out, and not believed.
        """
        lengths = {}
        for name, axis in witnesses:
            if name not in self.tensors:
                raise UserError(f"tensor {name} is missing")
            shape = self.tensors[name].shape
            if len(shape) <= axis:
                raise UserError(f"tensor {name} has shape {shape}, which is too few axes")
            lengths[name] = shape[axis]
        (length, votes), *others = collections.Counter(lengths.values()).most_common()
        if others and others[0][1] == votes:
            shapes = ", ".join(f"{name} {self.tensors[name].shape}" for name in lengths)
            raise UserError(f"the shapes of these tensors do not go together: {shapes}")
        return length

    def num_layers(self, prefix: str) -> int:
        """The number of layers whose tensors are called `prefix`, an index from 0, a dot, ..."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        indices = [int(match[1]) for match in map(pattern.match, self.tensors) if match]
        return max(indices, default=-1) + 1

    def same(self, *names: str) -> bool:
        """Whether all these tensors are there and equal to the last bit."""
        return all(name in self.tensors for name in names) and all(
            identical(self.tensors[name], self.tensors[names[0]]) for name in names
        )


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Checkpoint:
    """Reads a safetensors file, a PyTorch file, or a state dict that is already in memory.

    The content says which kind of file it is, not its name. A state dict may hold PyTorch tensors
    or numpy arrays; it may also stand in a dict of more (`STATE_DICT_KEYS`), beside "settings".

    Raises:
      UserError: there is no such file; it is damaged, of another kind, or would run code; an entry
        is no tensor, or of another dtype than float32 and float64.
    """
    content = source if isinstance(source, Mapping) else _read_file(Path(source))
    if not isinstance(content, Mapping):
        raise UserError(f"a {type(content).__name__}, not a state dict")
    settings: Any = {}
    if any(isinstance(value, Mapping) for value in content.values()):
        settings = content.get("settings") or {}
        content = _state_dict(content)
    return Checkpoint(
        {name: _to_numpy(name, value) for name, value in content.items()},
        vars(settings) if isinstance(settings, argparse.Namespace) else settings,
    )


def write(path: str | os.PathLike[str], tensors: Tensors) -> None:
    """Writes a state dict as .safetensors, or for PyTorch as .pt (and its other usual suffixes).

    Tensors that are one array are also one in a PyTorch file, as in the state dict of a model with
    tied weights. safetensors knows no such sharing; there each gets its copy.

    Raises:
      UserError: the suffix says neither, or the folder does not exist.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", *TORCH_SUFFIXES):
        raise UserError(f"{path}: give it the suffix .safetensors or .pt")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no folder")
    # Both writers need arrays that own their memory, in row-major order.
    owned = {id(array): np.array(array, order="C") for array in tensors.values()}
    unfinished = path.with_name(path.name + ".partial")
    if path.suffix == ".safetensors":
        arrays = {name: owned[id(array)] for name, array in tensors.items()}
        safetensors.numpy.save_file(arrays, unfinished, metadata={"format": "pt"})
    else:
        torch = _import_torch()
        shared = {key: torch.from_numpy(array) for key, array in owned.items()}
        torch.save({name: shared[id(array)] for name, array in tensors.items()}, unfinished)
    os.replace(unfinished, path)


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError("no such file")
    with path.open("rb") as file:
        start = file.read(9)
    # A safetensors file starts with the length of its JSON header, in eight bytes.
    if start[8:] == b"{":
        try:
            return safetensors.numpy.load_file(path)
        except Exception as error:  # Whatever the parser trips over, the file is unusable.
            raise UserError(f"a damaged safetensors file, or none: {_first_line(error)}") from error
    torch = _import_torch()
    try:
        # Training options are often saved as an argparse.Namespace, which can do no harm.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            "damaged, no checkpoint, or more than tensors, which would run code when loaded: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _import_torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            "PyTorch files need PyTorch: pip install 'flaxformer_mt[test]', or use .safetensors"
        ) from error
    return torch


def _state_dict(content: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in STATE_DICT_KEYS:
        if isinstance(content.get(key), Mapping):
            return content[key]
    raise UserError(f"no state dict under any of {', '.join(STATE_DICT_KEYS)}")


def _to_numpy(name: str, value: Any) -> np.ndarray:
    """A copy of a PyTorch tensor or numpy array, which later training cannot change."""
    if not hasattr(value, "dtype"):
        raise UserError(f"{name} is a {type(value).__name__}, not a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        raise UserError(f"tensor {name} is {dtype}, but should be float32 or float64")
    return np.array(value.numpy(force=True) if hasattr(value, "detach") else value)
