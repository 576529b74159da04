"""Compares our model with values that another program saved for the same weights and tokens."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import numpy as np
import torch
from flax.traverse_util import flatten_dict

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity import driver, references
from flaxformer_mt.parity.compare_family import PUBLISHED_TABLES, family_causes
from flaxformer_mt.parity.diagnosis.inputs import select_rows
from flaxformer_mt.parity.model_pair import OurModel
from flaxformer_mt.parity.published import PublishedModel, Tables
from flaxformer_mt.parity.recipes import recipe
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.rows import difference, largest
from flaxformer_mt.parity.saved.files import SavedValues, check_sites
from flaxformer_mt.parity.settings import SettingDifference
from flaxformer_mt.parity.sides import COMPILER_OPTIONS, Side, precision
from flaxformer_mt.parity.tokens import Padding, Tokens, check_special_tokens, padding
from flaxformer_mt.parity.trace import Values, values_of_module

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


EXPLAINS = 1e-2
"""A change is the cause if it leaves at most this part of the difference."""

_NUMBERS: dict[str, tuple[float, ...]] = {
    "norm_epsilon": tuple(10.0**-power for power in range(3, 13)),
    "position_base": (1e3, 1e4, 1e5, 5e5, 1e6),
    "position_offset": (0, 1, 2, 3, 4),
    "relative_position_max_distance": (8, 16, 32, 64, 128, 256, 512),
}
_MAX_HEADS = 64
_PROMISING = 8
"""How many of the changes of one setting are tried together with those of another: the ones that
leave least of the difference."""


class Change(NamedTuple):
    """Other settings for the same weights."""

    values: dict[str, Any]
    dropped: tuple[str, ...] = ()
    """Given fields that are no longer given."""


class Search(NamedTuple):
    """The saved values of a published model, compared under other settings."""

    model: PublishedModel
    given: Mapping[str, Any]
    saved: SavedValues
    tables: Tables

    def explanation(self, config: TransformerConfig) -> tuple[SettingDifference, ...]:
        """Returns the settings with which the reference computes the saved values, if any."""
        enough = EXPLAINS * self._difference(config)
        tried = {config}
        scored: list[tuple[float, Change]] = []
        for changes in self._rounds(config, scored):
            best, least = None, enough
            for change in changes:
                other = self._configuration(change)
                if other is None or other in tried:
                    continue
                tried.add(other)
                left = self._difference(other)
                scored.append((left, change))
                if left < least:
                    best, least = (change, other), left
            if best is not None:
                change, other = best
                return tuple(
                    SettingDifference(name, ours, theirs, "the saved values")
                    for name in dict.fromkeys([*change.dropped, *change.values])
                    if (ours := getattr(config, name)) != (theirs := getattr(other, name))
                )
        return ()

    def _configuration(self, change: Change) -> TransformerConfig | None:
        given = {name: value for name, value in self.given.items() if name not in change.dropped}
        try:
            config = self.model.unchecked(given | change.values)
            check_special_tokens(config)
        except UserError:  # Not a configuration that this model can have.
            return None
        return config

    def _difference(self, config: TransformerConfig) -> float:
        try:
            module = self.model.reference(config, "float64", self.tables)
        except UserError:
            return np.inf
        tokens = self.saved.tokens(config)
        real = padding(tokens, config.pad_id)
        shapes = {site: value.shape for site, value in self.saved.values.items()}
        known = references.taps(self.model.family.name, config, module)
        taps = {site: tap for site, tap in known.items() if site in shapes}
        source, target = (torch.tensor(array).long() for array in tokens[:2])
        with precision("float64"), torch.no_grad():
            run = values_of_module(
                module, taps, lambda module: module(source, target), shapes, strict=False
            )
        found = run.values | {"logits": run.output.numpy().reshape(*target.shape, -1)}
        if any(found[site].shape != shapes[site] for site in found.keys() & shapes.keys()):
            return np.inf
        worst = 0.0
        for site in found.keys() & shapes.keys():
            ours, theirs = (
                select_rows(site, values[site], real) for values in (found, self.saved.values)
            )
            worst = max(worst, difference(ours, theirs) / (largest(theirs) or 1.0))
        return worst

    def _rounds(
        self, config: TransformerConfig, scored: Sequence[tuple[float, Change]]
    ) -> Iterator[list[Change]]:
        changes = [
            Change({name: value})
            for name, values in self._alternatives(config).items()
            for value in values
        ]
        yield [*(Change({}, (name,)) for name in self.given), *changes]
        yield [
            Change(change.values, (name,))
            for name in self.given
            for change in changes
            if name not in change.values
        ]
        promising = sorted(scored, key=lambda each: each[0])[:_PROMISING]
        yield [
            Change(first.values | second.values, first.dropped)
            for _, first in promising
            for second in changes
            if not second.values.keys() & first.values.keys()
        ]

    def _alternatives(self, config: TransformerConfig) -> dict[str, list[Any]]:
        hints = get_type_hints(TransformerConfig)
        found: dict[str, list[Any]] = {
            "num_heads": [
                n
                for n in range(1, _MAX_HEADS + 1)
                if config.d_model % n == 0 or self.model.family.head_widths != "even"
            ],
            # Padding is at the end, or at the start, of some row.
            "pad_id": np.unique(self.saved.inputs["source"][:, [0, -1]]).tolist(),
        }
        for name in sorted(self.model.family.open_switches):
            choices = (False, True) if hints[name] is bool else get_args(hints[name])
            found[name] = list(_NUMBERS.get(name, choices))
        return {
            name: [value for value in values if value != getattr(config, name)]
            for name, values in found.items()
        }
