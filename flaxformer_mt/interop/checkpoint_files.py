"""Reads and writes checkpoint files of other toolkits without running code from them."""

import argparse
import collections
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import safetensors.numpy

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError, first_line, prefixed
from flaxformer_mt.interop import torch_files
from flaxformer_mt.runs.parameter_file import first_bytes, read_safetensors

Tensors = Mapping[str, np.ndarray]
"""Arrays by name or path."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
ORIGINAL = "take the model that was quantized, or save it after dequantize() of transformers"
# Keys of a training checkpoint: of the state dict, ...
STATE_DICT_KEYS = (
    "model", "state_dict", "model_state_dict", "module", "model_state", "network", "net",
    "weights", "params",
)  # fmt: skip
# ... of the module that OpenNMT stores separately, ...
MODULE_KEY = "generator"
# ... of the training options, and of the optimizer's state (the last is fairseq's).
SETTINGS_KEYS = ("settings", "opt", "args", "cfg")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "last_optimizer_state")


class PublishedCheckpoint(NamedTuple):
    """The content of a published checkpoint file.

    Lookups of missing tensors raise a `UserError` that names the tensor.
    """

    tensors: Tensors
    settings: Mapping[str, Any]
    """Training options stored with the weights; empty if there are none."""
    optimizer: Mapping[str, Any] | None = None
    """The state dict of the optimizer, unchecked; None if there is none."""
    prefix: str = ""
    """What preceded all names of tensors in the file, such as "module."; see `without_prefix`."""
    vocabularies: Any = None
    """What OpenNMT-py stores as "vocab", unchecked; None if there is nothing."""

    def without_prefix(self, prefix: str) -> Self:
        """Returns the checkpoint without a prefix that all names of its tensors have."""
        tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        return self._replace(tensors=tensors, prefix=self.prefix + prefix)

    def size(self, *witnesses: tuple[str, int]) -> int:
        """Returns the size that most of these (tensor, axis) pairs have, of the tensors there are.

        With several of them, a tensor of a wrong shape is detected instead of determining the size.

        Raises:
          UserError: all tensors are missing, one has too few axes, or there is no majority.
        """
        lengths = {}
        for name, axis in witnesses:
            if name not in self.tensors:
                continue
            shape = self.tensors[name].shape
            if len(shape) <= axis:
                raise UserError(f"tensor {name} has shape {shape}, with too few axes")
            lengths[name] = shape[axis]
        if not lengths:
            raise UserError(f"tensor {witnesses[0][0]} is missing")
        (length, votes), *others = collections.Counter(lengths.values()).most_common()
        if others and others[0][1] == votes:
            shapes = ", ".join(f"{name} {self.tensors[name].shape}" for name in lengths)
            raise UserError(f"the shapes of these tensors are inconsistent: {shapes}")
        return length

    def num_layers(self, prefix: str, suffix: str = ".", first: int = 0) -> int:
        """Returns the number of layers, whose tensors are named `prefix`, index, `suffix`, ...

        Raises:
          UserError: the indices are not `first`, `first` + 1, ...
        """
        pattern = re.compile(f"{re.escape(prefix)}([0-9]+){re.escape(suffix)}")
        names = {match[1] for match in map(pattern.match, self.tensors) if match}
        expected = {str(index) for index in range(first, first + len(names))}
        # An index may have any number of digits, and be larger than the number of all layers.
        for name in sorted(names - expected):
            missing = min(expected - names, key=int)
            raise UserError(
                f"it has tensors {prefix}{name}{suffix}*, but no {prefix}{missing}{suffix}*"
            )
        return len(names)

    def has_any(self, ending: str) -> bool:
        """Returns whether any tensor's name ends with `ending`."""
        return any(name.endswith(ending) for name in self.tensors)

    def same(self, *names: str) -> bool:
        """Returns whether all these tensors exist and are bitwise equal."""
        return all(name in self.tensors for name in names) and all(
            identical(self.tensors[name], self.tensors[names[0]]) for name in names
        )


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two arrays have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def read(
    source: str | os.PathLike[str] | Mapping[str, Any],
    ignores: Callable[[Any], bool] = lambda name: False,
) -> PublishedCheckpoint:
    """Reads a safetensors file, a PyTorch file, or a state dict in memory.

    The kind of file is detected from its content, not its name. A state dict may contain PyTorch
    tensors or numpy arrays, and may be nested in another dict under one of `STATE_DICT_KEYS`.
    Tensors of names that `ignores` accepts are left out, whatever they are.

    Raises:
      TypeError: `source` is neither a path nor a mapping.
      UserError: the file does not exist, is damaged, of another kind, or would run code; an entry
        is not a tensor, or not of dtype float32 or float64.
    """
    if not isinstance(source, str | os.PathLike | Mapping):
        raise TypeError(
            f"a checkpoint must be a path or a state dict, not {type(source).__name__}: for a "
            "module, give its state_dict()"
        )
    content = source if isinstance(source, Mapping) else _read_file(Path(source))
    tensors = _arrays(_state_dict(content), ignores)
    if not _is_nested(content):
        return PublishedCheckpoint(tensors, {})
    training = {
        key: vars(value) if isinstance(value, argparse.Namespace) else value
        for key, value in content.items()
    }

    def first(keys: tuple[str, ...]) -> Mapping[str, Any] | None:
        found = (training[key] for key in keys if isinstance(training.get(key), Mapping))
        return next(found, None)

    return PublishedCheckpoint(
        tensors,
        first(SETTINGS_KEYS) or {},
        first(OPTIMIZER_KEYS),
        vocabularies=training.get("vocab"),
    )


def read_widened(
    paths: Sequence[Path], ignores: Callable[[Any], bool], is_adapter: bool = False
) -> tuple[dict[str, np.ndarray], str]:
    """Reads the tensors of one or more files, converting float16 and bfloat16 to float32.

    Tensors of names that `ignores` accepts are left out. `is_adapter` says whether the files may
    have an adapter's matrices.

    Returns:
      The tensors, and the dtype that most of them had in the files.

    Raises:
      UserError: as `read`, prefixed with the file's name; or two files have a tensor of one name.
    """
    tensors: dict[str, np.ndarray] = {}
    dtypes: collections.Counter[str] = collections.Counter()
    for path in paths:
        with prefixed(f"{path}: "):
            for name, value in _state_dict(_read_file(path), is_adapter).items():
                if ignores(name):
                    continue
                if name in tensors:
                    raise UserError(f"tensor {name} is in another file as well")
                dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
                if dtype in ("float16", "bfloat16"):
                    value = value.float() if hasattr(value, "detach") else value.astype("float32")
                tensors[name] = to_numpy(name, value)
                dtypes[dtype] += 1
    return tensors, dtypes.most_common(1)[0][0] if dtypes else "float32"


def write(path: Path, tensors: Tensors) -> None:
    """Writes a state dict as .safetensors, or for PyTorch as .pt (or its other usual suffixes).

    Entries that share one array also share it in a PyTorch file, as in the state dict of a model
    with tied weights. safetensors does not support sharing; each entry gets a copy.

    Raises:
      UserError: the suffix is neither, or the folder does not exist or cannot be written to.
    """
    if path.suffix == ".safetensors":
        write_safetensors(path, tensors, {"format": "pt"})
    else:
        write_torch(path, tensors)


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Writes arrays and a few strings as a safetensors file; errors as in `write`."""
    # safetensors writes the memory as it is, so arrays must be in row-major order.
    arrays = {name: np.array(array, order="C") for name, array in tensors.items()}
    with atomic.new_file(path) as partial:
        try:
            safetensors.numpy.save_file(arrays, partial, metadata=dict(metadata))
        except safetensors.SafetensorError as error:
            # Only its text has the number of the operating system's error.
            if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def write_torch(path: Path, content: Mapping[str, Any]) -> None:
    """Writes nested dicts as a PyTorch file, arrays as tensors; errors as in `write`."""
    if path.suffix not in TORCH_SUFFIXES:
        raise UserError(f"{path}: use the suffix .safetensors or .pt")
    torch = torch_files.import_torch("writing")
    tensors: dict[int, Any] = {}

    def to_torch(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: to_torch(each) for key, each in value.items()}
        if isinstance(value, list):
            return [to_torch(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in tensors:
            tensors[id(value)] = torch.from_numpy(np.array(value, order="C"))
        return tensors[id(value)]

    # PyTorch's own writes to a path that fail do not say why.
    with atomic.new_file(path) as partial, partial.open("wb") as file:
        torch.save(to_torch(content), file)


def _read_file(path: Path) -> Mapping[str, Any]:
    # A safetensors file starts with the length of its JSON header, in eight bytes.
    if first_bytes(path)[8:] == b"{":
        tensors, metadata = read_safetensors(path)
        tensors |= _aliases(tensors, metadata)
        torch_files.check_size(tensors, path.stat().st_size)
        return tensors
    content = torch_files.read(path)
    if not isinstance(content, Mapping):
        raise UserError(f"a {type(content).__name__}, not a state dict")
    return content


def _aliases(tensors: Tensors, metadata: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Returns the tied tensors that a safetensors file has under another name only.

    `safetensors.torch.save_model` writes each tensor once, and {omitted name: written name} into
    the metadata, which may have anything else, too.
    """
    return {
        name: tensors[written]
        for name, written in metadata.items()
        if name not in tensors and written in tensors
    }


_FOREIGN = {
    ".SCB": "8-bit weights of bitsandbytes",
    ".absmax": "4-bit weights of bitsandbytes",
    ".qweight": "4-bit weights of GPTQ or AWQ",
    ".lora_": "the matrices of an adapter of PEFT, which change a base: give the adapter's folder",
}
"""What tensors are whose names have these parts."""


def _is_nested(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in content.values())


def _state_dict(content: Mapping[Any, Any], is_adapter: bool = False) -> Mapping[Any, Any]:
    """Returns the tensors of a checkpoint, which may be nested, by name."""
    while _is_nested(content):
        found = (key for key in STATE_DICT_KEYS if isinstance(content.get(key), Mapping))
        key = next(found, None)
        if key is None:
            raise UserError(f"no state dict under any of the keys {', '.join(STATE_DICT_KEYS)}")
        module = content.get(MODULE_KEY)
        outside = module if isinstance(module, Mapping) else {}
        content = {**content[key], **{f"{MODULE_KEY}.{name}": outside[name] for name in outside}}
    for part, what in _FOREIGN.items():
        name = next((name for name in map(str, content) if part in name), None)
        if name and not (is_adapter and part == ".lora_"):
            original = "" if part == ".lora_" else f", which are rounded: {ORIGINAL}"
            raise UserError(f"tensor {name} is one of {what}{original}")
    return content


def _arrays(content: Mapping[Any, Any], ignores: Callable[[Any], bool]) -> dict[str, np.ndarray]:
    return {name: to_numpy(name, value) for name, value in content.items() if not ignores(name)}


def to_numpy(name: Any, value: Any) -> np.ndarray:
    """Returns a copy of a PyTorch tensor or numpy array, whose name is for messages.

    Raises:
      UserError: its name is not a string; it is neither, or not of dtype float32 or float64.
    """
    if not isinstance(name, str):
        raise UserError(f"{name!r} is not the name of a tensor")
    if not hasattr(value, "dtype"):
        raise UserError(f"{name} is a {type(value).__name__}, not a tensor")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        advice = f" (if it is quantized, {ORIGINAL})" if "int" in dtype or "float8" in dtype else ""
        raise UserError(f"tensor {name} is {dtype}, but must be float32 or float64{advice}")
    try:
        return np.array(value.numpy(force=True) if hasattr(value, "detach") else value)
    except (RuntimeError, TypeError) as error:  # It is sparse or nested, or has no values ("meta").
        raise UserError(f"tensor {name} is not dense: {first_line(error)}") from error
