"""The configuration of a whole experiment."""

import dataclasses
import typing
from typing import Any

from flaxformer_mt.config.data import DataConfig
from flaxformer_mt.config.decode import DecodeConfig
from flaxformer_mt.config.fields import FieldRole, names_with, require, shown
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
            require(
                isinstance(value, kind),
                f"ExperimentConfig.{name}={shown(value)}: must be a {kind.__name__}",
            )
        stacks = ["num_decoder_layers", "num_encoder_layers"][: 1 + self.model.has_inputs]
        for name in stacks:
            # Checkpoints cannot hold the parameters of no layers.
            require(getattr(self.model, name) > 0, f"model.{name}=0: must be at least 1 in a run")
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


def values_with(config: ExperimentConfig, *roles: FieldRole) -> dict[str, Any]:
    """Returns the values of all options that have any of the roles: {"data.max_words": 0, ...}."""
    return {
        f"{group}.{field.name}": getattr(getattr(config, group), field.name)
        for group, kind in groups().items()
        for field in dataclasses.fields(kind)
        if field.name in names_with(kind, *roles)
    }
