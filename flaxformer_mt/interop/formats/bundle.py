"""A whole model: parameters with vocabularies and search options."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.runs.folder import read_origin
from flaxformer_mt.trained_model import load_run, write_model


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

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """Reads a run folder with its best checkpoint; errors as for `load_run`."""
        run = load_run(folder, "best")
        config = dataclasses.replace(run.config, model=run.model)
        return cls(config, run.params, run.tokenizers, read_origin(folder))

    def write_run(self, folder: Path) -> None:
        """Writes a run folder with a single checkpoint, of step 0; errors as for `write_model`."""
        write_model(folder, self.config, self.tokenizers, model_params(self.params), self.origin)


WITHOUT_EFFECT = frozenset({
    "batch_tokens", "num_devices", "max_source_length", "alignment_layer", "alignment_head", "seed",
})  # fmt: skip
"""Search options that do not decide which translation is found for a sentence."""


def unsupported_options(
    decode: DecodeConfig, supported: Collection[str], program: str
) -> list[str]:
    """Returns a line about each search option that a program does not support.

    `supported` are the fields with a counterpart, besides those of `WITHOUT_EFFECT`.
    """
    known = {*supported, *WITHOUT_EFFECT}
    return [
        f"decode.{field.name}={getattr(decode, field.name)} is not supported by {program}"
        for field in dataclasses.fields(decode)
        if field.name not in known and getattr(decode, field.name) != field.default
    ]


def experiment(model: TransformerConfig, decode: DecodeConfig, **data: Any) -> ExperimentConfig:
    """Returns the configuration of a published model, with cautious defaults for fine-tuning.

    `data` are fields of `DataConfig`, of the published vocabulary.
    """
    return ExperimentConfig(
        model=model,
        data=DataConfig(byte_fallback=False, target_row_length=128, **data),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=200, clip_norm=1.0),
        train=TrainConfig(num_steps=2000, eval_every=500, checkpoint_every=500, best_metric="bleu"),
        decode=decode,
    )
