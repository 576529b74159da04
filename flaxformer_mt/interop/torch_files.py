"""Reads PyTorch files with `torch.load`, without running code from them.

A file of PyTorch 1.6 and later is a zip archive of a pickle, `data.pkl`, and one member for each
storage of tensors. `torch.load` does not check the CRC-32 of the members: it is checked here. An
older file has the same in a sequence of pickles followed by the storages, without any checksum.

`torch.load(weights_only=True)` runs no code of the file, but a pickle can still ask for any amount
of memory or time. What it calls and how large its values are is therefore checked before.
"""

import argparse
import mmap
import os
import pickletools
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from flaxformer_mt.errors import UserError, requiring
from flaxformer_mt.input_files import max_content, open_regular

_MAX_OPERATIONS = 1_000_000
"""Limit of the instructions of a pickle; a training checkpoint of 1000 tensors has 200,000."""
_MAX_ITEMS = 1_000_000
"""Limit of the items in nested containers, those that are shared counted where they occur."""
_MAX_DEPTH = 50
_MAX_WORK = 16
"""Limit of the items that instructions read, for each byte of a pickle.

Each of them may copy, hash or print a value that the pickle has once.
"""
_MAX_INTEGER_BITS = 128
_MAX_AXES = 64

_ARCHIVE_START, _PICKLE_START = b"PK\x03\x04", b"\x80\x02"
_OLD_PICKLES = 5
"""An old file begins with a number, a version, facts about the machine, the content, and names."""
_FACTS = 2

_DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128",
)  # fmt: skip
_STORAGES = (
    "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool",
    "ComplexFloat", "ComplexDouble",
)  # fmt: skip
_ALLOWED = {
    "collections.OrderedDict", "collections.Counter", "argparse.Namespace", "torch.Size",
    "torch.device", "torch.serialization._get_layout", "torch.nn.parameter.Parameter",
    "torch.Tensor", "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2", "_codecs.encode", "builtins.set", "builtins.complex",
    *(f"torch.{name}Storage" for name in _STORAGES), *(f"torch.{name}" for name in _DTYPES),
}  # fmt: skip
"""What a pickle may name: a part of what PyTorch allows."""


def read(path: Path) -> Any:
    """Reads the object of a file that `torch.save` wrote.

    Raises:
      UserError: the file cannot be read, is damaged or of another kind, has more than tensors,
        containers and numbers, or describes more data than it has; or PyTorch is not installed.
    """
    with open_regular(path) as file, warnings.catch_warnings():
        # Of strings in damaged files, and of other versions of PyTorch.
        warnings.simplefilter("ignore")
        size = os.fstat(file.fileno()).st_size
        start = file.read(4)
        is_archive = start == _ARCHIVE_START
        try:
            if is_archive:
                _check_archive(file, size)
            elif start[:2] == _PICKLE_START:
                _check_old(file)
            else:
                raise UserError("damaged, or not a checkpoint")
            file.seek(0)
            torch = import_torch("reading")
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(
                    path if is_archive else file,
                    map_location="cpu",
                    weights_only=True,
                    mmap=is_archive,
                )
            check_size(content, size)
            return content
        except UserError:
            raise
        except Exception as error:  # Damage can raise anything.
            raise UserError("damaged, or not a checkpoint") from error


def import_torch(purpose: str) -> ModuleType:
    """Returns PyTorch, which is optional.

    Raises:
      UserError: it is not installed.
    """
    extra = "'flaxformer_mt[parity]', or use .safetensors"
    with requiring(f"{purpose} a PyTorch file", extra, "PyTorch"):
        import torch
    return torch


def _check_archive(file: BinaryIO, size: int) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if "data.pkl" not in members:
            raise UserError("a zip archive, but not a checkpoint: it has no data.pkl")
        # Several entries may describe the same bytes.
        if sum(member.file_size for member in archive.infolist()) > size:
            raise UserError("damaged: its members are larger than the file")
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"damaged: its member {member.filename} is compressed")
        if damaged := archive.testzip():
            raise UserError(f"damaged: Bad CRC-32 for file {damaged!r}")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise UserError("its numbers are big-endian: save it on a little-endian machine")
        _check_pickle(archive.read(members["data.pkl"]))


def _check_old(file: BinaryIO) -> None:
    # Unlike a file, a map never allocates more for a read than there is.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for number in range(_OLD_PICKLES):
            names = _check_pickle(content)
            if number == _FACTS and "NEWTRUE" not in names:
                raise UserError("its numbers are big-endian: save it on a little-endian machine")


_GROWING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}
_CHARACTERS = 64
"""Characters of a text that take as much as an item."""


def _check_pickle(content: Any) -> set[str]:
    """Checks the instructions of a pickle, and returns their names."""
    found = set()
    # The stack and the memo have the number of items in each value, in a list because containers
    # grow. What is shared counts wherever it occurs: a tuple is hashed and printed so.
    stack: list[list[int]] = []
    marks: list[int] = []
    memo: dict[int, list[int]] = {}
    work = 0
    value: Any
    for number, (operation, value, end) in enumerate(pickletools.genops(content)):
        name = operation.name
        found.add(name)
        if number >= _MAX_OPERATIONS:
            raise UserError("it has too many values that are not tensors")
        if name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
            continue
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
            continue
        if name == "MARK":
            marks.append(len(stack))
            continue
        if name == "GLOBAL":
            _check_global(value)
        if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
            raise UserError("damaged: it has an integer of too many digits")
        start = len(stack) - len(operation.stack_before)
        if pickletools.markobject in operation.stack_before:
            start = marks.pop() - len(operation.stack_before) + 2
        if start < 0:
            raise UserError("damaged, or not a checkpoint")
        size = 1 + sum(items for (items,) in stack[start:])
        work += size
        if work > _MAX_WORK * (end or 0) + _MAX_ITEMS:
            raise UserError("damaged: it has containers of too many items")
        if name in _GROWING:
            stack[start][0] = size
            del stack[start + 1 :]
            continue
        if isinstance(value, str | bytes):
            size += len(value) // _CHARACTERS
        stack[start:] = [[size] for _ in operation.stack_after]
    return found


def _check_global(value: str) -> None:
    module, _, name = value.partition(" ")
    path = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if path in _ALLOWED:
        return
    if path.startswith("torch."):
        raise UserError(f"it contains a {path}: only dense tensors can be read")
    if path.startswith(("onmt.", "torchtext.")):
        raise UserError(
            f"it contains vocabularies of OpenNMT-py 2 ({path}), which would run code: convert it "
            "by tools/convertv2_v3.py of OpenNMT-py, or save only the model's state_dict()"
        )
    raise UserError(
        f"it contains more than tensors: loading would run {path}, so it was stopped; save only "
        "the model's state_dict()"
    )


def check_size(content: Any, file_size: int) -> None:
    """Checks that an object is no deeper and larger than checkpoints of `file_size` bytes are.

    Containers and tensors that are shared, or contain themselves, may be much larger than a file.

    Raises:
      UserError: it is.
    """
    max_bytes = max_content(file_size)
    items, level = _MAX_ITEMS, [content]
    for _ in range(_MAX_DEPTH):
        following: list[Any] = []
        for value in level:
            if getattr(value, "ndim", 0) > _MAX_AXES:
                raise UserError("damaged: it has a tensor of too many axes")
            max_bytes -= getattr(value, "nbytes", 0)
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
