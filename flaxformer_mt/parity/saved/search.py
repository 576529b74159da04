"""Finds the settings with which the published model computes the saved values.

Every setting that tensors do not determine is changed in turn, and the reference is run again; if
no change leaves almost nothing of the difference, two are changed at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import torch

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity import references
from flaxformer_mt.parity.diagnosis.inputs import select_rows
from flaxformer_mt.parity.published import PublishedModel, Tables
from flaxformer_mt.parity.rows import difference, largest
from flaxformer_mt.parity.saved.files import SavedValues
from flaxformer_mt.parity.settings import SettingDifference
from flaxformer_mt.parity.sides import precision
from flaxformer_mt.parity.tokens import check_special_tokens, padding
from flaxformer_mt.parity.trace import values_of_module

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
