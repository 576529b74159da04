"""Which changes of a configuration a run may be continued with."""

import dataclasses
from typing import Any

from flaxformer_mt.config.data import CorpusConfig
from flaxformer_mt.config.experiment import ExperimentConfig, groups
from flaxformer_mt.config.fields import FieldRole, names_with, roles_of
from flaxformer_mt.config.serialization import to_dict

_FREE_ROLES = {FieldRole.SEARCH, FieldRole.START, FieldRole.RUNNING}

RESUMABLE_FIELDS = frozenset(
    f"{group}.{field.name}"
    for group, kind in groups().items()
    for field in dataclasses.fields(kind)
    if roles_of(field) <= _FREE_ROLES
)
"""Options with whose change a run may be continued: its parameters do not depend on them."""


def differences(stored: ExperimentConfig, given: ExperimentConfig) -> list[str]:
    """Returns what forbids continuing a run: "model.d_model: 128 in the run, 256 now", ..."""
    resumable = RESUMABLE_FIELDS
    if stored.optimizer.schedule == "one_cycle" and not stored.optimizer.total_steps:
        # The learning rate of every step depends on the number of steps.
        resumable = resumable - {"train.num_steps"}
    ours, theirs = _without_paths(to_dict(stored)), _without_paths(to_dict(given))
    return [
        f"{group}.{name}: {value} in the run, {theirs[group][name]} now"
        for group, values in ours.items()
        for name, value in values.items()
        if value != theirs[group][name] and f"{group}.{name}" not in resumable
    ]


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Removes the paths of the corpora, which may have moved, in place."""
    for corpora in ("train_corpora", "valid_corpora", "test_corpora"):
        for corpus in values["data"][corpora]:
            for name in names_with(CorpusConfig, FieldRole.RUNNING):
                del corpus[name]
    return values
