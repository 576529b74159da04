"""Compares our model with a PyTorch module that has the same weights, value by value."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.interop.weight_maps.mapping import by_path
from flaxformer_mt.parity import references
from flaxformer_mt.parity.diagnosis.diagnose import Diagnosis, diagnose
from flaxformer_mt.parity.diagnosis.family_values import FamilyValues
from flaxformer_mt.parity.diagnosis.findings import find
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, select_rows
from flaxformer_mt.parity.gradients import first_difference
from flaxformer_mt.parity.model_pair import (
    COMPILER_OPTIONS,
    Forward,
    ModelPair,
    OurModel,
    Tables,
    model_pair,
    precision,
    real_tokens,
    without_dropout,
)
from flaxformer_mt.parity.recipes import Recipe
from flaxformer_mt.parity.recipes import recipe as recipe_of
from flaxformer_mt.parity.reports.comparison import Finding, Row
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.rows import VALUES, gradient_rows, step_rows, value_row
from flaxformer_mt.parity.settings import SettingDifference, differing_settings
from flaxformer_mt.parity.tokens import Padding, Tokens
from flaxformer_mt.parity.trace import (
    Reshape,
    Tap,
    Values,
    frozen_parameters,
    parameter_gradients,
    time_major,
    values_of_model,
    values_of_module,
)
from flaxformer_mt.parity.trajectory import train_both

LOSS_FAMILIES = ("jadore801120", "annotated", "tunz", "torch", "fairseq")
"""Families that together cover every convention of label smoothing."""

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

    Compared are, in this order: the value of every sub-layer at real tokens, the logits, the loss
    in the family's convention and in all others, the gradient of every parameter and, on request,
    optimizer steps. Dropout is disabled.

    Args:
      family: the weight map of the module: the name of a family, or a custom map.
      torch_module: the reference, in float32 or float64; our model uses the same dtype. It is not
        modified.
      batch: integers, one sentence pair per row: (source [B, S], target_input [B, T]), or with
        target_output [B, T], padded with `pad_id`; or an object with `encoder_input_tokens`,
        `decoder_input_tokens` and `decoder_target_tokens`.
      taps: where the module computes each site of `trace.py`; sites without a tap are not
        compared. The default is the taps of the family's reference that fit the module.
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
      UserError: the module's tensors are not the family's, a tap does not fit the module, or the
        batch is invalid.
    """
    sides = model_pair(family, torch_module, overrides, forward, recipe, tables)
    tokens, real = real_tokens(sides, batch)
    strict = taps is not None
    settings: tuple[SettingDifference, ...] = ()
    if isinstance(family, str):
        settings = differing_settings(sides.ours.config, torch_module, sides.ours.family.name)
    if taps is None:
        taps = references.taps(sides.ours.family.name, sides.ours.config, torch_module)
    with precision(sides.dtype), without_dropout(torch_module):
        ours = _run_ours(sides, tokens)
        theirs = _run_reference(sides, tokens, taps, ours.values, strict)
    theirs = theirs._replace(
        values=_in_our_layout(theirs.values, taps, ours.values, real, sides.dtype)
    )
    notes = [PUBLISHED_TABLES] if tables == "published" else []
    rows = [
        *_loss_rows(ours.losses, theirs.losses, sides.dtype),
        *gradient_rows(ours.gradients, theirs.gradients, sides.dtype),
    ]
    of_values = list(_value_rows(ours.values, theirs, real, sides.dtype))
    if not strict:
        elsewhere = _computed_elsewhere(of_values, rows, theirs)
        of_values = [row for row in of_values if row.site not in elsewhere]
        if elsewhere:
            notes.append(
                f"Not compared, because the module does not compute them where the published code "
                f"does: {len(elsewhere)} sites, the first is {elsewhere[0]}. Logits, losses and "
                "gradients agree."
            )
    rows = [*of_values, *rows]
    notes += frozen_parameters(torch_module)
    steps = None
    if num_steps:
        steps = train_both(sides, batches or [batch], num_steps)
        rows += step_rows(steps)
    tapped = {*theirs.values, *theirs.never_run}
    untapped = tuple(site for site in ours.values if site not in tapped)
    kinks = 0
    if sides.ours.config.activation == "relu":
        kinks = sum(_kinks(site, ours.values, theirs.values, real) for site in theirs.values)
    report = Report(
        sides.ours.family.name,
        sides.dtype,
        tuple(rows),
        untapped,
        kinks,
        trajectory=steps,
        settings=settings,
        notes=tuple(notes),
    )
    first = report.first_divergence
    if first is None:
        return report
    if _is_random(sides, tokens):
        report = dataclasses.replace(report, notes=(*report.notes, _RANDOM))
    inputs = _diagnosis_inputs(sides, tokens, real, ours, theirs)
    report = dataclasses.replace(
        report, findings=tuple(_findings(report, inputs, sides.dtype)), never_run=theirs.never_run
    )
    if first.section == "gradients":
        compared = {site: tap for site, tap in taps.items() if site in inputs.theirs}
        with precision(sides.dtype), without_dropout(torch_module):
            notes = first_difference(sides, tokens, real, compared, ours.values)
        report = dataclasses.replace(report, notes=(*report.notes, *notes))
    return dataclasses.replace(report, diagnosis=_diagnosis(report, inputs))


_RANDOM = (
    "The module is random: its logits differ between two runs on the same batch. Switch off what "
    "eval() does not, such as torch.nn.functional.dropout."
)


def _is_random(sides: ModelPair, tokens: Tokens) -> bool:
    with precision(sides.dtype), without_dropout(sides.module), torch.no_grad():
        first, second = (sides.logits(tokens) for _ in range(2))
    return not torch.equal(first.nan_to_num(), second.nan_to_num())


def _in_our_layout(
    values: Values, taps: Mapping[str, Tap | str], ours: Values, real: Padding, dtype: str
) -> Values:
    """Transposes time-major values [T, B, D] with B = T, whose shape does not tell their layout.

    It is the layout in which a value agrees; for a value that agrees in neither, that of the last
    one with the same `Tap.reshape`.
    """
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
            _row_of_tokens(site, ours[site], each, real, dtype).passed for each in (value, other)
        )
        if agrees != other_agrees:
            transposed[reshape] = other_agrees
        if transposed.get(reshape):
            found[site] = other
    return found


def _computed_elsewhere(
    of_values: Sequence[Row], others: Sequence[Row], theirs: "_Side"
) -> list[str]:
    """Returns sites that differ only because a tap of the family does not fit the module.

    The taps are where the published code computes the values. A module that computes the same
    function may compute them elsewhere, in another layout, or not at all.

    Args:
      of_values: the rows of the sites and of the logits.
      others: the rows of losses and gradients.
      theirs: the reference.
    """
    logits = [row for row in of_values if row.site == "logits"]
    if not all(row.passed for row in (*logits, *others)):
        return []
    may_differ = {*theirs.never_run, *theirs.uncertain}
    return [row.site for row in of_values if not row.passed and row.site in may_differ]


class _Side(NamedTuple):
    """The values computed by one side."""

    values: Values
    losses: dict[str, float]
    """Per target token: "loss" by the recipe, and one by each convention of `LOSS_FAMILIES`."""
    gradients: dict[str, np.ndarray]
    """By parameter name of the reference."""
    never_run: tuple[str, ...] = ()
    """Sites that the reference does not compute."""
    again: Mapping[str, np.ndarray] = MappingProxyType({})
    """The reference's values of further calls, see `ModuleValues.again`."""
    uncertain: tuple[str, ...] = ()
    """See `ModuleValues.uncertain`."""


def _run_ours(sides: ModelPair, tokens: Tokens) -> _Side:
    gradients, (logits, kept, losses) = _program(sides.ours)(sides.trained(), sides.fixed(), tokens)
    values = values_of_model(sides.ours.config, kept) | {"logits": np.asarray(logits)}
    return _Side(
        values,
        {name: float(loss) for name, loss in losses.items()},
        {name: np.asarray(gradient) for name, gradient in gradients.items()},
    )


@functools.lru_cache(maxsize=8)
def _program(ours: OurModel) -> Any:
    """Returns the compiled function of (trained, fixed, tokens) to gradients and other values."""

    def loss_of(trained, fixed, tokens):
        logits, kept = ours.logits(trained | fixed, tokens, with_intermediates=True)
        loss = ours.loss(logits, tokens)
        losses = {
            f"loss/{name}": ours.loss(logits, tokens, recipe_of(name).convention)
            for name in LOSS_FAMILIES
        }
        return loss, (logits, kept["intermediates"], {"loss": loss} | losses)

    return jax.jit(jax.grad(loss_of, has_aux=True), compiler_options=COMPILER_OPTIONS)


def _run_reference(
    sides: ModelPair, tokens: Tokens, taps: Mapping[str, Tap | str], ours: Values, strict: bool
) -> _Side:
    shapes = {site: value.shape for site, value in ours.items()}
    module = sides.module
    run = values_of_module(module, taps, lambda _: sides.logits(tokens), shapes, strict)
    logits, values = run.output, run.values
    losses = {"loss": sides.loss(logits, tokens)} | {
        f"loss/{name}": sides.loss(logits, tokens, recipe_of(name).loss) for name in LOSS_FAMILIES
    }
    return _Side(
        values | {"logits": logits.detach().numpy()},
        {name: loss.item() for name, loss in losses.items()},
        parameter_gradients(module, losses["loss"]),
        run.never_run,
        run.again,
        run.uncertain,
    )


def _value_rows(ours: Values, theirs: _Side, real: Padding, dtype: str) -> Iterator[Row]:
    for site in ours:
        if site in theirs.never_run:
            yield Row(site, ours[site].shape, math.inf, math.inf, VALUES[dtype])
        if site not in theirs.values:
            continue
        value = theirs.values[site]
        if value.shape != (shape := ours[site].shape):
            yield Row(site, shape, math.inf, math.inf, VALUES[dtype], value.shape)
            continue
        yield _row_of_tokens(site, ours[site], value, real, dtype)


def _row_of_tokens(
    site: str, ours: np.ndarray, theirs: np.ndarray, real: Padding, dtype: str
) -> Row:
    """Returns the row of a value at real tokens."""
    found, expected = (select_rows(site, array, real) for array in (ours, theirs))
    return value_row(site, found, expected, dtype)


def _kinks(site: str, ours: Values, theirs: Values, real: Padding) -> int:
    """See `Report.kinks`."""
    fits = ours[site].shape == theirs[site].shape
    if not (site.endswith("feed_forward/activated") and fits):
        return 0
    found, expected = (select_rows(site, side[site], real) for side in (ours, theirs))
    return int(np.sum((found > 0) != (expected > 0)))


def _loss_rows(ours: Mapping[str, float], theirs: Mapping[str, float], dtype: str) -> Iterator[Row]:
    for name, expected in theirs.items():
        yield value_row(name, np.array(ours[name]), np.array(expected), dtype)


def _diagnosis_inputs(
    sides: ModelPair, tokens: Tokens, real: Padding, ours: _Side, theirs: _Side
) -> DiagnosisInputs:
    fits = {
        site: value
        for site, value in theirs.values.items()
        if value.shape == ours.values[site].shape
    }
    return DiagnosisInputs(
        site="loss",
        config=sides.ours.config,
        params=by_path(sides.params),
        source=tokens.source,
        target_input=tokens.target_input,
        target_output=tokens.target_output,
        real_source=real.source,
        real_target=real.target,
        ours=ours.values,
        theirs=fits,
        tolerance=VALUES[sides.dtype],
        loss=theirs.losses["loss"],
        convention=sides.ours.recipe.convention,
        smoothing=sides.ours.recipe.smoothing,
        again=theirs.again,
    )


def _findings(report: Report, inputs: DiagnosisInputs, dtype: str) -> Iterator[Finding]:
    first = report.first_divergence
    if first is None or first.section != "values" or first.reference_shape is not None:
        return iter(())

    def select(site: str, value: np.ndarray) -> np.ndarray:
        return select_rows(site, value, inputs.real)

    return find(FamilyValues(inputs), list(inputs.ours), inputs.theirs, select, dtype)


def _diagnosis(report: Report, inputs: DiagnosisInputs) -> Diagnosis | None:
    first = report.first_divergence
    if first is None or first.reference_shape is not None:
        return None
    if report.findings:
        return report.findings[0].diagnosis
    return diagnose(inputs._replace(site=first.site))
