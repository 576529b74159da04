"""The configuration of a whole experiment."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config.data import DataConfig
from flaxformer_mt.config.decode import DecodeConfig
from flaxformer_mt.config.fields import (
    FieldRole,
    names_with,
    require,
    require_type,
    shown,
    suggestion,
)
from flaxformer_mt.config.model import TransformerConfig
from flaxformer_mt.config.optimizer import OptimizerConfig
from flaxformer_mt.config.parallel import ParallelConfig
from flaxformer_mt.config.train import TrainConfig


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Everything that defines a training run, apart from the folder that it is written to."""

    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        for name, kind in groups().items():
            value = getattr(self, name)
            require_type(
                isinstance(value, kind),
                f"ExperimentConfig.{name}={shown(value)}: must be a {kind.__name__}",
            )
        stacks = ["num_decoder_layers", "num_encoder_layers"][: 1 + self.model.has_inputs]
        for name in stacks:
            # Checkpoints cannot hold the parameters of no layers.
            require(getattr(self.model, name) > 0, f"model.{name}=0: must be at least 1 in a run")
        require(
            self.model.has_inputs or not self.train.teacher_forced_metrics,
            "train.teacher_forced_metrics are for translation models, and model.has_inputs=False",
        )
        for name in ("best_metric", "early_stopping_metric"):
            metric = getattr(self.train, name)
            require(
                self.model.has_inputs or metric not in ("bleu", "chrf"),
                f"train.{name}={metric} is for translation models, and model.has_inputs=False",
            )
        require(
            self.train.label_smoothing_convention != "non_pad_kl" or self.model.pad_id >= 0,
            f"train.label_smoothing_convention=non_pad_kl needs a padding token, and model.pad_id="
            f"{self.model.pad_id}: use others_kl",
        )
        weight, layers = self.train.guided_alignment_weight, self.model.num_decoder_layers
        require(
            not weight or bool(self.data.alignments),
            f"train.guided_alignment_weight={weight} needs data.alignments, a file of links",
        )
        layer = self.train.guided_alignment_layer
        require(
            not weight or -layers <= layer < layers,
            f"train.guided_alignment_layer={layer}: the decoder has {layers} layers, counted from "
            "0, or from the last as -1",
        )
        field = "target_row_length" if self.data.batching == "packed" else "bucket_lengths[-1]"
        _, row_length = self.data.row_lengths
        require(
            self.train.batch_tokens % row_length == 0,
            f"train.batch_tokens={self.train.batch_tokens} is not a multiple of "
            f"data.{field}={row_length}",
        )

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

    Raises:
      TypeError: there is no such group or field, or a value is of another type.
      UserError: a value is invalid.
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
        replaced[group] = dataclasses.replace(getattr(config, group), **values)
    return dataclasses.replace(config, **replaced)


def values_with(config: ExperimentConfig, *roles: FieldRole) -> dict[str, Any]:
    """Returns the values of all options that have any of the roles: {"data.max_words": 0, ...}."""
    return {
        f"{group}.{field.name}": getattr(getattr(config, group), field.name)
        for group, kind in groups().items()
        for field in dataclasses.fields(kind)
        if field.name in names_with(kind, *roles)
    }
