"""Reads .npy and .npz files that others wrote.

`numpy.load` allocates what a header claims, and unpacks whatever an archive holds.
"""

import io
import math
import os
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import max_content, open_regular

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What NumPy writes; of others, `zipfile` unpacks more than a member claims to have."""


def read(path: Path, kind: str = "an .npz file of arrays") -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file by name, or the one of an .npy file, whose name is "".

    The arrays cannot be written to. `kind` is what the file should be, for messages.

    Raises:
      UserError: without the file's name: it cannot be read, is damaged, or claims to have more than
        a file of its size may have.
    """
    try:
        with open_regular(path) as file:
            if file.peek(6).startswith(npy.MAGIC_PREFIX):
                return {"": _array(file.read())}
            limit = max_content(os.fstat(file.fileno()).st_size)
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if sum(member.file_size for member in members) > limit:
                    raise UserError("damaged: its arrays are far larger than the file")
                if any(member.compress_type not in _COMPRESSIONS for member in members):
                    raise UserError("damaged: NumPy does not compress arrays so")
                return {
                    member.filename.removesuffix(".npy"): _array(archive.read(member))
                    for member in members
                }
    except UserError:
        raise
    except Exception as error:  # Damage can raise anything, also a `tokenize.TokenError`.
        reason = f": {error}" if isinstance(error, zipfile.BadZipFile) else ""
        raise UserError(f"damaged, or not {kind}{reason}") from error


def _array(content: bytes) -> np.ndarray:
    stream = io.BytesIO(content)
    read_header = _HEADERS[npy.read_magic(stream)]
    shape, is_fortran, dtype = read_header(stream)
    data = memoryview(content)[stream.tell() :]
    if dtype.hasobject:
        raise UserError("it has an array of Python objects: only numbers can be read")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")
