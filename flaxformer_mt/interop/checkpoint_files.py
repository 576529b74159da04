"""Reads and writes checkpoint files of other toolkits, and never runs what stands in them.

PyTorch is imported when a PyTorch file is touched, and not before: safetensors files and state
dicts of numpy arrays need none.
"""

import argparse
import collections
import os
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.parameter_file import first_bytes, read_safetensors

Tensors = Mapping[str, np.ndarray]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Where a checkpoint that is more than a state dict keeps it, ...
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict")
# ... modules of the model that OpenNMT keeps beside it, ...
MODULE_KEYS = ("generator",)
# ... training options, and the optimizer's state (the last is fairseq's).
SETTINGS_KEYS = ("settings", "opt", "args", "cfg")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "last_optimizer_state")


class PublishedCheckpoint(NamedTuple):
    """What a reference was saved as. Lookups that fail raise a `UserError` naming the tensor."""

    tensors: Tensors
    settings: Mapping[str, Any]
    """The training options that some publications save along; else empty."""
    optimizer: Mapping[str, Any] | None = None
    """The state dict of the optimizer, unchecked, if there is one."""

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

    def has_any(self, ending: str) -> bool:
        """Whether any tensor's name ends so."""
        return any(name.endswith(ending) for name in self.tensors)

    def same(self, *names: str) -> bool:
        """Whether all these tensors are there and equal to the last bit."""
        return all(name in self.tensors for name in names) and all(
            identical(self.tensors[name], self.tensors[names[0]]) for name in names
        )


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> PublishedCheckpoint:
    """Reads a safetensors file, a PyTorch file, or a state dict that is already in memory.

    The content says which kind of file it is, not its name. A state dict may hold PyTorch tensors
    or numpy arrays; it may also stand in a dict of more, under one of `STATE_DICT_KEYS`.

    Raises:
      UserError: there is no such file; it is damaged, of another kind, or would run code; an entry
        is no tensor, or of another dtype than float32 and float64.
    """
    content = source if isinstance(source, Mapping) else _read_file(Path(source))
    if not isinstance(content, Mapping):
        raise UserError(f"a {type(content).__name__}, not a state dict")
    if not any(isinstance(value, Mapping) for value in content.values()):
        return PublishedCheckpoint(
            {name: to_numpy(name, value) for name, value in content.items()}, {}
        )
    beside = {
        key: vars(value) if isinstance(value, argparse.Namespace) else value
        for key, value in content.items()
    }

    def first(keys: tuple[str, ...]) -> Mapping[str, Any] | None:
        found = (beside[key] for key in keys if isinstance(beside.get(key), Mapping))
        return next(found, None)

    return PublishedCheckpoint(
        {name: to_numpy(name, value) for name, value in _state_dict(content).items()},
        first(SETTINGS_KEYS) or {},
        first(OPTIMIZER_KEYS),
    )


def read_widened(paths: Sequence[Path]) -> tuple[dict[str, np.ndarray], str]:
    """Reads tensors that may stand in several files, and may have 16 bits.

    Args:
      paths: safetensors or PyTorch files, each with a state dict.

    Returns:
      The tensors, float16 as float32, which changes none; and the dtype that most of them had.

    Raises:
      UserError: as `read`, with the file's name; or two files have a tensor of one name.
    """
    tensors: dict[str, np.ndarray] = {}
    dtypes: collections.Counter[str] = collections.Counter()
    for path in paths:
        try:
            content = _read_file(path)
            if not isinstance(content, Mapping):
                raise UserError(f"a {type(content).__name__}, not a state dict")
            for name, value in content.items():
                if name in tensors:
                    raise UserError(f"tensor {name} is in another file, too")
                dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
                if dtype == "float16":
                    value = np.asarray(value).astype(np.float32)
                tensors[name] = to_numpy(name, value)
                dtypes[dtype] += 1
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    return tensors, dtypes.most_common(1)[0][0] if dtypes else "float32"


def write(path: str | os.PathLike[str], tensors: Tensors) -> None:
    """Writes a state dict as .safetensors, or for PyTorch as .pt (and its other usual suffixes).

    Tensors that are one array are also one in a PyTorch file, as in the state dict of a model with
    tied weights. safetensors knows no such sharing; there each gets its copy.

    Raises:
      UserError: the suffix says neither, or the folder does not exist or cannot be written to.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        write_safetensors(path, tensors, {"format": "pt"})
    else:
        write_torch(path, tensors)


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Writes arrays and a few strings as a safetensors file; errors as in `write`."""
    # It takes arrays as they lie in memory, and so must have them in row-major order.
    arrays = {name: np.array(array, order="C") for name, array in tensors.items()}
    with atomic.new_file(path) as partial:
        safetensors.numpy.save_file(arrays, partial, metadata=dict(metadata))


def write_torch(path: Path, content: Mapping[str, Any]) -> None:
    """Writes nested dicts, whose arrays become tensors, for PyTorch; errors as in `write`."""
    if path.suffix not in TORCH_SUFFIXES:
        raise UserError(f"{path}: give it the suffix .safetensors or .pt")
    torch = _import_torch()
    tensors: dict[int, Any] = {}

    def to_torch(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: to_torch(each) for key, each in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in tensors:
            tensors[id(value)] = torch.from_numpy(np.array(value, order="C"))
        return tensors[id(value)]

    with atomic.new_file(path) as partial:
        torch.save(to_torch(content), partial)


def _read_file(path: Path) -> Any:
    # A safetensors file starts with the length of its JSON header, in eight bytes.
    if first_bytes(path)[8:] == b"{":
        return read_safetensors(path)[0]
    torch = _import_torch()
    try:
        # Training options are often saved as an argparse.Namespace, which can do no harm.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About formats of pickle; what matters is raised.
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # PyTorch's own words advise to load it all the same.
        forbidden = re.search(r"GLOBAL ([\w.]+)", str(error))
        if forbidden:
            raise UserError(
                f"it holds more than tensors: loading would run {forbidden[1]}, and was stopped; "
                "save the model's state_dict() by itself"
            ) from error
        if isinstance(error, pickle.UnpicklingError):
            raise UserError(
                "damaged, or it holds more than tensors, which could run code when loaded"
            ) from error
        raise UserError("damaged, or no checkpoint") from error


def _import_torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            "PyTorch files need PyTorch: pip install 'flaxformer_mt[parity]', or use .safetensors"
        ) from error
    return torch


def _state_dict(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict in a dict of more, with the names of the whole model."""
    for key in STATE_DICT_KEYS:
        if isinstance(content.get(key), Mapping):
            modules = {name: content[name] for name in MODULE_KEYS if name in content}
            return content[key] | {
                f"{module}.{name}": tensor
                for module, tensors in modules.items()
                for name, tensor in tensors.items()
            }
    raise UserError(f"no state dict under any of {', '.join(STATE_DICT_KEYS)}")


def to_numpy(name: str, value: Any) -> np.ndarray:
    """A copy of a PyTorch tensor or numpy array, which later training cannot change."""
    if not hasattr(value, "dtype"):
        raise UserError(f"{name} is a {type(value).__name__}, not a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        raise UserError(f"tensor {name} is {dtype}, but should be float32 or float64")
    return np.array(value.numpy(force=True) if hasattr(value, "detach") else value)
