"""Models with all that using them needs, and run folders that hold one.

A run folder made of a published model has a single checkpoint, 0, and can be used like any other.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt import config as configuration
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.interop import weights
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.trained_model import load_run

ORIGIN = "origin"
"""The folder in a run that keeps what a published folder said besides."""


@dataclasses.dataclass(frozen=True)
class Package:
    """A model with all that using it needs."""

    config: ExperimentConfig
    """How it is searched, and what training it further starts from."""
    params: dict[str, Any]
    """The model's parameters, without what they carry."""
    tokenizers: Tokenizers
    origin: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """What a published folder said besides, by file name, for the way back."""


def experiment(
    model: TransformerConfig, data: DataConfig, decode: DecodeConfig
) -> ExperimentConfig:
    """What a published model is searched with, and trained further: gently, and not for long."""
    return ExperimentConfig(
        model=model,
        data=data,
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=200, clip_norm=1.0),
        train=TrainConfig(num_steps=2000, eval_every=500, checkpoint_every=500, best_metric="bleu"),
        decode=decode,
    )


def read(folder: Path) -> Package:
    """Reads a run folder, with its best checkpoint.

    Raises:
      UserError: see `load_run`.
    """
    run = load_run(folder, "best")
    kept = folder / ORIGIN
    return Package(
        dataclasses.replace(run.config, model=run.model),
        run.params,
        run.tokenizers,
        {path.name: path.read_bytes() for path in kept.iterdir()} if kept.is_dir() else {},
    )


def write(package: Package, folder: Path) -> None:
    """Makes a run folder, whole or not at all.

    Raises:
      UserError: it exists, or cannot be written.
    """
    from flaxformer_mt.runs.checkpoint import write_params

    with atomic.new_folder(folder) as partial:
        package.tokenizers.save(partial / "tokenizer")
        write_params(partial, 0, weights.model_params(package.params))
        if package.origin:
            (partial / ORIGIN).mkdir()
        for name, content in package.origin.items():
            (partial / ORIGIN / name).write_bytes(content)
        text = configuration.to_json(package.config)
        (partial / "config.json").write_text(text, encoding="utf-8")
