"""A run folder, read: all that using a trained model needs."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flax.traverse_util import flatten_dict

from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.checkpoint import restore_params

Checkpoint = Literal["best", "last"] | int
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


def load_run(folder: str | Path, checkpoint: Checkpoint = "best") -> Run:
    """Reads a run folder, with one of its checkpoints.

    Raises:
      UserError: the folder, or a part of it, is missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it has no config.json")
    try:
        config = configuration.from_json(path.read_text(encoding="utf-8"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    tokenizers = Tokenizers.load(folder / "tokenizer")
    step, params = restore_params(folder, checkpoint)
    return Run(config, params, tokenizers, step)


def describe_run(folder: str | Path, checkpoint: Checkpoint = "last") -> dict[str, Any]:
    """What tells one trained model from another, as JSON values.

    The fingerprints of the training data are None in a folder that does not have them.

    Raises:
      UserError: see `load_run`.
    """
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
    digest = hashlib.sha256()
    for _, leaf in sorted(flatten_dict(params, sep="/").items()):
        digest.update(np.asarray(leaf).astype("<f4").tobytes())
    return digest.hexdigest()
