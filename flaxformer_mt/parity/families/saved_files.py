"""The files of saved values, and the script with which another program writes them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.interop import array_files
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.families.tokens import Tokens, as_tokens, example
from flaxformer_mt.parity.trace.sites import Values, sites

INPUTS = ("source", "target_input", "target_output")


class SavedValues(NamedTuple):
    """What another program computed."""

    inputs: dict[str, np.ndarray]
    """Integers by name, see `INPUTS`."""
    values: Values

    @property
    def dtype(self) -> str:
        """The narrowest dtype of the values, "float32" or "float64"."""
        return min((value.dtype.name for value in self.values.values()), default="float64")

    def tokens(self, config: TransformerConfig) -> Tokens:
        """Returns the batch."""
        return as_tokens([self.inputs[name] for name in INPUTS if name in self.inputs], config)


def read(inputs: Path, outputs: Path) -> SavedValues:
    """Reads integers `source` [B, S], `target_input` [B, T] and maybe `target_output`, and values.

    The latter are `logits` [B, T, V] or values by site, float32 or float64; an .npy file is logits.
    """
    given = _arrays(inputs)
    for name in INPUTS[:2]:
        if name not in given:
            raise UserError(f"{inputs} has no array {name}, only {', '.join(given) or 'nothing'}")
    tokens = {name: given[name] for name in INPUTS if name in given}  # It may be one file for both.
    for name, array in tokens.items():
        if array.dtype.kind not in "iu":
            raise UserError(f"{inputs}: {name} is {array.dtype}, but tokens are integers")
    values = {name: array for name, array in _arrays(outputs).items() if name not in INPUTS}
    if not values:
        raise UserError(f"{outputs} has no array of values, such as logits")
    for name, array in values.items():
        if array.dtype not in (np.float32, np.float64):
            raise UserError(f"{outputs}: {name} is {array.dtype}, but must be float32 or float64")
    return SavedValues(tokens, values)


def check_sites(values: Values, config: TransformerConfig) -> None:
    """Checks that all values are of sites of a model."""
    known = ["logits", *(site.name for site in sites(config))]
    for name in values:
        if name not in known:
            raise UserError(
                f"there is no site {name}: name saved values logits, or {known[1]}, {known[2]} ..."
            )


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with prefixed(f"{path}: "):
        arrays = array_files.read(path)
    return {name or "logits": array for name, array in arrays.items()}


_HUGGING_FACE = (
    "module(input_ids=source, attention_mask=(source != {pad_id}).long(), "
    "decoder_input_ids=target_input).logits"
)


def script(family: str, config: TransformerConfig) -> str:
    """Returns a Python script that saves values of two sentences, one of them padded."""
    tokens = example(
        config,
        rows=2,
        source_length=6,
        target_length=5,
        source_padding=recipe(family).source_padding,
    )
    call = _HUGGING_FACE if family in HUB_FAMILIES else "module(source, target_input)"
    template = Path(__file__).with_name("save_values.txt").read_text(encoding="utf-8")
    return template.format(
        family=family,
        source=tokens.source.tolist(),
        target=tokens.target_input.tolist(),
        call=call.format(pad_id=config.pad_id),
    )
