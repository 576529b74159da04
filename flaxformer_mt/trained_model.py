"""Trained models, loaded from a run folder.

Orbax is imported on use, so that importing this module is cheap.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from flaxformer_mt import atomic, distributed
from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, read_tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.memory_limits import LESS_ON_DEVICE, explained_exhaustion
from flaxformer_mt.model.functional import parameter_shapes, with_layer_options
from flaxformer_mt.run_layout import CONFIG, TOKENIZER, CheckpointSelector
from flaxformer_mt.runs import data_file
from flaxformer_mt.runs.folder import (
    described_change,
    read_config,
    read_fingerprints,
    read_history,
    require_only_written,
    write_run,
)
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

    def __repr__(self) -> str:
        return f"<TrainedModel {str(self.folder)!r}, step {self.step:,}>"

    @property
    def model(self) -> TransformerConfig:
        """The configuration of the Transformer, with the vocabulary sizes filled in."""
        return self.tokenizers.with_sizes(self.config.model)


def load_run(folder: str | Path, checkpoint: CheckpointSelector = "best") -> TrainedModel:
    """Loads the model of a run; `UserError` if a part is missing, damaged or of another run."""
    config = read_config(folder)
    tokenizers = read_tokenizers(folder)
    from flaxformer_mt.runs.checkpoint import restore_params

    check = functools.partial(_check_shapes, Path(folder), config, tokenizers)
    with explained_exhaustion("loading the model", LESS_ON_DEVICE):
        step, params = restore_params(folder, checkpoint, check)
    return TrainedModel(config, params, tokenizers, step, Path(folder))


def write_model(
    folder: str | Path,
    config: ExperimentConfig,
    tokenizers: Tokenizers,
    params: Any,
    origin: Mapping[str, bytes] = {},
    step: int = 0,
    replace: bool = False,
) -> None:
    """Writes a run folder with one checkpoint, atomically; of several processes, all call this.

    `replace` says whether such a folder, with nothing else in it, is replaced.

    Raises:
      UserError: the folder exists or cannot be written, or the embedding tables do not have the
        sizes of the vocabularies.
    """
    from flaxformer_mt.runs.checkpoint import on_this_host, write_params

    config = dataclasses.replace(config, model=with_layer_options(config.model))
    params = on_this_host(params)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(params, sep="/").items()}
    _check_shapes(Path(folder), config, tokenizers, shapes)
    if distributed.is_main():
        check = require_only_written if replace else False
        with atomic.new_folder(Path(folder), replace=check) as partial:
            fingerprints = {data_file.TOKENIZER: tokenizers.fingerprints}
            write_run(partial, config, tokenizers.files, fingerprints, origin)
            write_params(partial, step, params)
    distributed.barrier("the run folder is written")


def _check_shapes(
    folder: Path, config: ExperimentConfig, tokenizers: Tokenizers, shapes: Mapping[str, Any]
) -> None:
    """Checks the shapes of parameters, by path, against the vocabularies and the configuration."""
    model = tokenizers.with_sizes(config.model)
    expected = parameter_shapes(model)
    for side, tokenizer, size in (
        ("source", tokenizers.source, model.source_vocab_size),
        ("target", tokenizers.target, model.target_vocab_size),
    ):
        tables = [f"{name}_embedding/embedding" for name in (side, "target")]
        rows, *_ = next((shapes[name] for name in tables if shapes.get(name)), (size,))
        if not tokenizer.vocab_size <= size == rows:
            raise UserError(
                f"{folder / TOKENIZER} has {tokenizer.vocab_size} {side} tokens, but the "
                f"model was trained with {rows}: restore that tokenizer"
            )
    for path in sorted(expected.keys() | shapes.keys()):
        ours, theirs = (
            f"{list(each[path])}" if path in each else "nothing" for each in (expected, shapes)
        )
        if ours != theirs:
            raise UserError(
                f"the parameters are not those of the model in {folder / CONFIG}: {path} is "
                f"{theirs}, and should be {ours}"
            )


def describe_run(
    folder: str | Path,
    checkpoint: CheckpointSelector = "last",
    announce: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Returns what a trained model is and what identifies it, as JSON values.

    What it does not have is None, such as the metric of a checkpoint that was not validated.
    """
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
        "parameter_count": sum(leaf.size for leaf in leaves.values()),
        "sizes": {
            "source_vocab_size": model.source_vocab_size,
            "target_vocab_size": model.target_vocab_size,
            "head_dim": model.key_width,
            "value_dim": model.value_width,
        },
        "hold_out": data_file.read(folder).get(data_file.HOLD_OUT),
        "changes": [
            f"after step {entry['step']}: {described_change(entry)}"
            for entry in read_history(folder)
        ]
        or None,
        "config": configuration.to_dict(run.config),
        "data_fingerprints": read_fingerprints(folder),
        "tokenizer_fingerprints": run.tokenizers.fingerprints,
        "parameters_sha256": parameters_sha256(run.params),
        "parameters": {path: list(leaf.shape) for path, leaf in sorted(leaves.items())},
    }


def parameters_sha256(params: Any) -> str:
    """Returns the SHA-256, in hex, of the parameters as little-endian float32.

    Arrays are hashed in the order of their paths (`decoder/final_norm/scale`, ...), the elements of
    each in C order.
    """
    digest = hashlib.sha256()
    for _, leaf in sorted(flatten_dict(params, sep="/").items()):
        digest.update(np.asarray(leaf).astype("<f4").tobytes())
    return digest.hexdigest()
