"""Reads PyTorch files as numpy arrays, without PyTorch and without running code from them.

A file of PyTorch 1.6 and later is a zip archive of a pickle, `data.pkl`, and one member for each
storage of tensors; the archive has a CRC-32 of each, which is checked. An older file has the same
in a sequence of pickles followed by the storages, without any checksum.

A pickle is a program that builds an object. Only the instructions that `torch.save` writes are
executed, and only functions of this module are called, with arguments whose size they check: a
tensor lies inside its storage, and storages are as large as the file says and is.

Source: torch/serialization.py and torch/_weights_only_unpickler.py of PyTorch 2.
"""

import argparse
import io
import math
import mmap
import os
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from numpy.lib.stride_tricks import as_strided

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import open_regular

_MAX_OPERATIONS = 1_000_000
"""Limit of the instructions of a pickle; a training checkpoint of 1000 tensors has 200,000."""
_MAX_ITEMS = 1_000_000
"""Limit of the items in nested containers, those that are shared counted where they occur."""
_MAX_DEPTH = 50
_MAX_AXES = 32
_MAX_SHARING = 64
"""Limit of the bytes of all tensors, relative to those of the file: tied tensors share storages."""
_MAX_INTEGER_BITS = 128

_ARCHIVE_START, _PICKLE_START = b"PK\x03\x04", b"\x80\x02"
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""The first two pickles of an old file."""

_STORAGES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "LongStorage": "<i8",
    "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "<i1", "ByteStorage": "<u1",
    "BoolStorage": "?", "ComplexFloatStorage": "<c8", "ComplexDoubleStorage": "<c16",
    "BFloat16Storage": jnp.bfloat16,
}  # fmt: skip
_DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128",
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1"}
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# What damage of a pickle or of an archive, or an argument of the wrong type, can raise.
_DAMAGE = (
    ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError, OSError,
    RecursionError, RuntimeError, TypeError, ValueError, struct.error,
)  # fmt: skip

_Storage = Callable[[np.dtype, str, int], np.ndarray | None]
"""Returns a storage, given its dtype, its name and its number of elements."""


def read(path: Path) -> Any:
    """Reads the object of a file that `torch.save` wrote.

    Returns:
      The object, in which tensors and parameters are numpy arrays, possibly read-only views of
      shared storages, storage types are dtypes, and devices and dtypes of PyTorch are strings.

    Raises:
      UserError: the file cannot be read, is damaged or of another kind, has more than tensors,
        containers and numbers, or describes more data than it has.
    """
    with open_regular(path) as file, warnings.catch_warnings():
        # Of strings in damaged files, which look like escape sequences.
        warnings.simplefilter("ignore", DeprecationWarning)
        size = os.fstat(file.fileno()).st_size
        try:
            start = file.read(4)
            if start == _ARCHIVE_START:
                content = _read_archive(file, size)
            elif start[:2] == _PICKLE_START:
                content = _read_old(file)
            else:
                raise UserError("damaged, or not a checkpoint")
            check_size(content, size)
        except zipfile.BadZipFile as error:
            raise UserError(f"damaged: {error}") from error
        except _DAMAGE as error:
            raise UserError("damaged, or not a checkpoint") from error
    return content


def _read_archive(file: BinaryIO, size: int) -> Any:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if "data.pkl" not in members:
            raise UserError("a zip archive, but not a checkpoint: it has no data.pkl")
        # Several entries may describe the same bytes.
        if sum(member.file_size for member in members.values()) > size:
            raise UserError("damaged: its members are larger than the file")

        def content(name: str) -> bytes:
            if name not in members:
                raise UserError(f"damaged: its member {name} is missing")
            if members[name].compress_type != zipfile.ZIP_STORED:
                raise UserError(f"damaged: its member {name} is compressed")
            return archive.read(members[name])

        order = content("byteorder") if "byteorder" in members else b"little"
        if order != b"little":
            raise UserError("its numbers are big-endian: save it on a little-endian machine")
        storages: dict[str, np.ndarray] = {}

        def storage(dtype: np.dtype, name: str, length: int) -> np.ndarray:
            if name not in storages:
                storages[name] = np.frombuffer(content(f"data/{name}"), np.uint8)
            return _typed(storages[name], dtype, name, length)

        return _Unpickler(storage).run(io.BytesIO(content("data.pkl")))


def _read_old(file: BinaryIO) -> Any:
    # Unlike a file, a map never allocates more for a read than there is.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if _Unpickler().run(content) != _MAGIC or _Unpickler().run(content) != _PROTOCOL:
            raise UserError("damaged, or not a checkpoint")
        if _Unpickler().run(content)["little_endian"] is not True:
            raise UserError("its numbers are big-endian: save it on a little-endian machine")
        # The types of the storages are in the pickle, which precedes them.
        dtypes: dict[str, np.dtype] = {}

        def note(dtype: np.dtype, name: str, length: int) -> None:
            dtypes[name] = dtype

        start = content.tell()
        _Unpickler(note).run(content)
        storages: dict[str, np.ndarray] = {}
        for name in _Unpickler().run(content):
            dtype = dtypes[name]
            (length,) = struct.unpack("<q", content.read(8))
            numbers = content.read(max(length, 0) * dtype.itemsize)
            storages[name] = np.frombuffer(numbers, np.uint8)
            _typed(storages[name], dtype, name, length)
        content.seek(start)
        return _Unpickler(
            lambda dtype, name, length: _typed(storages[name], dtype, name, length)
        ).run(content)


def _typed(storage: np.ndarray, dtype: np.dtype, name: str, length: int) -> np.ndarray:
    """Returns the bytes of a storage as numbers."""
    if len(storage) != length * dtype.itemsize:
        raise UserError(
            f"damaged: storage {name} has {len(storage)} bytes, not {length} numbers of "
            f"{dtype.itemsize} bytes"
        )
    return storage.view(dtype)


class _Unpickler:
    """Executes one pickle.

    Args:
      storage: returns the storages of tensors; by default there are none. Where it returns None,
        so do the functions that make tensors.
    """

    def __init__(self, storage: _Storage | None = None) -> None:
        self._storage = storage
        self._globals: dict[str, Any] = {
            "collections.OrderedDict": _dict,
            "collections.Counter": _dict,
            "argparse.Namespace": _namespace,
            "torch.Size": tuple,
            "torch.device": _device,
            "torch.serialization._get_layout": str,
            "torch.nn.parameter.Parameter": "Parameter",
            "torch.Tensor": "Tensor",
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch._tensor._rebuild_from_type_v2": _of_type,
            "_codecs.encode": _encode,
            "builtins.set": _set,
            "builtins.complex": complex,
            "builtins.bytearray": _encode,
            **{f"torch.{name}": np.dtype(kind) for name, kind in _STORAGES.items()},
            **{f"torch.{name}": name for name in _DTYPES},
        }

    def run(self, file: Any) -> Any:
        """Returns the object of the pickle at the file's position, which is left behind it."""
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: dict[int, Any] = {}
        value: Any
        for number, (operation, value, _) in enumerate(pickletools.genops(file)):
            if number >= _MAX_OPERATIONS:
                raise UserError("it has too many values that are not tensors")
            name = operation.name
            if name in _VALUES:
                if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
                    raise UserError("damaged: it has an integer of too many digits")
                stack.append(value)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "MARK":
                marks.append(stack)
                stack = []
            elif name == "TUPLE":
                stack, items = marks.pop(), stack
                stack.append(tuple(items))
            elif name in _TUPLES:
                start = len(stack) - _TUPLES[name]
                if start < 0:
                    raise IndexError
                stack[start:] = [tuple(stack[start:])]
            elif name == "GLOBAL":
                stack.append(self._global(value))
            elif name == "BINPERSID":
                stack.append(self._load_storage(stack.pop()))
            elif name in ("REDUCE", "NEWOBJ"):
                arguments = stack.pop()
                stack[-1] = _call(stack[-1], arguments)
            elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}[name]())
            elif name == "SETITEMS":
                stack, items = marks.pop(), stack
                _set_items(stack[-1], items)
            elif name == "SETITEM":
                items = [stack.pop(), stack.pop()]
                _set_items(stack[-1], items[::-1])
            elif name == "APPENDS":
                stack, items = marks.pop(), stack
                list.extend(stack[-1], items)
            elif name == "APPEND":
                items = [stack.pop()]
                list.extend(stack[-1], items)
            elif name == "BUILD":
                _set_state(stack[-2], stack.pop())
            elif name == "STOP":
                return stack.pop()
            elif name != "PROTO":
                raise UserError(
                    "damaged, or it contains more than tensors, which could run code when loaded"
                )
        raise EOFError

    def _global(self, value: str) -> Any:
        module, _, name = value.partition(" ")
        path = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if path not in self._globals and path.startswith("torch."):
            raise UserError(f"it contains a {path}: only dense tensors can be read")
        if path not in self._globals:
            raise UserError(
                f"it contains more than tensors: loading would run {path}, so it was stopped; save "
                "only the model's state_dict()"
            )
        return self._globals[path]

    def _load_storage(self, value: Any) -> np.ndarray | None:
        kind, dtype, name, _, length, *view = value
        if kind != "storage" or any(part is not None for part in view) or self._storage is None:
            raise UserError("damaged, or it contains more than tensors")
        if not (isinstance(dtype, np.dtype) and isinstance(name, str) and type(length) is int):
            raise TypeError
        return self._storage(dtype, name, length)

    def _tensor(
        self, storage: np.ndarray | None, offset: int, shape: Any, strides: Any, *_: Any
    ) -> np.ndarray | None:
        if storage is None:
            return None
        numbers = (offset, *shape, *strides)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError
        size = math.prod(shape)
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if size)
        if len(shape) > _MAX_AXES or size > len(storage) or last + bool(size) > len(storage):
            raise UserError(f"damaged: a tensor of shape {shape} does not fit its storage")
        if not size:
            return np.empty(shape, storage.dtype)
        steps = [stride * storage.itemsize for stride in strides]
        return as_strided(storage[offset:], shape, steps, writeable=False)


def _call(function: Any, arguments: Any) -> Any:
    # All callables on the stack are from `_Unpickler._globals`.
    if not callable(function) or not isinstance(arguments, tuple):
        raise TypeError
    return function(*arguments)


def _dict(items: Iterable[Any] = ()) -> dict[Any, Any]:
    pairs = list(items.items()) if isinstance(items, dict) else [(key, each) for key, each in items]
    result: dict[Any, Any] = {}
    _set_items(result, [each for pair in pairs for each in pair])
    return result


def _set(items: list[Any]) -> set[Any]:
    _require_keys(items)
    return set(items)


def _namespace() -> argparse.Namespace:
    return argparse.Namespace()


def _device(kind: str, index: int = 0) -> str:
    return f"{kind}:{index}"


def _encode(text: str | bytes = b"", encoding: str = "latin1") -> bytes:
    if isinstance(text, bytes):
        return text
    if encoding not in ("latin1", "latin-1"):
        raise ValueError
    return text.encode("latin1")


def _first(value: Any, *_: Any) -> Any:
    """Returns the tensor of a parameter."""
    return value


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Returns the tensor of an instance of a subclass, or of a tensor with attributes."""
    return _call(function, arguments)


def _set_items(target: Any, items: list[Any]) -> None:
    if not isinstance(target, dict):
        raise TypeError
    _require_keys(items[::2])
    target.update(zip(items[::2], items[1::2], strict=True))


def _set_state(target: Any, state: Any) -> None:
    """Sets the attributes of an object; those of dicts and tensors are ignored."""
    if isinstance(target, argparse.Namespace):
        vars(target).update({str(name): value for name, value in state.items()})
    elif not isinstance(target, dict | np.ndarray | None):
        raise TypeError


def _require_keys(values: Iterable[Any]) -> None:
    """Checks that values can be hashed quickly: a tuple of tuples may have 2**depth items."""
    for value in values:
        for part in value if isinstance(value, tuple) else (value,):
            if not isinstance(part, str | int | float | complex | bytes | None):
                raise TypeError


def check_size(content: Any, file_size: int) -> None:
    """Checks that an object is no deeper and larger than checkpoints are.

    Containers and tensors that are shared, or contain themselves, may be much larger than a file.

    Args:
      content: nested containers of tensors, as numpy arrays, and other values.
      file_size: the number of bytes of the file that it was read from.

    Raises:
      UserError: it is.
    """
    max_bytes = file_size * _MAX_SHARING
    items, level = _MAX_ITEMS, [content]
    for _ in range(_MAX_DEPTH):
        following: list[Any] = []
        for value in level:
            if isinstance(value, np.ndarray):
                max_bytes -= value.nbytes
                continue
            if isinstance(value, argparse.Namespace):
                value = vars(value)
            if isinstance(value, dict):
                value = value.values()
            elif not isinstance(value, list | tuple):
                continue
            items -= len(value)
            if items < 0:
                raise UserError("it has too many values that are not tensors")
            following += value
        if max_bytes < 0:
            raise UserError("damaged: its tensors are far larger than the file")
        level = following
        if not level:
            return
    raise UserError("damaged: its containers are nested too deeply")
