"""Values that another program saved: their files, its script, and the comparison with ours."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.interop import array_files
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.parity import driver
from flaxformer_mt.parity.families.compare import PUBLISHED_TABLES, family_causes
from flaxformer_mt.parity.families.model_pair import OurModel
from flaxformer_mt.parity.families.published import PublishedModel, Tables
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.families.tokens import (
    Padding,
    Tokens,
    as_tokens,
    check_special_tokens,
    example,
    padding,
    select_rows,
)
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.sides import COMPILER_OPTIONS, Side, precision
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


_UNKNOWN_TABLES = {"float64": 1e4, "float32": 1.0}
"""Factors of the tolerance if the tables of positions were computed in float32: 1e-6 instead of
1e-10, which is the error of float32 angles at the positions of a sentence."""


def compare_saved(
    model: PublishedModel, saved: SavedValues, given: Mapping[str, Any], tables: Tables
) -> Report:
    """Compares our values, in float64, with those that another program saved for a checkpoint.

    `given` are settings that the checkpoint does not determine.
    """
    config = dataclasses.replace(model.configure(given), dtype="float64", param_dtype="float64")
    check_special_tokens(config)
    check_sites(saved.values, config)
    tokens = saved.tokens(config)
    real = padding(tokens, config.pad_id)
    our_model = OurModel(model.family, config, recipe(model.family.name), tables)
    tensors = {name: np.asarray(each, np.float64) for name, each in model.tensors.items()}
    with precision("float64"):
        run = jax.jit(our_model.run, compiler_options=COMPILER_OPTIONS)
        ours = our_model.by_site(*run(tensors, tokens))
    known_tables = (
        tables == "exact"
        or config.position_kind != "sinusoidal"
        or bool(our_model.published_tables(model.tensors))
    )

    select = functools.partial(select_rows, real=real)
    theirs, dtype = Side(saved.values), saved.dtype
    report = driver.compared(
        model.family.name,
        dtype,
        Side({site: value for site, value in ours.items() if site in saved.values}),
        theirs,
        select,
        notes=_notes(real, saved, tables, known_tables),
    )
    factor = 1.0 if known_tables else _UNKNOWN_TABLES[dtype]
    rows = (row._replace(tolerance=row.tolerance * factor) for row in report.rows)
    report = dataclasses.replace(report, rows=tuple(rows))
    if report.passed:
        return report
    wide = Side({site: value.astype(np.float64) for site, value in saved.values.items()})
    tolerance = driver.VALUES[dtype] * factor
    with precision("float64"):
        causes = family_causes(our_model, tensors, tokens, real, ours["logits"], wide, tolerance)
        return driver.explained(report, causes)


def _notes(real: Padding, saved: SavedValues, tables: Tables, known_tables: bool) -> list[str]:
    found = ["Compared with values that another program saved, which test the settings as well."]
    if saved.dtype == "float32":
        found.append("The saved values are float32, ours are computed in float64.")
    if tables == "published" and known_tables:
        found.append(PUBLISHED_TABLES)
    elif tables == "published":
        found.append(
            "The tables of positions are not in the checkpoint and were probably computed in "
            "float32: ours are rounded to it, and in float64 the tolerance is 1e-6."
        )
    if real.source.all():
        found.append("No source is padded: the padding id and masks are not tested.")
    return found
