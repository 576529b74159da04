"""A training step and a decoding step of a configuration, compiled for devices."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.batches import BatchShape
from flaxformer_mt.decoding.batching.continuous_batching import REFERENCE_BEAM_SIZE
from flaxformer_mt.decoding.batching.search_programs import (
    begin_search,
    combine,
    reorder_each,
    step_function,
)
from flaxformer_mt.decoding.batching.workers import batch_tokens
from flaxformer_mt.decoding.parameters import rounded_matrices
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.search import advance
from flaxformer_mt.decoding.search.state import SearchState, unconstrained
from flaxformer_mt.model.cache import reorder_cache
from flaxformer_mt.model.functional import init
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.flops import Work, training_flops, work_of_sentences
from flaxformer_mt.training import step
from flaxformer_mt.training.devices import RunDevices, abstract, make_mesh, seed_key
from flaxformer_mt.training.memory import abstract_batch, bytes_on_a_device
from flaxformer_mt.training.objective import make_objective
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
from flaxformer_mt.training.state import create_state

SENTENCE = 64
"""Tokens of a sentence in a decoding step, and the capacity of its cache."""


class CompiledStep(NamedTuple):
    """A compiled step; sizes in bytes per device."""

    text: str
    """The program, as scheduled."""
    parameters: int
    optimizer_state: int
    arguments: int
    """All that the step is given, with the above."""
    temporary: int
    """The peak of temporary memory, besides the arguments."""
    equations: float
    """Operations of the model's equations, all devices together, if every row is a sentence; see
    `training_flops`. 0 = not counted."""
    seconds: float
    """Of compilation."""


def on_mesh(
    config: ExperimentConfig, mesh: dict[str, int], positions: int, vocabulary: int
) -> ExperimentConfig:
    """Returns the configuration with the batch and the mesh that are to be compiled.

    Args:
      config: as in a file, where the lengths of source rows and the vocabulary sizes may be 0, to
        be chosen for the data.
      mesh: the sizes of the axes data, fsdp and tensor.
      positions: target positions for each of data * fsdp; 0 = a share of `train.batch_tokens`.
      vocabulary: vocabulary size; 0 = that of the model, or else `data.vocab_size`.
    """
    model, data = config.model, config.data
    shards = mesh["data"] * mesh["fsdp"]
    target = data.row_lengths[1]
    rows = max(1, (positions or config.train.batch_tokens // shards) // target)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            source_vocab_size=vocabulary or model.source_vocab_size or data.vocab_size,
            target_vocab_size=vocabulary or model.target_vocab_size or data.vocab_size,
        ),
        data=dataclasses.replace(data, source_row_length=data.source_row_length or target),
        train=dataclasses.replace(config.train, batch_tokens=rows * shards * target),
        parallel=dataclasses.replace(
            config.parallel, strategy="mesh", fsdp=mesh["fsdp"], tensor=mesh["tensor"]
        ),
    )


def compile_training(config: ExperimentConfig, devices: Sequence[Any]) -> CompiledStep:
    """Compiles a training step, with dropout and optimizer as configured."""
    traced, sizes = trace_training(config, devices)
    return _compiled(traced, **sizes)


def trace_training(
    config: ExperimentConfig, devices: Sequence[Any]
) -> tuple[Any, dict[str, float]]:
    """Traces a training step; returns it, and sizes that `CompiledStep` describes."""
    run_devices = RunDevices.arrange(config.parallel, devices)
    model = Transformer(config.model)
    schedule = make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    make_state = functools.partial(
        create_state, model=model, optimizer=optimizer, config=config.train
    )
    state = abstract(jax.eval_shape(make_state, seed_key(0)), run_devices.mesh, run_devices.rules)
    source, target = config.data.row_lengths
    shape = BatchShape(config.rows_per_batch, source, target)
    batch = run_devices.abstract_batch(abstract_batch(shape, config.model.has_inputs))
    objective = make_objective(model, config.train)

    train_step = functools.partial(
        step.train_step, objective=objective, optimizer=optimizer, config=config.train
    )
    sizes = {
        "parameters": bytes_on_a_device((state.params, state.ema)),
        "optimizer_state": bytes_on_a_device(state.opt_state),
        "arguments": bytes_on_a_device((state, batch)),
        "equations": training_flops(config.model, _work(shape, config.model.has_inputs)),
    }
    return run_devices.compile_train_step(train_step, seed=0).trace(state, batch), sizes


def compile_decoding(config: ExperimentConfig, device: Any) -> CompiledStep:
    """Compiles one step of the search of `config.decode`, on one device."""
    traced, sizes = trace_decoding(config, device)
    return _compiled(traced, **sizes)


def trace_decoding(config: ExperimentConfig, device: Any) -> tuple[Any, dict[str, float]]:
    """Traces one step of the search; returns it, and sizes that `CompiledStep` describes."""
    model, decode = config.model, config.decode
    tokens = batch_tokens(decode, device.platform) * REFERENCE_BEAM_SIZE
    rows = max(1, tokens // (SENTENCE * decode.beam_size))
    options = SearchOptions.from_config(decode, model)
    mesh = make_mesh(devices=[device])
    place = NamedSharding(mesh, PartitionSpec())

    def parameters() -> Any:
        return rounded_matrices(model, init(model, jax.random.key(0)))

    def begin(params: Any) -> SearchState:
        sources = jnp.zeros((rows, SENTENCE), jnp.int32)
        constraints = unconstrained(jnp.full(rows, SENTENCE, jnp.int32))
        return begin_search(
            (params,), sources, constraints, options, configs=(model,), max_length=SENTENCE
        )

    def step(params: Any, state: SearchState) -> SearchState:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            function = combine([step_function(model, params, options)], decode.ensemble)
            return advance(function, reorder_each(reorder_cache), options, state)

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
        )

    params = jax.eval_shape(parameters)
    state = placed(jax.eval_shape(begin, params))
    params = placed(params)
    sizes = {
        "parameters": bytes_on_a_device(params),
        "optimizer_state": 0,
        "arguments": bytes_on_a_device((params, state)),
        "equations": 0.0,
    }
    return jax.jit(step, donate_argnums=1).trace(params, state), sizes


def _work(shape: BatchShape, has_inputs: bool) -> Work:
    """The work of a batch, if every row were a sentence."""
    targets = np.full(shape.rows, shape.target_length)
    sources = np.full(shape.rows, shape.source_length) if has_inputs else 0 * targets
    return work_of_sentences(sources, targets)


def _compiled(traced: Any, **sizes: Any) -> CompiledStep:
    lowered = traced.lower()
    start = time.perf_counter()
    compiled = lowered.compile()
    return CompiledStep(
        text=compiled.as_text(),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        seconds=time.perf_counter() - start,
        **sizes,
    )
