"""A whole model: parameters with vocabularies and search options."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers


@dataclasses.dataclass(frozen=True)
class ModelBundle:
    """A model with everything that is needed to use it."""

    config: ExperimentConfig
    """Its model, its search options, and the defaults for fine-tuning it."""
    params: dict[str, Any]
    """The model's parameters, without carried tensors."""
    tokenizers: Tokenizers
    origin: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Files of a published folder that have no counterpart in ours, by name. They are kept to write
    the same folder again."""


def experiment(
    model: TransformerConfig, data: DataConfig, decode: DecodeConfig
) -> ExperimentConfig:
    """Returns the configuration of a published model, with cautious defaults for fine-tuning."""
    return ExperimentConfig(
        model=model,
        data=data,
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=200, clip_norm=1.0),
        train=TrainConfig(num_steps=2000, eval_every=500, checkpoint_every=500, best_metric="bleu"),
        decode=decode,
    )
