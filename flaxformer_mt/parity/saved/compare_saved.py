"""Compares our model with values that another program saved for the same weights and tokens."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.compare import PUBLISHED_TABLES
from flaxformer_mt.parity.diagnosis.diagnose import Diagnosis, diagnose
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, select_rows
from flaxformer_mt.parity.model_pair import COMPILER_OPTIONS, OurModel, precision
from flaxformer_mt.parity.published import PublishedModel, Tables
from flaxformer_mt.parity.recipes import recipe
from flaxformer_mt.parity.reports.comparison import Row
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.rows import VALUES, value_row
from flaxformer_mt.parity.saved.files import SavedValues, check_sites
from flaxformer_mt.parity.saved.search import Search
from flaxformer_mt.parity.tokens import Padding, Tokens, check_special_tokens, padding
from flaxformer_mt.parity.trace import Values, values_of_model

_UNKNOWN_TABLES = {"float64": 1e4, "float32": 1.0}
"""Factors of the tolerance if the tables of positions were computed in float32: 1e-6 instead of
1e-10, which is the error of float32 angles at the positions of a sentence."""


def compare_saved(
    model: PublishedModel, saved: SavedValues, given: Mapping[str, Any], tables: Tables
) -> Report:
    """Compares the values of our model, computed in float64, with saved ones.

    Args:
      model: a checkpoint.
      saved: the tokens, and what another program computed with this checkpoint.
      given: settings that the checkpoint does not determine.
      tables: whether our tables of positions are the published ones, rounded to float32.

    Returns:
      The report. Settings that explain a difference are named.

    Raises:
      UserError: the settings do not fit the checkpoint, or the saved values are of other sites.
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
    rows = [
        _row(site, ours[site], saved.values[site], real, saved.dtype, known_tables)
        for site in ours
        if site in saved.values
    ]
    report = Report(
        model.family.name,
        saved.dtype,
        tuple(rows),
        notes=tuple(_notes(real, saved, tables, known_tables)),
    )
    if report.passed:
        return report
    settings = Search(model, given, saved, tables).explanation(config)
    report = dataclasses.replace(report, settings=settings)
    if settings:
        return report
    return dataclasses.replace(
        report, diagnosis=_diagnosis(report, config, params, tokens, real, ours, saved)
    )


def _run_ours(
    ours: OurModel, model: PublishedModel, tokens: Tokens
) -> tuple[Values, dict[str, np.ndarray]]:
    """Returns our values by site, and our parameters by path."""
    tensors = {name: np.asarray(each, np.float64) for name, each in model.tensors.items()}
    with precision("float64"):
        run = jax.jit(
            functools.partial(ours.logits, with_intermediates=True),
            compiler_options=COMPILER_OPTIONS,
        )
        logits, kept = run(tensors, tokens)
        to_params = interop.differentiable(model.family, ours.config, tuple(tensors))
        params = flatten_dict(to_params(tensors), sep="/")
    values = values_of_model(ours.config, kept["intermediates"]) | {"logits": np.asarray(logits)}
    return values, {path: np.asarray(array) for path, array in params.items()}


def _row(
    site: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    real: Padding,
    dtype: str,
    known_tables: bool,
) -> Row:
    if ours.shape != theirs.shape:
        return Row(site, ours.shape, math.inf, math.inf, VALUES[dtype], theirs.shape)
    found, expected = (select_rows(site, array, real) for array in (ours, theirs))
    row = value_row(site, found, expected, dtype)
    return row if known_tables else row._replace(tolerance=row.tolerance * _UNKNOWN_TABLES[dtype])


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


def _diagnosis(
    report: Report,
    config: TransformerConfig,
    params: Mapping[str, np.ndarray],
    tokens: Tokens,
    real: Padding,
    ours: Values,
    saved: SavedValues,
) -> Diagnosis | None:
    first = report.first_divergence
    if first is None or first.reference_shape is not None:
        return None
    its_recipe = recipe(report.family)
    return diagnose(
        DiagnosisInputs(
            site=first.site,
            config=config,
            params=params,
            source=tokens.source,
            target_input=tokens.target_input,
            target_output=tokens.target_output,
            real_source=real.source,
            real_target=real.target,
            ours=ours,
            theirs=saved.values,
            tolerance=VALUES[saved.dtype],
            loss=math.nan,  # Losses are not compared.
            convention=its_recipe.convention,
            smoothing=its_recipe.smoothing,
        )
    )
