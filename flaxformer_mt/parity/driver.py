"""The driver of every comparison: values of both sides, rows, findings, notes, report."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from flaxformer_mt.parity import sides
from flaxformer_mt.parity.program.diagnosis import FLOAT32, Diagnosis, Select
from flaxformer_mt.parity.program.differences import ProgramValues
from flaxformer_mt.parity.program.equations import TracedFunction
from flaxformer_mt.parity.reports.comparison import Row, SettingDifference
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.sides import Pair, Side
from flaxformer_mt.parity.trace import module_values
from flaxformer_mt.parity.trace.module_values import Reshape, Tap
from flaxformer_mt.parity.trace.sites import Values
from flaxformer_mt.parity.trajectories import Curves, Trajectory

VALUES = {"float64": 1e-10, "float32": FLOAT32}
"""Tolerance of values, relative to the site's largest magnitude; in float32 to at least 1, because
small values are often differences of large ones."""
GRADIENTS = {"float64": 1e-10, "float32": 1e-5}
"""Tolerance of gradients, relative to the largest gradient."""


class Causes(NamedTuple):
    """Where the causes of differences are looked for."""

    model: ProgramValues
    """Whose differing sites are all found, each by itself."""
    of_loss: Callable[[], Diagnosis | None] = lambda: None
    """The cause of another loss of equal logits."""


def compare_pair(
    name: str,
    pair: Pair,
    batch: Any,
    taps: Mapping[str, Tap | str],
    select: Select,
    causes_of: Callable[[Side, Side], Causes],
    *,
    strict: bool,
    train: Callable[[], Trajectory] | None = None,
    judged: Callable[[Report, Side, Side], Report] = lambda report, ours, theirs: report,
    settings: tuple[SettingDifference, ...] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Runs both sides of a pair, and reports on all values, losses, gradients and steps.

    Of both sides, the reference with the values that have the shape of ours, `judged` returns the
    report with what is known of the pair, and `causes_of`, if anything differs, the causes.
    `strict` is as for `values_of_module`.
    """
    with sides.precision(pair.dtype), sides.without_dropout(pair.module):
        ours = sides.run_ours(pair, batch)
        theirs = sides.run_reference(pair, batch, taps, ours.values, strict)
        values = _in_our_layout(theirs.values, taps, ours.values, select, pair.dtype)
        theirs = theirs._replace(values=values)
        report = compared(
            name,
            pair.dtype,
            ours,
            theirs,
            select,
            steps=train() if train else None,
            settings=settings,
            notes=[*notes, *module_values.frozen_parameters(pair.module)],
        )
        theirs = theirs._replace(values=theirs.fitting(ours.values))
        report = judged(report, ours, theirs)
        if report.first_divergence is None:
            return report
        if _is_random(pair, batch):
            report = dataclasses.replace(report, notes=(*report.notes, _RANDOM))
        causes, fits = causes_of(ours, theirs), theirs.values
        if next(row for row in report.rows if not row.passed).section == "gradients":
            used = {site: tap for site, tap in taps.items() if site in fits}
            found = _first_gradient_difference(pair, batch, used, ours.values, select)
            report = dataclasses.replace(report, notes=(*report.notes, *found))
        return explained(report, causes)


_RANDOM = (
    "The module is random: its outputs differ between two runs on the same batch. Switch off what "
    "eval() does not, such as torch.nn.functional.dropout."
)


def _is_random(pair: Pair, batch: Any) -> bool:
    with torch.no_grad():
        first, second = (pair.outputs(batch).values() for _ in range(2))
    return not all(map(torch.equal, map(torch.nan_to_num, first), map(torch.nan_to_num, second)))


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
        may_be = tap is not None and reshape in (None, module_values.time_major)
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


def compared(
    name: str,
    dtype: str,
    ours: Side,
    theirs: Side,
    select: Select,
    *,
    steps: Trajectory | None = None,
    settings: tuple[SettingDifference, ...] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Returns the report on two sides, without causes, in the order of our values."""
    found = [*_value_rows(ours.values, theirs, select, dtype)]
    for loss, value in theirs.losses.items():
        found.append(value_row(loss, np.array(ours.losses[loss]), np.array(value), dtype))
    found += gradient_rows(ours.gradients, theirs.gradients, dtype)
    if steps is not None:
        found += step_rows(steps)
    tapped = {*theirs.values, *theirs.never_run}
    return Report(
        name,
        dtype,
        tuple(found),
        untapped=tuple(site for site in ours.values if site not in tapped),
        never_run=theirs.never_run,
        trajectory=steps,
        settings=settings,
        notes=tuple(notes),
    )


def _value_rows(ours: Values, theirs: Side, select: Select, dtype: str) -> Iterator[Row]:
    for site, value in ours.items():
        expected = theirs.values.get(site)
        if site in theirs.never_run:
            yield Row(site, value.shape, math.inf, math.inf, VALUES[dtype])
        elif expected is not None and expected.shape != value.shape:
            yield Row(site, value.shape, math.inf, math.inf, VALUES[dtype], expected.shape)
        elif expected is not None:
            yield value_row(site, select(site, value), select(site, expected), dtype)


def explained(report: Report, causes: Causes) -> Report:
    """Returns a report with the causes of its differences."""
    first = next((row for row in report.rows if not row.passed), None)
    if first is None or first.reference_shape is not None:
        return report
    if first.section == "values":
        findings = tuple(causes.model.findings(0.0 if report.dtype == "float64" else 1.0))
        report = dataclasses.replace(report, findings=findings)
        diagnosis = findings[0].diagnosis if findings else None
    else:
        diagnosis = causes.of_loss() if first.site == "loss" else None
    notes = (*report.notes, *causes.model.untested.values())
    report = dataclasses.replace(report, diagnosis=diagnosis, notes=notes)
    return _with_float32_inside(report, causes.model.narrow_sites)


def _with_float32_inside(report: Report, narrow: Sequence[str]) -> Report:
    """Judges what our side computes from float32, within float64, by the tolerances of float32."""
    if report.dtype == "float32" or not narrow:
        return report
    found = {finding.site for finding in report.findings} | {*report.never_run}
    tolerances = {"gradients": GRADIENTS["float32"]}

    def judged(row: Row) -> Row:
        is_narrow = row.site in narrow or row.section in ("losses", "gradients")
        if row.site in found or not is_narrow or not row.max_rel or row.max_abs == math.inf:
            return row
        tolerance = tolerances.get(row.section, VALUES["float32"])
        return row._replace(tolerance=tolerance * row.max_abs / row.max_rel)

    note = (
        f"Our side computes in float32 before {narrow[0]}: what depends on it is compared with "
        "the tolerances of float32."
    )
    return dataclasses.replace(
        report, rows=tuple(map(judged, report.rows)), notes=(*report.notes, note)
    )


def _first_gradient_difference(
    pair: Pair,
    batch: Any,
    taps: Mapping[str, Tap | str],
    values: Values,
    select: Select,
) -> list[str]:
    """Returns a sentence on the last site, by computation, whose gradient differs; or nothing."""
    traced, leaves = pair.traced(batch)
    theirs = _gradients_of_module(pair, batch, taps, values)
    scale = max((largest(select(*each)) for each in theirs.items()), default=0.0)
    ours = _gradients_of_function(pair, batch, traced, leaves)
    for site, number in reversed(traced.sites.items()):
        if site not in theirs:
            continue
        found, expected = (select(site, side[site]) for side in (ours, theirs))
        if difference(found, expected) > GRADIENTS[pair.dtype] * scale:
            readers = _readers(traced, number, list(theirs))
            return [
                f"Backwards from the loss, the gradients agree down to {readers}, and differ at "
                f"{site}: what computes the one from the other is detached, or has another "
                "derivative."
            ]
    return []


def _readers(traced: TracedFunction, number: int, compared: Sequence[str]) -> str:
    numbers = {n: site for site, n in traced.sites.items() if site in compared}
    found, reached = [], {number}
    for equation in traced.equations:
        if reached.intersection(equation.inputs):
            names = [numbers[n] for n in equation.outputs if n in numbers and n != number]
            found += names
            if not names:
                reached.update(equation.outputs)
    if reached.intersection(traced.outputs):
        found.append("the output")
    return ", ".join(found)


def _gradients_of_function(
    pair: Pair, batch: Any, traced: TracedFunction, leaves: Sequence[Any]
) -> Values:
    def loss_of(added):
        values = traced.run(leaves, added)
        return pair.ours.loss([values[number] for number in traced.outputs], batch)

    types = {site: traced.types[number] for site, number in traced.sites.items()}
    floating = [site for site, like in types.items() if jnp.issubdtype(like.dtype, jnp.floating)]
    zeros = {
        traced.sites[site]: jnp.zeros(types[site].shape, types[site].dtype) for site in floating
    }
    found = jax.device_get(jax.jit(jax.grad(loss_of))(zeros))
    return {site: found[traced.sites[site]] for site in floating}


def _gradients_of_module(
    pair: Pair, batch: Any, taps: Mapping[str, Tap | str], values: Values
) -> Values:
    """Sites inside of modules, whose taps name an operation, are left out."""
    wanted = module_values.as_taps(taps)
    keys = {
        site: (pair.module.get_submodule(tap.module), "", tap.side)
        for site, tap in wanted.items()
        if not tap.op
    }
    with module_values.recording(pair.module, set(keys.values()), copy=False) as seen:
        total = pair.loss(pair.outputs(batch), batch)
    chosen = {site: _chosen(seen[key], wanted[site]) for site, key in keys.items()}
    tensors = {site: tensor for site, tensor in chosen.items() if tensor is not None}
    if not tensors:
        return {}
    found = torch.autograd.grad(total, list(tensors.values()), materialize_grads=True)
    return {
        site: module_values.shaped(site, wanted[site].reshape, gradient.numpy(), values[site].shape)
        for site, gradient in zip(tensors, found, strict=True)
    }


def _chosen(calls: Sequence[Sequence[Any]], tap: Tap) -> torch.Tensor | None:
    if not -len(calls) <= tap.call < len(calls) or tap.argument >= len(calls[tap.call]):
        return None
    found = calls[tap.call][tap.argument]
    return found if isinstance(found, torch.Tensor) and found.requires_grad else None


def value_row(site: str, ours: np.ndarray, theirs: np.ndarray, dtype: str) -> Row:
    """Returns the row of a value, with the tolerance of the dtype."""
    scale = largest(theirs) if dtype == "float64" else max(1.0, largest(theirs))
    return _row(site, ours, theirs, VALUES[dtype] * scale)


def gradient_rows(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], dtype: str
) -> Iterator[Row]:
    """Yields the row of each parameter's gradient, relative to the largest of all gradients."""
    scale = max(map(largest, theirs.values()), default=0.0)
    for name, expected in theirs.items():
        yield _row(f"gradient/{name}", ours[name], expected, GRADIENTS[dtype] * scale, scale)


def step_rows(steps: Trajectory) -> Iterator[Row]:
    """Yields the row of each quantity of a training run, at its worst step."""
    differences = steps.differences()
    for name, ours, theirs, relative in zip(
        Curves._fields, steps.ours, steps.theirs, differences, strict=True
    ):
        worst = int(np.argmax(np.nan_to_num(relative, nan=np.inf)))
        found = difference(ours[worst], theirs[worst])
        tolerance = steps.tolerance * abs(theirs[worst])
        yield Row(f"steps/{name}", ours.shape, found, float(relative[worst]), tolerance)


def _row(
    site: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float, scale: float | None = None
) -> Row:
    """Builds a row; `scale` normalizes the relative difference, by default theirs' largest."""
    found, magnitude = difference(ours, theirs), scale or largest(theirs)
    relative = found / magnitude if magnitude else found
    return Row(site, ours.shape, found, relative, tolerance)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference; inf where only one side is masked (-inf) or either is NaN."""
    if ours.dtype == bool:
        ours, theirs = ours.astype(np.int8), theirs.astype(np.int8)
    same = ours == theirs  # inf - inf is NaN, but the values are equal.
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(ours - theirs))
    return float(np.max(np.nan_to_num(differences, nan=np.inf, posinf=np.inf), initial=0.0))


def largest(array: np.ndarray) -> float:
    """Returns the largest finite magnitude; 0 if there is none."""
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))
