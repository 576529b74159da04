"""Trained models, loaded from a run folder.

Orbax is imported on use, so that importing this module is cheap.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt import config as configuration
from flaxformer_mt import distributed
from flaxformer_mt.config import ExperimentConfig, TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.memory_limits import LESS_ON_DEVICE, explained_exhaustion
from flaxformer_mt.runs import atomic, data_file
from flaxformer_mt.runs.folder import (
    fingerprints,
    read_config,
    read_fingerprints,
    read_tokenizers,
    write_run,
)
from flaxformer_mt.runs.layout import CONFIG, TOKENIZER, CheckpointSelector
from flaxformer_mt.runs.step_folders import metric_of


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
    """Loads the model of a run; `UserError` if a part is missing, damaged or of another run."""
    config = read_config(folder)
    tokenizers = read_tokenizers(folder)
    from flaxformer_mt.runs.checkpoint import restore_params

    with explained_exhaustion("loading the model", LESS_ON_DEVICE):
        step, params = restore_params(folder, checkpoint)
    run = TrainedModel(config, params, tokenizers, step, Path(folder))
    _check_vocabularies(run)
    return run


def write_model(
    folder: str | Path,
    config: ExperimentConfig,
    tokenizers: Tokenizers,
    params: Any,
    origin: Mapping[str, bytes] = {},
    step: int = 0,
) -> None:
    """Writes a run folder with one checkpoint, atomically; of several processes, all call this.

    Raises:
      UserError: the folder exists or cannot be written, or the embedding tables do not have the
        sizes of the vocabularies.
    """
    from flaxformer_mt.runs.checkpoint import on_this_host, write_params

    params = on_this_host(params)
    _check_vocabularies(TrainedModel(config, params, tokenizers, step, Path(folder)))
    if distributed.is_main():
        with atomic.new_folder(Path(folder), parents=True) as partial:
            write_run(partial, config, {}, tokenizers, origin)
            write_params(partial, step, params)
    distributed.barrier("the run folder is written")


def _check_vocabularies(run: TrainedModel) -> None:
    tokenizers, model = run.tokenizers, run.model
    for side, tokenizer, size in (
        ("source", tokenizers.source, model.source_vocab_size),
        ("target", tokenizers.target, model.target_vocab_size),
    ):
        tables = [run.params.get(f"{name}_embedding", {}) for name in (side, "target")]
        table = next((each["embedding"] for each in tables if "embedding" in each), None)
        if table is None:
            raise UserError(
                f"{run.folder}: the parameters of step {run.step} are not those of the model in "
                f"{CONFIG}: there is no target_embedding/embedding, but {', '.join(run.params)}"
            )
        if not tokenizer.vocab_size <= size == len(table):
            raise UserError(
                f"{run.folder / TOKENIZER} has {tokenizer.vocab_size} {side} tokens, but the "
                f"model was trained with {len(table)}: restore that tokenizer"
            )


def describe_run(
    folder: str | Path,
    checkpoint: CheckpointSelector = "last",
    announce: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Returns what a trained model is and what identifies it, as JSON values.

    What it does not have is None, such as the metric of a checkpoint that was not validated.
    """
    from flax.traverse_util import flatten_dict

    from flaxformer_mt.runs.checkpoint import whole_checkpoints

    run = load_run(folder, checkpoint)
    model, metric = run.model, run.config.train.best_metric
    leaves = flatten_dict(run.params, sep="/")
    return {
        "step": run.step,
        "checkpoints": {
            str(step): {metric: None if score == -math.inf else round(metric_of(metric, score), 4)}
            for step, score in sorted(whole_checkpoints(folder, announce).items())
        },
        "sizes": {
            "source_vocab_size": model.source_vocab_size,
            "target_vocab_size": model.target_vocab_size,
            "head_dim": model.key_width,
            "value_dim": model.value_width,
        },
        "parameter_count": sum(leaf.size for leaf in leaves.values()),
        "parameters": {path: list(leaf.shape) for path, leaf in sorted(leaves.items())},
        "parameters_sha256": parameters_sha256(run.params),
        "tokenizer_fingerprints": fingerprints(run.tokenizers),
        "data_fingerprints": read_fingerprints(folder),
        "hold_out": data_file.read(folder).get(data_file.HOLD_OUT),
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
