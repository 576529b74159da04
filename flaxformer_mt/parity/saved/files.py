"""The files of saved values: the tokens of a batch, and what another program computed for them."""

import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import open_regular
from flaxformer_mt.parity.tokens import Tokens, as_tokens
from flaxformer_mt.parity.trace import Values, sites

INPUTS = ("source", "target_input", "target_output")
"""Arrays of the file of inputs; the last is optional."""


class SavedValues(NamedTuple):
    """What another program computed."""

    inputs: dict[str, np.ndarray]
    """Integers by name, see `INPUTS`."""
    values: Values
    """Arrays by site, "logits" among them or not."""

    @property
    def dtype(self) -> str:
        """The narrowest dtype of the values, "float32" or "float64"."""
        return min((value.dtype.name for value in self.values.values()), default="float64")

    def tokens(self, config: TransformerConfig) -> Tokens:
        """Returns the batch.

        Raises:
          UserError: the arrays have other shapes, or a token is not in the vocabulary.
        """
        return as_tokens([self.inputs[name] for name in INPUTS if name in self.inputs], config)


def read(inputs: Path, outputs: Path) -> SavedValues:
    """Reads both files.

    Args:
      inputs: an .npz file with integers `source` [B, S] and `target_input` [B, T], and optionally
        `target_output` [B, T].
      outputs: an .npz file with `logits` [B, T, V] or values by site, in float32 or float64; or an
        .npy file with logits only.

    Raises:
      UserError: a file is missing or damaged, an array is missing or of another type.
    """
    tokens = _arrays(inputs)
    for name in INPUTS[:2]:
        if name not in tokens:
            raise UserError(f"{inputs} has no array {name}, only {', '.join(tokens) or 'nothing'}")
    for name, array in tokens.items():
        if array.dtype.kind not in "iu":
            raise UserError(f"{inputs}: {name} is {array.dtype}, but tokens are integers")
    values = _arrays(outputs)
    if not values:
        raise UserError(f"{outputs} has no arrays")
    for name, array in values.items():
        if array.dtype not in (np.float32, np.float64):
            raise UserError(f"{outputs}: {name} is {array.dtype}, but must be float32 or float64")
    return SavedValues(tokens, values)


def check_sites(values: Values, config: TransformerConfig) -> None:
    """Checks that all values are of sites of a model.

    Raises:
      UserError: one is not.
    """
    known = ["logits", *(site.name for site in sites(config))]
    for name in values:
        if name not in known:
            raise UserError(
                f"there is no site {name}: name saved values logits, or {known[1]}, {known[2]} ..."
            )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with open_regular(path) as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return {"logits": content}
            return {name: content[name] for name in content.files}
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not an .npz file of arrays: {error}") from error
