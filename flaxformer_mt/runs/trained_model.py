"""Trained models, loaded from a run folder.

Orbax is imported on use, so that importing this module is cheap.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig, TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.folder import read_config, read_fingerprints, read_tokenizers
from flaxformer_mt.runs.layout import TOKENIZER, CheckpointSelector


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model with its tokenizers."""

    config: ExperimentConfig
    params: Any
    """The parameters, as nested dicts of arrays."""
    tokenizers: Tokenizers
    step: int
    """Number of training steps made."""
    folder: Path = Path()
    """The run folder that it was loaded from."""

    @property
    def model(self) -> TransformerConfig:
        """The configuration of the Transformer, with the vocabulary sizes filled in."""
        source, target = self.tokenizers.source, self.tokenizers.target
        return with_vocabulary_sizes(self.config.model, source.vocab_size, target.vocab_size)


def load_run(folder: str | Path, checkpoint: CheckpointSelector = "best") -> TrainedModel:
    """Loads the model of a run folder.

    Raises:
      UserError: the folder, or a part of it, is missing or damaged, or its vocabulary is not the
        one that the parameters were trained with.
    """
    config = read_config(folder)
    tokenizers = read_tokenizers(folder)
    from flaxformer_mt.runs.checkpoint import restore_params

    step, params = restore_params(folder, checkpoint)
    run = TrainedModel(config, params, tokenizers, step, Path(folder))
    _check_vocabularies(run)
    return run


def _check_vocabularies(run: TrainedModel) -> None:
    """Checks that the embedding tables have the sizes of the vocabularies."""
    tokenizers, model = run.tokenizers, run.model
    for side, tokenizer, size in (
        ("source", tokenizers.source, model.source_vocab_size),
        ("target", tokenizers.target, model.target_vocab_size),
    ):
        table = run.params.get(f"{side}_embedding", run.params["target_embedding"])["embedding"]
        if not tokenizer.vocab_size <= size == len(table):
            raise UserError(
                f"{run.folder / TOKENIZER} has {tokenizer.vocab_size} {side} tokens, but the "
                f"model was trained with {len(table)}: restore that tokenizer"
            )


def describe_run(folder: str | Path, checkpoint: CheckpointSelector = "last") -> dict[str, Any]:
    """Returns what identifies a trained model, as JSON values.

    The fingerprints of the training data are None if the run folder does not have them.

    Raises:
      UserError: see `load_run`.
    """
    from flax.traverse_util import flatten_dict

    run = load_run(folder, checkpoint)
    return {
        "step": run.step,
        "parameter_count": sum(leaf.size for leaf in flatten_dict(run.params).values()),
        "parameters_sha256": parameters_sha256(run.params),
        "tokenizer_fingerprints": {
            "source": run.tokenizers.source.fingerprint,
            "target": run.tokenizers.target.fingerprint,
        },
        "data_fingerprints": read_fingerprints(folder),
        "config": configuration.to_dict(run.config),
    }


def parameters_sha256(params: Any) -> str:
    """Returns the SHA-256, in hex, of the parameters as little-endian float32.

    Arrays are hashed in the order of their paths (`decoder/final_norm/scale`, ...), the elements of
    each in C order.
    """
    from flax.traverse_util import flatten_dict

    digest = hashlib.sha256()
    for _, leaf in sorted(flatten_dict(params, sep="/").items()):
        digest.update(np.asarray(leaf).astype("<f4").tobytes())
    return digest.hexdigest()
