"""Compares our model with values that another program saved for the same weights and tokens."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from flaxformer_mt import interop
from flaxformer_mt.parity import driver
from flaxformer_mt.parity.compare_family import PUBLISHED_TABLES, family_causes
from flaxformer_mt.parity.diagnosis.inputs import select_rows
from flaxformer_mt.parity.model_pair import OurModel
from flaxformer_mt.parity.published import PublishedModel, Tables
from flaxformer_mt.parity.recipes import recipe
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.saved.files import SavedValues, check_sites
from flaxformer_mt.parity.saved.search import Search
from flaxformer_mt.parity.sides import COMPILER_OPTIONS, Side, precision
from flaxformer_mt.parity.tokens import Padding, Tokens, check_special_tokens, padding
from flaxformer_mt.parity.trace import Values

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
    ours, params = _run_ours(our_model, model, tokens)
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
    if not known_tables:
        factor = _UNKNOWN_TABLES[dtype]
        rows = (row._replace(tolerance=row.tolerance * factor) for row in report.rows)
        report = dataclasses.replace(report, rows=tuple(rows))
    if report.passed:
        return report
    settings = Search(model, given, saved, tables).explanation(config)
    if settings:
        return dataclasses.replace(report, settings=settings)
    causes = family_causes(our_model, params, tokens, real, ours, theirs, dtype)
    return driver.explained(report, saved.values, select, causes._replace(model=None))


def _run_ours(
    ours: OurModel, model: PublishedModel, tokens: Tokens
) -> tuple[Values, dict[str, np.ndarray]]:
    tensors = {name: np.asarray(each, np.float64) for name, each in model.tensors.items()}
    with precision("float64"):
        run = jax.jit(ours.run, compiler_options=COMPILER_OPTIONS)
        values = ours.by_site(*run(tensors, tokens))
        to_params = interop.differentiable(model.family, ours.config, tuple(tensors))
        params = flatten_dict(to_params(tensors), sep="/")
    return values, {path: np.asarray(array) for path, array in params.items()}


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
