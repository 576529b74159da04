"""Compares our model with a PyTorch module that has the same weights, value by value."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity import driver, references, trajectories
from flaxformer_mt.parity.causes import losses, positions
from flaxformer_mt.parity.families.model_pair import (
    Forward,
    OurModel,
    Tables,
    model_pair,
    real_tokens,
)
from flaxformer_mt.parity.families.recipes import Recipe
from flaxformer_mt.parity.families.tokens import Padding, Tokens, select_rows
from flaxformer_mt.parity.program.diagnosis import Diagnosis, Select, most_specific
from flaxformer_mt.parity.program.differences import ProgramValues
from flaxformer_mt.parity.reports.comparison import SettingDifference
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.sides import Side
from flaxformer_mt.parity.trace.module_values import Tap
from flaxformer_mt.parity.trace.sites import Values

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
    """Compares our model and a reference on the same weights and batch, without dropout.

    Compared are the value of every sub-layer at real tokens, the logits, the loss in every
    convention, the gradient of every parameter and, on request, optimizer steps.

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

    Raises:
      UserError: the tensors are not the family's, a tap does not fit, or the batch is invalid.
    """
    pair = model_pair(family, torch_module, overrides, forward, recipe, tables)
    tokens, real = real_tokens(pair, batch)
    config, name = pair.ours.config, pair.ours.family.name
    strict = taps is not None
    used: Mapping[str, Tap | str] = (
        references.taps(name, config, torch_module) if taps is None else taps
    )

    select = functools.partial(select_rows, real=real)

    def judged(report: Report, ours: Side, theirs: Side) -> Report:
        if config.activation == "relu":
            kinks = _kinks(ours.values, theirs.values, select)
            report = dataclasses.replace(report, kinks=kinks)
        return report if strict else _without_misplaced_taps(report, theirs)

    def causes_of(ours: Side, theirs: Side) -> driver.Causes:
        tensors = {**pair.trained(), **pair.fixed()}
        logits, tolerance = ours.values["logits"], driver.VALUES[pair.dtype]
        return family_causes(pair.ours, tensors, tokens, real, logits, theirs, tolerance)

    train = None
    if num_steps:
        optimizers = trajectories.of_recipe(pair.ours.recipe, config.d_model, num_steps)
        of_steps = [real_tokens(pair, each)[0] for each in batches or [batch]]
        train = functools.partial(trajectories.train_both, pair, of_steps, num_steps, optimizers)
    return driver.compare_pair(
        name,
        pair,
        tokens,
        used,
        select,
        causes_of,
        strict=strict,
        train=train,
        judged=judged,
        settings=(
            differing_settings(config, torch_module, name) if isinstance(family, str) else ()
        ),
        notes=[PUBLISHED_TABLES] * (tables == "published"),
    )


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


def family_causes(
    ours: OurModel,
    tensors: Mapping[str, Any],
    tokens: Tokens,
    real: Padding,
    logits: np.ndarray,
    theirs: Side,
    tolerance: float,
) -> driver.Causes:
    """Returns the causes of differences of our values, of which the logits are given."""
    config = ours.config
    program, leaves = ours.traced(tensors, tokens)
    known, select = {**theirs.values, **theirs.again}, functools.partial(select_rows, real=real)
    special = positions.causes(config)
    model = ProgramValues(program, leaves, program.sites, known, select, tolerance, special)

    def of_loss() -> Diagnosis | None:
        settings = {"convention": ours.recipe.convention, "smoothing": ours.recipe.smoothing}
        found = losses.another_loss(
            logits,
            tokens.target_output,
            tokens.target_input,
            theirs.losses["loss"],
            pad_id=config.pad_id,
            **settings,
        )
        return most_specific(found, tolerance)

    return driver.Causes(model, of_loss)


HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "head_count", "h")
HEAD_COUNTS_OF = {"tunz": ("head_size",)}
"""Further ones of a family; elsewhere the name has another meaning."""
PADDING_IDS = ("padding_idx", "pad_id", "pad_idx", "src_pad_idx", "trg_pad_idx", "pad")


def differing_settings(
    config: TransformerConfig, module: nn.Module, family: str
) -> tuple[SettingDifference, ...]:
    """Returns the settings that a module contradicts, if its parts have one value only."""
    names: dict[str, tuple[str, ...]] = {"num_heads": HEAD_COUNTS + HEAD_COUNTS_OF.get(family, ())}
    if config.target_vocab_size:
        names["pad_id"] = PADDING_IDS
    found = []
    for name, attributes in names.items():
        stated = dict(_stated(module, attributes))
        ours = getattr(config, name)
        if len(set(stated.values())) == 1 and ours not in stated.values():
            where, theirs = next(iter(stated.items()))
            found.append(SettingDifference(name, ours, theirs, where))
    return tuple(found)


def _stated(module: nn.Module, attributes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for path, part in module.named_modules():
        for attribute in attributes:
            value = vars(part).get(attribute)
            if isinstance(value, int) and not isinstance(value, bool):
                yield f"{path}.{attribute}".lstrip("."), value
