"""Reads the model files of Marian itself: .npz, and its own binary format, quantised or not.

A binary file (format version 1) is, in little-endian order: the version, uint64; the number of
tensors, uint64; for each tensor four uint64: length of its name, type, number of axes, bytes of
data; all names, each with a zero byte at its end; all shapes, int32; the number of zero bytes that
follow; the data of all tensors. Source: Marian, src/common/binary.cpp and src/common/types.h.

A file's options are one of its tensors, whose bytes are YAML.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.parameter_file import first_bytes

OPTIONS = "special:model.yml"
VERSION = 1

_FLOATS = {0x402: "<f2", 0x404: "<f4", 0x408: "<f8"}
# Marian, and the fork of it that runs in browsers, have different numbers for quantised matrices.
_QUANTISED = {0x10001: "<i1", 0x4101: "<i1", 0x10002: "<i2", 0x4102: "<i2"}
# By which quantised models multiply a layer's inputs; computing in floats needs none.
_INPUT_SCALE = "_QuantMultA"
_EMBEDDING = "Wemb"


class _Item(NamedTuple):
    """A tensor as it stands in a binary file."""

    name: str
    type: int
    shape: tuple[int, ...]
    data: bytes


def read(path: Path) -> PublishedCheckpoint:
    """Reads a model: its tensors in float32, under Marian's names, and its options.

    Quantised matrices become what their numbers stand for.

    Raises:
      UserError: there is no such file; it is damaged or of another kind, has no options, or has a
        matrix in the layout of one kind of processor.
    """
    start = first_bytes(path)
    if start.startswith(b"PK"):
        tensors, options = _read_npz(path)
    elif start[:8] == struct.pack("<Q", VERSION):
        tensors, options = _read_binary(path.read_bytes())
    else:
        raise UserError("no Marian model: neither .npz nor binary")
    if options is None:
        raise UserError(f"it has no options ({OPTIONS}): no Marian model, or one for another tool")
    return PublishedCheckpoint(tensors, _parse(options))


def write_npz(path: Path, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> None:
    """Writes a model that Marian loads.

    Raises:
      UserError: the file cannot be written.
    """
    text = yaml.safe_dump(dict(options)).encode() + b"\0"
    arrays = dict(tensors) | {OPTIONS: np.frombuffer(text, np.int8)}
    with atomic.new_file(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _parse(options: bytes) -> dict[str, Any]:
    try:
        parsed = yaml.safe_load(options.rstrip(b"\0").decode())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"damaged: its options ({OPTIONS}) cannot be read") from error
    if not isinstance(parsed, dict):
        raise UserError(f"damaged: its options ({OPTIONS}) are no list of names and values")
    return parsed


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray], bytes | None]:
    try:
        # Of a damaged file that it opened itself, numpy would not close it.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # Whatever the parser trips over, the file is unusable.
        raise UserError("damaged, or no Marian model") from error
    options = arrays.pop(OPTIONS, None)
    for name, array in arrays.items():
        if not np.issubdtype(array.dtype, np.floating):
            raise UserError(f"tensor {name} is {array.dtype}, but should be a float")
    tensors = {name: array.astype(np.float32) for name, array in arrays.items()}
    return tensors, None if options is None else options.tobytes()


def _read_binary(content: bytes) -> tuple[dict[str, np.ndarray], bytes | None]:
    try:
        items = _items(content)
    except (struct.error, UnicodeDecodeError) as error:
        raise UserError("damaged: it ends too early, or its beginning is not Marian's") from error
    options = next((item.data for item in items if item.name == OPTIONS), None)
    tensors = {
        item.name: _values(item)
        for item in items
        if item.name != OPTIONS and not item.name.endswith(_INPUT_SCALE)
    }
    return tensors, options


def _items(content: bytes) -> list[_Item]:
    """All tensors; `struct.error` where there are fewer bytes than the header says."""
    place = 8

    def take(form: str) -> tuple[Any, ...]:
        nonlocal place
        values = struct.unpack_from(f"<{form}", content, place)
        place += struct.calcsize(f"<{form}")
        return values

    (count,) = take("Q")
    headers = [take("4Q") for _ in range(count)]
    names = [take(f"{length}s")[0][:-1].decode() for length, *_ in headers]
    shapes = [take(f"{axes}i") for _, _, axes, _ in headers]
    (padding,) = take("Q")
    take(f"{padding}x")
    return [
        _Item(name, type_, shape, take(f"{size}s")[0])
        for name, (_, type_, _, size), shape in zip(names, headers, shapes, strict=True)
    ]


def _values(item: _Item) -> np.ndarray:
    """A tensor's numbers, float32; behind them there may be padding."""
    is_quantised = item.type in _QUANTISED
    if not is_quantised and item.type not in _FLOATS:
        raise UserError(
            f"tensor {item.name} has the type {item.type:#x}, which is laid out for one kind of "
            "processor: take the .npz, or convert it with marian-conv and --gemm-type intgemm8"
        )
    dtype = np.dtype(_QUANTISED[item.type] if is_quantised else _FLOATS[item.type])
    count = math.prod(item.shape)
    end = count * dtype.itemsize
    if min(item.shape, default=1) < 0 or len(item.data) < end + 4 * is_quantised:
        raise UserError(f"damaged: tensor {item.name} has fewer numbers than its shape says")
    numbers = np.frombuffer(item.data, dtype, count).astype(np.float32)
    if not is_quantised:
        return numbers.reshape(item.shape)
    # Behind them is the number that all others were multiplied by.
    (scale,) = struct.unpack_from("<f", item.data, end)
    if not (math.isfinite(scale) and scale):
        raise UserError(f"damaged: tensor {item.name} was multiplied by {scale}")
    numbers = numbers / np.float32(scale)
    if item.name.endswith(_EMBEDDING):
        return numbers.reshape(item.shape)
    # All other matrices are stored transposed, in spite of their shape.
    return np.ascontiguousarray(numbers.reshape(item.shape[::-1]).T)
