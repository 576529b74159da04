"""Compares our model with a PyTorch module that has the same weights, value by value."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.interop.weight_maps.mapping import by_path
from flaxformer_mt.parity import driver, references, trajectories
from flaxformer_mt.parity.any_model import backward
from flaxformer_mt.parity.diagnosis.first_cause import FamilyValues, diagnose
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, Select, select_rows
from flaxformer_mt.parity.model_pair import (
    Forward,
    ModelPair,
    OurModel,
    Tables,
    model_pair,
    real_tokens,
)
from flaxformer_mt.parity.recipes import Recipe
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.rows import VALUES, value_row
from flaxformer_mt.parity.settings import differing_settings
from flaxformer_mt.parity.sides import Side, precision, run_ours, run_reference, without_dropout
from flaxformer_mt.parity.tokens import Padding, Tokens
from flaxformer_mt.parity.trace import Reshape, Tap, Values, frozen_parameters, time_major

PUBLISHED_TABLES = "Our tables of positions are the published ones, rounded to float32."


def compare(
    family: str | interop.Family,
    torch_module: nn.Module,
    batch: Any,
    *,
    taps: Mapping[str, Tap | str] | None = None,
    forward: Forward | None = None,
    recipe: Recipe | None = None,
    num_steps: int = 0,
    batches: Sequence[Any] = (),
    tables: Tables = "exact",
    **overrides: Any,
) -> Report:
    """Compares all values of our model and a reference on the same weights and batch.

    Compared are the value of every sub-layer at real tokens, the logits, the loss in every
    convention, the gradient of every parameter and, on request, optimizer steps, without dropout.

    Args:
      family: the weight map of the module: the name of a family, or a custom map.
      torch_module: the reference, in float32 or float64; it is not modified.
      batch: integers, one sentence pair per row: (source [B, S], target_input [B, T]), or with
        target_output [B, T], padded with `pad_id`; or an object with `encoder_input_tokens`,
        `decoder_input_tokens` and `decoder_target_tokens`.
      taps: where the module computes each site of `trace.py`; the default is the taps of the
        family's reference that fit the module.
      forward: maps (module, tokens) to logits [B, T, V]; by default
        `module(source, target_input)` on int64 tensors.
      recipe: loss, schedule and optimizer, by default the family's, or those of `torch`.
      num_steps: the number of optimizer steps to compare.
      batches: the batches of the steps, used in turn; by default the one batch.
      tables: "published" replaces our tables of positions by those of the module, or rounds them to
        float32 if it has none.
      **overrides: settings that tensors do not determine, such as `num_heads`; see `interop.load`.

    Returns:
      The report; `passed` is True if every row is within its tolerance.

    Raises:
      UserError: the module's tensors are not the family's, a tap does not fit, or the batch is
        invalid.
    """
    sides = model_pair(family, torch_module, overrides, forward, recipe, tables)
    tokens, real = real_tokens(sides, batch)
    config, name, dtype = sides.ours.config, sides.ours.family.name, sides.dtype
    strict = taps is not None
    if taps is None:
        taps = references.taps(name, config, torch_module)

    def select(site: str, value: np.ndarray) -> np.ndarray:
        return select_rows(site, value, real)

    steps = None
    with precision(dtype), without_dropout(torch_module):
        ours = run_ours(sides, tokens)
        theirs = run_reference(sides, tokens, taps, ours.values, strict)
        if num_steps:
            optimizers = trajectories.of_recipe(sides.ours.recipe, config.d_model, num_steps)
            used = [real_tokens(sides, each)[0] for each in batches or [batch]]
            steps = trajectories.train_both(sides, dtype, used, num_steps, optimizers)
    values = _in_our_layout(theirs.values, taps, ours.values, select, dtype)
    theirs = theirs._replace(values=values)
    report = driver.compared(
        name,
        dtype,
        ours,
        theirs,
        select,
        steps=steps,
        settings=(
            differing_settings(config, torch_module, name) if isinstance(family, str) else ()
        ),
        notes=[PUBLISHED_TABLES] * (tables == "published") + frozen_parameters(torch_module),
    )
    fits = {site: v for site, v in values.items() if v.shape == ours.values[site].shape}
    if config.activation == "relu":
        report = dataclasses.replace(report, kinks=_kinks(ours.values, fits, select))
    if not strict:
        report = _without_misplaced_taps(report, theirs)
    if report.first_divergence is None:
        return report
    if _is_random(sides, tokens):
        report = dataclasses.replace(report, notes=(*report.notes, _RANDOM))
    inputs = diagnosis_inputs(
        sides.ours,
        by_path(sides.params),
        tokens,
        real,
        ours.values,
        theirs._replace(values=fits),
        dtype,
    )

    def gradient_notes() -> list[str]:
        compared = {site: tap for site, tap in taps.items() if site in fits}
        with precision(dtype), without_dropout(torch_module):
            return backward.first_difference(sides, tokens, compared, ours.values, select, dtype)

    return driver.explained(
        report,
        fits,
        select,
        model=FamilyValues(inputs),
        sites=list(ours.values),
        diagnosis_of=lambda site: diagnose(inputs._replace(site=site)),
        gradient_notes=gradient_notes,
    )


_RANDOM = (
    "The module is random: its logits differ between two runs on the same batch. Switch off what "
    "eval() does not, such as torch.nn.functional.dropout."
)


def _is_random(sides: ModelPair, tokens: Tokens) -> bool:
    with precision(sides.dtype), without_dropout(sides.module), torch.no_grad():
        first, second = (sides.outputs(tokens)["logits"] for _ in range(2))
    return not torch.equal(first.nan_to_num(), second.nan_to_num())


def _in_our_layout(
    values: Values, taps: Mapping[str, Tap | str], ours: Values, select: Select, dtype: str
) -> Values:
    """Transposes time-major values [T, B, D] with B = T, whose shape does not tell their layout."""
    # It is the layout in which a value agrees; for a value that agrees in neither, that of the last
    # one with the same `Tap.reshape`.
    transposed: dict[Reshape | None, bool] = {}
    found = dict(values)
    for site, value in values.items():
        tap = taps.get(site)
        reshape = tap.reshape if isinstance(tap, Tap) else None
        is_square = value.ndim == 3 and value.shape[0] == value.shape[1]
        may_be = tap is not None and reshape in (None, time_major)
        if not (is_square and may_be and value.shape == ours[site].shape):
            continue
        other = value.swapaxes(0, 1)
        agrees, other_agrees = (
            value_row(site, select(site, ours[site]), select(site, each), dtype).passed
            for each in (value, other)
        )
        if agrees != other_agrees:
            transposed[reshape] = other_agrees
        if transposed.get(reshape):
            found[site] = other
    return found


def _without_misplaced_taps(report: Report, theirs: Side) -> Report:
    """Drops sites that differ only because a tap of the family does not fit the module."""
    # The taps are where the published code computes the values. A module that computes the same
    # function may compute them elsewhere, in another layout, or not at all.
    outcomes = [
        row for row in report.rows if row.site == "logits" or row.section in ("losses", "gradients")
    ]
    may_differ = {*theirs.never_run, *theirs.uncertain}
    dropped = [row.site for row in report.rows if not row.passed and row.site in may_differ]
    if not dropped or not all(row.passed for row in outcomes):
        return report
    note = (
        f"Not compared, because the module does not compute them where the published code does: "
        f"{len(dropped)} sites, the first is {dropped[0]}. Logits, losses and gradients agree."
    )
    return dataclasses.replace(
        report,
        rows=tuple(row for row in report.rows if row.site not in dropped),
        never_run=tuple(site for site in report.never_run if site not in dropped),
        notes=(*report.notes, note),
    )


def _kinks(ours: Values, theirs: Values, select: Select) -> int:
    return sum(
        int(np.sum((select(site, ours[site]) > 0) != (select(site, value) > 0)))
        for site, value in theirs.items()
        if site.endswith("feed_forward/activated")
    )


def diagnosis_inputs(
    ours: OurModel,
    params: Mapping[str, np.ndarray],
    tokens: Tokens,
    real: Padding,
    values: Values,
    theirs: Side,
    dtype: str,
) -> DiagnosisInputs:
    """Returns the inputs of a diagnosis of our `values`, whose site is set later."""
    return DiagnosisInputs(
        site="loss",
        config=ours.config,
        params=params,
        tokens=tokens,
        real=real,
        ours=values,
        theirs=theirs.values,
        tolerance=VALUES[dtype],
        loss=theirs.losses.get("loss", np.nan),
        convention=ours.recipe.convention,
        smoothing=ours.recipe.smoothing,
        again=theirs.again,
    )
