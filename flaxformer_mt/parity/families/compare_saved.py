"""Compares our model with values that another program saved for the same weights and tokens."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxformer_mt.parity import driver
from flaxformer_mt.parity.families.compare import PUBLISHED_TABLES, family_causes
from flaxformer_mt.parity.families.model_pair import OurModel
from flaxformer_mt.parity.families.published import PublishedModel, Tables
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.families.saved_files import SavedValues, check_sites
from flaxformer_mt.parity.families.tokens import Padding, check_special_tokens, padding, select_rows
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.rows import VALUES
from flaxformer_mt.parity.sides import COMPILER_OPTIONS, Side, precision

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
    tolerance = VALUES[dtype] * factor
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
