"""The configuration of a whole experiment, and with which changes its run may be continued."""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from flaxformer_mt.config import relations
from flaxformer_mt.config.data import CorpusConfig, DataConfig
from flaxformer_mt.config.decode import DecodeConfig
from flaxformer_mt.config.fields import Checked, FieldRole, names_with, roles_of, shown, suggestion
from flaxformer_mt.config.model import TransformerConfig
from flaxformer_mt.config.optimizer import OptimizerConfig
from flaxformer_mt.config.train import ParallelConfig, TrainConfig
from flaxformer_mt.errors import UserTypeError


@dataclasses.dataclass(frozen=True, repr=False)
class ExperimentConfig(Checked):
    """Everything that defines a training run, apart from the folder that it is written to."""

    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    _relations = relations.EXPERIMENT

    def __post_init__(self) -> None:
        for name, kind in groups().items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise UserTypeError(
                    f"ExperimentConfig.{name}={shown(value)}: must be a {kind.__name__}"
                )
        self._check()

    @property
    def rows_per_batch(self) -> int:
        """B: rows in a training batch of the longest rows."""
        return self.train.batch_tokens // self.data.row_lengths[1]


def groups() -> dict[str, type]:
    """Returns the configuration class of each group of an experiment, by name."""
    return typing.get_type_hints(ExperimentConfig)


def with_changes(
    config: ExperimentConfig, changes: Mapping[str, Mapping[str, Any]]
) -> ExperimentConfig:
    """Returns a configuration with other values: `{"train": {"num_steps": 100}}`.

    Of `warmup` and `warmup_steps` of the optimizer, the one that is given replaces the other.

    TypeError if there is no such group or field, UserError if a value is invalid.
    """
    replaced = {}
    for group, values in changes.items():
        if group not in groups():
            raise TypeError(
                f"a configuration has no group {group}{suggestion(group, groups())}: it has "
                f"{', '.join(groups())}"
            )
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{group} must be a dict of fields and their values, not {type(values).__name__}"
            )
        names = [field.name for field in dataclasses.fields(groups()[group])]
        for name in values:
            if name not in names:
                raise TypeError(f"{group} has no field {name}{suggestion(name, names)}")
        before = getattr(config, group)
        if isinstance(before, OptimizerConfig):
            before = before.without_other_warmup(values)
        replaced[group] = dataclasses.replace(before, **values)
    return dataclasses.replace(config, **replaced)


def values_with(config: ExperimentConfig, *roles: FieldRole) -> dict[str, Any]:
    """Returns the values of all options that have any of the roles: {"data.max_words": 0, ...}."""
    return {
        f"{group}.{field.name}": getattr(getattr(config, group), field.name)
        for group, kind in groups().items()
        for field in dataclasses.fields(kind)
        if field.name in names_with(kind, *roles)
    }


_FREE_ROLES = {FieldRole.SEARCH, FieldRole.START, FieldRole.RUNNING}
_FIXED_ROLES = {
    FieldRole.SHAPES,
    FieldRole.VOCABULARY,
    FieldRole.INITIALIZATION,
    FieldRole.ARCHITECTURE,
}

Continuation: TypeAlias = Literal["free", "noted", "accepted", "never"]
"""Whether a run may be continued with another value of an option. free: its parameters do not
depend on it; noted: only their rounding or random draws do; accepted: with --accept-changes; never:
the parameters would not fit, or not mean the same."""


def _continuation(name: str, roles: Collection[FieldRole]) -> Continuation:
    if _FIXED_ROLES.intersection(roles):
        return "never"
    if _FREE_ROLES.issuperset(roles):
        return "free"
    is_precision = name in ("model.dtype", "model.param_dtype")
    if not is_precision and {*_FREE_ROLES, FieldRole.NUMERICS}.issuperset(roles):
        return "noted"
    return "accepted"


CONTINUATIONS: Mapping[str, Continuation] = {
    name: _continuation(name, roles_of(field))
    for group, kind in groups().items()
    for field in dataclasses.fields(kind)
    for name in [f"{group}.{field.name}"]
}
"""Of each option."""


def changes(stored: ExperimentConfig, given: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the JSON values, before and after, of options that are not free and differ."""
    resumable = {name for name, kind in CONTINUATIONS.items() if kind == "free"}
    if stored.optimizer.schedule_has_end and not stored.optimizer.total_steps:
        # The learning rate of every step depends on the number of steps.
        resumable.remove("train.num_steps")
    ours, theirs = _without_paths(stored), _without_paths(given)
    return {
        f"{group}.{name}": (value, theirs[group][name])
        for group, values in ours.items()
        for name, value in values.items()
        if value != theirs[group][name] and f"{group}.{name}" not in resumable
    }


def differences(stored: ExperimentConfig, given: ExperimentConfig) -> dict[str, str]:
    """Returns `changes` in words: {"model.d_model": "model.d_model: 128 in the run, 256 now"}."""
    described = {}
    for name, (before, after) in changes(stored, given).items():
        if isinstance(before, tuple) and isinstance(after, tuple):
            # Of long lists, only what differs.
            ours = [each for each in before if each not in after]
            theirs = [each for each in after if each not in before]
            before, after = (ours, theirs) if ours or theirs else (before, after)
        described[name] = f"{name}: {before} in the run, {after} now"
    return described


def _without_paths(config: ExperimentConfig) -> dict[str, Any]:
    """Returns a configuration without the paths of the corpora, which may have moved."""
    values = dataclasses.asdict(config)
    for corpora in ("train_corpora", "valid_corpora", "test_corpora"):
        for corpus in values["data"][corpora]:
            for name in names_with(CorpusConfig, FieldRole.RUNNING):
                del corpus[name]
    return values
