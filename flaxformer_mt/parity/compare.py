"""Compares our model with a PyTorch module on the same weights, value by value."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.interop import weights
from flaxformer_mt.parity import references
from flaxformer_mt.parity.diagnosis.diagnose import Diagnosis, diagnose
from flaxformer_mt.parity.diagnosis.evidence import Evidence, select_rows
from flaxformer_mt.parity.pair import (
    COMPILER_OPTIONS,
    Forward,
    Ours,
    Pair,
    pair,
    precision,
    real_tokens,
    without_dropout,
)
from flaxformer_mt.parity.recipes import Recipe
from flaxformer_mt.parity.recipes import recipe as recipe_of
from flaxformer_mt.parity.reports.report import Report, Row
from flaxformer_mt.parity.tokens import Padding, Tokens
from flaxformer_mt.parity.trace import Tap, Values, values_of_model, values_of_module
from flaxformer_mt.parity.trajectory import Curves, Trajectory, train_both

VALUES = {"float64": 1e-10, "float32": 2e-5}
"""What a value may differ by, as a share of the site's largest magnitude (in float32 of 1 at the
least: there small values are what is left of large ones)."""
GRADIENTS = {"float64": 1e-10, "float32": 1e-5}
"""What a gradient may differ by, as a share of the largest gradient."""

LOSS_FAMILIES = ("jadore801120", "annotated", "tunz", "torch", "fairseq")
"""Families that between them have every convention of label smoothing."""


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
    **overrides: Any,
) -> Report:
    """Runs both sides on the same weights and batch, and compares all that they compute.

    Compared are, in this order: every sub-layer's value at real tokens, the logits, the loss in
    the family's convention and in all others, the gradient of every parameter, and as many
    optimizer steps as are asked for. All without dropout.

    Args:
      family: the map of the module's weights: a name, or a map of your own.
      torch_module: the reference, in float32 or float64, which is also what ours computes in. It
        is not changed.
      batch: one sentence pair a row, see `tokens.as_tokens`.
      taps: where the module computes each site of `trace.py`; sites without one are not compared.
        By default as the family's reference does, as far as the module is laid out like that.
      forward: a function of (module, tokens) to logits [B, T, V]; by default
        `module(source, target_input)` on int64 tensors.
      recipe: loss, schedule and optimizer, by default the family's.
      num_steps: optimizer steps.
      batches: what they are made on, in turn; by default on the one batch.
      **overrides: what the module's tensors cannot tell, as `num_heads`; see `interop.load`.

    Raises:
      UserError: the module's tensors are not the family's, a tap does not fit the module, or the
        batch has another form.
    """
    sides = pair(family, torch_module, overrides, forward, recipe)
    tokens, real = real_tokens(sides, batch)
    strict = taps is not None
    if taps is None:
        taps = references.taps(sides.ours.family.name, sides.ours.config, torch_module)
    with precision(sides.dtype), without_dropout(torch_module):
        ours = _run_ours(sides, tokens)
        theirs = _run_reference(sides, tokens, taps, ours.values, strict)
    rows = [
        *_value_rows(ours.values, theirs.values, real, sides.dtype),
        *_loss_rows(ours.losses, theirs.losses, sides.dtype),
        *_gradient_rows(ours.gradients, theirs.gradients, sides.dtype),
    ]
    steps = None
    if num_steps:
        steps = train_both(sides, batches or [batch], num_steps)
        rows += _step_rows(steps)
    untapped = tuple(site for site in ours.values if site not in theirs.values)
    kinks = 0
    if sides.ours.config.activation == "relu":
        kinks = sum(_kinks(site, ours.values, theirs.values, real) for site in theirs.values)
    report = Report(
        sides.ours.family.name, sides.dtype, tuple(rows), untapped, kinks, trajectory=steps
    )
    return dataclasses.replace(
        report, diagnosis=_diagnosis(report, sides, tokens, real, ours, theirs)
    )


class _Side(NamedTuple):
    """What one side has computed."""

    values: Values
    losses: dict[str, float]
    """Per token: "loss" by the recipe, and one by the convention of each of `LOSS_FAMILIES`."""
    gradients: dict[str, np.ndarray]
    """By the reference's name."""


def _run_ours(sides: Pair, tokens: Tokens) -> _Side:
    gradients, (logits, kept, losses) = _program(sides.ours)(sides.trained(), sides.fixed(), tokens)
    values = values_of_model(sides.ours.config, kept) | {"logits": np.asarray(logits)}
    return _Side(
        values,
        {name: float(loss) for name, loss in losses.items()},
        {name: np.asarray(gradient) for name, gradient in gradients.items()},
    )


@functools.lru_cache(maxsize=8)
def _program(ours: Ours) -> Any:
    """The compiled function of (trained, fixed, tokens) to gradients and all else."""

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
    sides: Pair, tokens: Tokens, taps: Mapping[str, Tap | str], ours: Values, strict: bool
) -> _Side:
    shapes = {site: value.shape for site, value in ours.items()}
    module = sides.module
    logits, values = values_of_module(module, taps, lambda _: sides.logits(tokens), shapes, strict)
    losses = {"loss": sides.loss(logits, tokens)} | {
        f"loss/{name}": sides.loss(logits, tokens, recipe_of(name).loss) for name in LOSS_FAMILIES
    }
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(losses["loss"], list(parameters.values()), allow_unused=True)
    gradients = {
        # A parameter that is never used has the gradient 0.
        name: (torch.zeros_like(parameter) if gradient is None else gradient).numpy()
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    return _Side(
        values | {"logits": logits.detach().numpy()},
        {name: loss.item() for name, loss in losses.items()},
        gradients,
    )


def _value_rows(ours: Values, theirs: Values, real: Padding, dtype: str) -> Iterator[Row]:
    for site, value in theirs.items():
        found, expected = (select_rows(site, array, real) for array in (ours[site], value))
        largest = _largest(expected)
        scale = largest if dtype == "float64" else max(1.0, largest)
        yield _row(site, found, expected, VALUES[dtype] * scale)


def _kinks(site: str, ours: Values, theirs: Values, real: Padding) -> int:
    """See `Report.kinks`."""
    if not site.endswith("feed_forward/activated"):
        return 0
    found, expected = (select_rows(site, side[site], real) for side in (ours, theirs))
    return int(np.sum((found > 0) != (expected > 0)))


def _loss_rows(ours: Mapping[str, float], theirs: Mapping[str, float], dtype: str) -> Iterator[Row]:
    for name, expected in theirs.items():
        scale = abs(expected) if dtype == "float64" else max(1.0, abs(expected))
        yield _row(name, np.array(ours[name]), np.array(expected), VALUES[dtype] * scale)


def _gradient_rows(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], dtype: str
) -> Iterator[Row]:
    largest = max(_largest(gradient) for gradient in theirs.values())
    for name, expected in theirs.items():
        tolerance = GRADIENTS[dtype] * largest
        yield _row(f"gradient/{name}", ours[name], expected, tolerance, largest)


def _step_rows(steps: Trajectory) -> Iterator[Row]:
    differences = steps.differences()
    for name, ours, theirs, relative in zip(
        Curves._fields, steps.ours, steps.theirs, differences, strict=True
    ):
        worst = int(np.argmax(np.nan_to_num(relative, nan=np.inf)))
        difference = _difference(ours[worst], theirs[worst])
        tolerance = steps.tolerance * abs(theirs[worst])
        yield Row(f"steps/{name}", ours.shape, difference, float(relative[worst]), tolerance)


def _row(
    site: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float, scale: float | None = None
) -> Row:
    """A row whose relative difference is a share of `scale`, by default theirs' largest."""
    difference, largest = _difference(ours, theirs), scale or _largest(theirs)
    relative = difference / largest if largest else difference
    return Row(site, ours.shape, difference, relative, tolerance)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest; inf where only one side is masked (-inf) or either is NaN."""
    same = ours == theirs  # Two infinities have no difference, but are equal.
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(ours - theirs))
    return float(np.max(np.nan_to_num(differences, nan=np.inf, posinf=np.inf), initial=0.0))


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))


def _diagnosis(
    report: Report, sides: Pair, tokens: Tokens, real: Padding, ours: _Side, theirs: _Side
) -> Diagnosis | None:
    first = report.first_divergence
    if first is None:
        return None
    return diagnose(
        Evidence(
            site=first.site,
            config=sides.ours.config,
            params=weights.by_path(sides.params),
            source=tokens.source,
            target_input=tokens.target_input,
            target_output=tokens.target_output,
            real_source=real.source,
            real_target=real.target,
            ours=ours.values,
            theirs=theirs.values,
            tolerance=VALUES[sides.dtype],
            loss=theirs.losses["loss"],
            convention=sides.ours.recipe.convention,
            smoothing=sides.ours.recipe.smoothing,
        )
    )
