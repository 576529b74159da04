"""A run folder, read: all that using a trained model needs.

JAX and Orbax are imported where parameters are read: the configuration alone is there at once.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig, TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

CheckpointSelector = Literal["best", "last"] | int
"""The best by validation, the newest, or that of a step."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model with its tokenizers."""

    config: ExperimentConfig
    params: Any
    """The model's parameters: nested dicts of arrays."""
    tokenizers: Tokenizers
    step: int
    """Training steps behind the parameters."""
    folder: Path = Path()
    """Where it was read."""

    @property
    def model(self) -> TransformerConfig:
        """Which Transformer, with the sizes of the vocabularies filled in."""
        source, target = self.tokenizers.source, self.tokenizers.target
        return with_vocabulary_sizes(self.config.model, source.vocab_size, target.vocab_size)


def read_config(folder: str | Path) -> ExperimentConfig:
    """Reads the configuration of a run.

    Raises:
      UserError: there is no such folder, or its config.json is missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it has no config.json")
    try:
        return configuration.from_json(path.read_text(encoding="utf-8"))
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def load_run(folder: str | Path, checkpoint: CheckpointSelector = "best") -> Run:
    """Reads a run folder, with one of its checkpoints.

    Raises:
      UserError: the folder, or a part of it, is missing or damaged, or its vocabulary is not the
        one that the parameters were trained with.
    """
    config = read_config(folder)
    tokenizers = Tokenizers.load(Path(folder) / "tokenizer")
    from flaxformer_mt.runs.checkpoint import restore_params

    step, params = restore_params(folder, checkpoint)
    run = Run(config, params, tokenizers, step, Path(folder))
    _check_vocabularies(run)
    return run


def _check_vocabularies(run: Run) -> None:
    """Refuses tokenizers with more, or other, tokens than the parameters have rows for."""
    tokenizers, model = run.tokenizers, run.model
    for side, tokenizer, size in (
        ("source", tokenizers.source, model.source_vocab_size),
        ("target", tokenizers.target, model.target_vocab_size),
    ):
        table = run.params.get(f"{side}_embedding", run.params["target_embedding"])["embedding"]
        if not tokenizer.vocab_size <= size == len(table):
            raise UserError(
                f"{run.folder / 'tokenizer'} has {tokenizer.vocab_size} {side} tokens, but the "
                f"model was trained with {len(table)}: put back the tokenizer of that training"
            )


def describe_run(folder: str | Path, checkpoint: CheckpointSelector = "last") -> dict[str, Any]:
    """What tells one trained model from another, as JSON values.

    The fingerprints of the training data are None in a folder that does not have them.

    Raises:
      UserError: see `load_run`.
    """
    from flax.traverse_util import flatten_dict

    run = load_run(folder, checkpoint)
    data = Path(folder) / "data.json"
    return {
        "step": run.step,
        "parameter_count": sum(leaf.size for leaf in flatten_dict(run.params).values()),
        "parameters_sha256": parameters_sha256(run.params),
        "tokenizer_fingerprints": {
            "source": run.tokenizers.source.fingerprint,
            "target": run.tokenizers.target.fingerprint,
        },
        "data_fingerprints": json.loads(data.read_text()) if data.is_file() else None,
        "config": configuration.to_dict(run.config),
    }


def parameters_sha256(params: Any) -> str:
    """SHA-256, in hex, of the parameters as little-endian float32.

    The arrays follow each other in the order of their paths (`decoder/final_norm/scale`, ...),
    the elements of each in C order.
    """
    from flax.traverse_util import flatten_dict

    digest = hashlib.sha256()
    for _, leaf in sorted(flatten_dict(params, sep="/").items()):
        digest.update(np.asarray(leaf).astype("<f4").tobytes())
    return digest.hexdigest()
