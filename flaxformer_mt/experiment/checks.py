"""The checks of a run's configuration, each once and with what it needs as arguments.

Fields check their own bounds, and `config/relations.py` that they go together. Here are the rules
that need the devices, a run folder, text or a vocabulary, in the order in which these are known.
"""

import functools
from pathlib import Path
from typing import Any

import jax

from flaxformer_mt import config as configuration
from flaxformer_mt.config import (
    ExperimentConfig,
    ParallelConfig,
    TransformerConfig,
    with_vocabulary_sizes,
)
from flaxformer_mt.config.optimizer import KINDS
from flaxformer_mt.data.stream.blocks import Curriculum
from flaxformer_mt.data.stream.placement import row_shards
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, read_tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.functional import init
from flaxformer_mt.runs import step_folders
from flaxformer_mt.runs.folder import ACCEPT, read_config
from flaxformer_mt.training.devices import make_devices, seed_key
from flaxformer_mt.training.memory import require_training_memory
from flaxformer_mt.training.objective import CROSS_ENTROPY, UserObjective
from flaxformer_mt.training.optimizer import UserOptimizer, make_optimizer, make_schedule
from flaxformer_mt.training.parameters import split


def check_config(
    config: ExperimentConfig,
    objective: UserObjective | None = None,
    optimizer: UserOptimizer | None = None,
    curriculum: Curriculum | None = None,
    *,
    memory: bool = False,
) -> None:
    """Checks what needs only the configuration, the functions given with it, and the devices.

    `memory`: whether these devices must have what training needs at the very least.
    """
    model, train = config.model, config.train
    _require_function("train.objective", train.objective, CROSS_ENTROPY, objective)
    _require_function("data.curriculum", config.data.curriculum, "", curriculum)
    check_precision(model)
    check_devices(config.parallel)
    schedule = make_schedule(config.optimizer, model.d_model, train.num_steps)
    make_optimizer(config.optimizer, schedule, optimizer)
    if train.freeze:
        # The sizes of the vocabularies are not known yet.
        initialize = functools.partial(init, with_vocabulary_sizes(model, 1, 1))
        split(jax.eval_shape(initialize, seed_key(0)), train.freeze)
    devices = make_devices(config.parallel)
    if memory:
        require_training_memory(config, devices)
    rows, row_length = config.rows_per_batch, config.data.row_lengths[1]
    shards = row_shards(devices.mesh)
    inner = ["parallel.tensor", *(["parallel.axes"] if config.parallel.axes else [])]
    if rows % (shards * train.accumulation_steps):  # Short buckets have a multiple of these rows.
        raise UserError(
            f"the {rows} rows of a batch (train.batch_tokens={train.batch_tokens} / "
            f"{row_length} tokens of a target row) cannot be divided evenly among {shards} devices "
            f"(parallel.num_devices / {' / '.join(inner)}) times {train.accumulation_steps} parts "
            f"(train.accumulation_steps): make train.batch_tokens a multiple of "
            f"{shards * train.accumulation_steps * row_length}"
        )


def _require_function(name: str, value: str, built_in: str, function: Any) -> None:
    if value != built_in and function is None:
        raise UserError(
            f"{name}={value} is the name of a function: start and continue the run from Python, "
            f"with flaxformer_mt.train(config, workdir, {name.partition('.')[2]}=FUNCTION)"
        )


def check_one_process(option: str) -> None:
    """Refuses several processes."""
    if jax.process_count() > 1:
        raise UserError(f"{option} is for one process: start it without the others")


def check_precision(model: TransformerConfig) -> None:
    """Checks that JAX computes in the precision that a model asks for."""
    for name in ("dtype", "param_dtype"):
        wanted = getattr(model, name)
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            raise UserError(
                f"model.{name}={wanted}: JAX computes in float32 unless the environment has "
                "JAX_ENABLE_X64=1"
            )


def check_devices(parallel: ParallelConfig) -> None:
    """Checks that there are the devices that a configuration asks for, in all processes."""
    available, wanted = jax.devices(), parallel.num_devices or jax.device_count()
    processes, local, tensor = jax.process_count(), jax.local_device_count(), parallel.tensor
    inner = parallel.devices_per_row
    if wanted > len(available):
        raise UserError(
            f"parallel.num_devices={wanted}, but there are only {len(available)} "
            f"({available[0].platform}): ask for fewer, or for 0, which means all"
        )
    if processes > 1 and wanted < len(available):
        raise UserError(
            f"parallel.num_devices={wanted}, but {processes} processes have "
            f"{len(available)} devices, all of which have to be used: set it to 0"
        )
    if processes > 1 and parallel.strategy == "pmap":
        raise UserError(
            f"parallel.strategy=pmap is for one process, and there are {processes}: set "
            "parallel.strategy=mesh"
        )
    if processes > 1 and local % inner and inner % local:
        given = f"parallel.tensor={tensor}{(parallel.axes and f' times {parallel.axes}') or ''}"
        raise UserError(
            f"{given} does not fit processes of {local} devices: one has to be a multiple of the "
            "other"
        )


def check_same_run(
    folder: Path, given: ExperimentConfig, accept_changes: bool = False
) -> ExperimentConfig:
    """Checks that the run in a folder can be continued with a configuration; returns its own.

    Args:
      folder: the run folder.
      given: the configuration.
      accept_changes: whether the run may be continued with other values of some options.
    """
    stored = read_config(folder)
    if configuration.differences(stored, given):
        # The run took what was left open from its vocabulary.
        model = read_tokenizers(folder).with_ids(given.model)
        given = configuration.ExperimentConfig(**{**vars(given), "model": model})
    differences = configuration.differences(stored, given)
    starts = stored.train.init_from, given.train.init_from
    kinds = dict(configuration.CONTINUATIONS)
    own, name = stored.optimizer.kind, given.optimizer.kind.partition("(")[0]
    if own not in KINDS and own.partition("(")[0] != name:
        # Only the function itself knows the state that it made.
        kinds["optimizer.kind"] = "never"
    if starts[0] != starts[1] and not step_folders.has_any(folder):
        # Before its first checkpoint, a run is continued from its start.
        text = "train.init_from: {!r} in the run, {!r} now"
        differences["train.init_from"] = text.format(*starts)
        kinds["train.init_from"] = "never"
    never = [text for name, text in differences.items() if kinds[name] == "never"]
    refused = [text for name, text in differences.items() if kinds[name] != "noted"]
    if never or (refused and not accept_changes):
        named = "; ".join(never if accept_changes else refused)
        raise UserError(
            f"{folder} holds a run of another configuration ({named}): "
            f"give these values, {_NEW_START.format(folder) if never else ACCEPT}"
        )
    return stored


_NEW_START = (
    "or another workdir, for a new run: train.init_from={} starts it from these parameters if "
    "they fit, train.init_optimizer from the optimizer's moments, too, and steps and data begin "
    "anew"
)


def check_vocabulary(config: ExperimentConfig, tokenizers: Tokenizers) -> None:
    """Checks the vocabularies of a new run, whose special tokens the configuration has."""
    model, data = config.model, config.data
    source, target = tokenizers.source, tokenizers.target
    # In published vocabularies, the same ids may be read by two tokenizers.
    is_own = isinstance(source, SentencePieceTokenizer)
    if is_own and source.fingerprint != target.fingerprint and model.shares_source_and_target:
        raise UserError(
            f"model.tie_embeddings={model.tie_embeddings} gives both sides one table, but each has "
            "a vocabulary of its own: set model.tie_embeddings=target_output or none, or use one "
            "vocabulary (data.joint_vocabulary=True, or one file as data.tokenizer_path)"
        )
    if data.subword_sampling:
        source.sample([], 0, data.subword_sampling)  # Some vocabularies cannot.
