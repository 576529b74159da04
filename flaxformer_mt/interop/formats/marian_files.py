"""Reads Marian's model files (.npz and its binary format, quantized or not), and writes .npz.

A binary file (format version 1) consists of, in little-endian order: the version, uint64; the
number of tensors, uint64; for each tensor four uint64: length of its name, type, number of axes,
bytes of data; all names, each terminated by a zero byte; all shapes, int32; the number of padding
bytes, and the padding; the data of all tensors. Source: Marian, src/common/binary.cpp and
src/common/types.h.

The model's options are stored as a tensor of bytes that contain YAML.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import open_regular
from flaxformer_mt.interop import array_files
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.runs.parameter_file import first_bytes

OPTIONS = "special:model.yml"
VERSION = 1
MAX_YAML_BYTES = 2**15
"""Limit of the size of YAML, which takes long to parse; the options of a model have 10 KB."""

_MAX_YAML_DEPTH = 32
_MAX_TENSORS = 100_000
# PyYAML has no error of its own for some malformed numbers and dates.
_YAML_ERRORS = (
    yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip

_FLOATS = {0x402: "<f2", 0x404: "<f4", 0x408: "<f8"}
# Marian and its fork for browsers use different type numbers for quantized matrices.
_QUANTIZED = {0x10001: "<i1", 0x4101: "<i1", 0x10002: "<i2", 0x4102: "<i2"}
# Multipliers of the inputs of quantized layers, which are not needed in floating point.
_INPUT_SCALE = "_QuantMultA"
_EMBEDDING = "Wemb"


class _Item(NamedTuple):
    name: str
    type: int
    shape: tuple[int, ...]
    data: bytes


def read(path: Path) -> PublishedCheckpoint:
    """Reads a model: its tensors in float32, by Marian's names, and its options.

    Quantized matrices are dequantized. UserError if the file is damaged or of another kind, has no
    options, or has a matrix in a processor-specific layout.
    """
    start = first_bytes(path)
    if start.startswith(b"PK"):
        tensors, options = _read_tensors(path)
    elif start[:8] == struct.pack("<Q", VERSION):
        tensors, options = _read_binary(path)
    else:
        raise UserError("not a Marian model: neither .npz nor binary")
    if options is None:
        raise UserError(f"it has no options ({OPTIONS}): not a model that Marian wrote")
    return PublishedCheckpoint(tensors, _parse(options))


def write_npz(path: Path, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> None:
    """Writes a model that Marian loads."""
    text = yaml.safe_dump(dict(options)).encode() + b"\0"
    arrays = dict(tensors) | {OPTIONS: np.frombuffer(text, np.int8)}
    with atomic.new_file(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def parse_yaml(content: bytes) -> Any:
    """Parses at most `MAX_YAML_BYTES` of YAML.

    UserError if it is damaged, nested deeply, or has aliases, which multiply its size.
    """
    if len(content) > MAX_YAML_BYTES:
        raise UserError(f"more than {MAX_YAML_BYTES:,} bytes of YAML")
    try:
        return yaml.load(content.decode(), _Loader)
    except _YAML_ERRORS as error:
        raise UserError("not YAML, or too deep, or with aliases") from error


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self._depth == _MAX_YAML_DEPTH or self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _parse(options: bytes) -> dict[str, Any]:
    with prefixed(f"damaged: its options ({OPTIONS}) cannot be read: "):
        parsed = parse_yaml(options.rstrip(b"\0"))
    if not isinstance(parsed, dict):
        raise UserError(f"damaged: its options ({OPTIONS}) are not a mapping")
    return parsed


def _read_tensors(path: Path) -> tuple[dict[str, np.ndarray], bytes | None]:
    arrays = array_files.read(path, "a Marian model")
    options = arrays.pop(OPTIONS, None)
    for name, array in arrays.items():
        if not np.issubdtype(array.dtype, np.floating):
            raise UserError(f"tensor {name} is {array.dtype}, but should be a float")
    tensors = {name: array.astype(np.float32) for name, array in arrays.items()}
    return tensors, None if options is None else options.tobytes()


def _read_binary(path: Path) -> tuple[dict[str, np.ndarray], bytes | None]:
    try:
        # A map allocates nothing for sizes that the file does not have.
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            items = _items(content)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise UserError("damaged: it is truncated, or its header is invalid") from error
    options = next((item.data for item in items if item.name == OPTIONS), None)
    tensors: dict[str, np.ndarray] = {}
    for item in items:
        if item.name in tensors:
            raise UserError(f"damaged: it has two tensors {item.name}")
        if item.name != OPTIONS and not item.name.endswith(_INPUT_SCALE):
            tensors[item.name] = _values(item)
    return tensors, options


def _items(content: mmap.mmap) -> list[_Item]:
    offset = 8

    def take(form: str) -> tuple[Any, ...]:
        nonlocal offset
        values = struct.unpack_from(f"<{form}", content, offset)
        offset += struct.calcsize(f"<{form}")
        return values

    (count,) = take("Q")
    if count > _MAX_TENSORS:
        raise UserError(f"damaged: its header has {count} tensors")
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
    """Returns a tensor's values in float32. Its data may end with padding."""
    is_quantized = item.type in _QUANTIZED
    if not is_quantized and item.type not in _FLOATS:
        raise UserError(
            f"tensor {item.name} has the type {item.type:#x}, a processor-specific layout: use the "
            ".npz, or convert it with marian-conv and --gemm-type intgemm8"
        )
    dtype = np.dtype(_QUANTIZED[item.type] if is_quantized else _FLOATS[item.type])
    count = math.prod(item.shape)
    end = count * dtype.itemsize
    if min(item.shape, default=1) < 0 or len(item.data) < end + 4 * is_quantized:
        raise UserError(f"damaged: tensor {item.name} has fewer values than its shape")
    numbers = np.frombuffer(item.data, dtype, count).astype(np.float32)
    if not is_quantized:
        return numbers.reshape(item.shape)
    # The quantization multiplier follows the values.
    (scale,) = struct.unpack_from("<f", item.data, end)
    if not (math.isfinite(scale) and scale):
        raise UserError(f"damaged: tensor {item.name} was multiplied by {scale}")
    numbers = numbers / np.float32(scale)
    if item.name.endswith(_EMBEDDING):
        return numbers.reshape(item.shape)
    # All other matrices are stored transposed, unlike their shape.
    return np.ascontiguousarray(numbers.reshape(item.shape[::-1]).T)
