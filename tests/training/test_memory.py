"""What a compiled step needs of a device: read from a program, and as real arrays have it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compiled.program import sent_bytes
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.batches import BatchShape
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.devices import abstract
from flaxformer_mt.training.memory import abstract_batch, step_cost
from flaxformer_mt.training.sharding import leaves_by_path

SHAPE = BatchShape(32, 8, 8)


def compiled(tiny, shape=SHAPE):
    """A training step and its abstract arguments."""
    step = tiny.devices.compile_train_step(tiny.pure_train_step, seed=0)
    state = abstract(tiny.state_shapes, tiny.devices.mesh, tiny.devices.rules)
    batch = tiny.devices.abstract_batch(abstract_batch(shape))
    # Unoptimized programs have the same memory and collectives.
    options = {"xla_backend_optimization_level": 0}
    return step.lower(state, batch).compile(options), state, batch


def sent(tiny, shape=SHAPE):
    return sent_bytes(compiled(tiny, shape)[0].as_text())


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_data_parallelism_adds_up_the_gradients(setup, strategy):
    tiny = setup.of(strategy, 8)
    state = tiny.state()
    program = compiled(tiny)
    eight = step_cost(*program)
    assert eight.parameters == nbytes(state.params)
    assert eight.optimizer_state == nbytes(state.opt_state)
    assert eight.batch == nbytes(tiny.batch(0)) // 8
    assert eight.temporary > 0
    assert eight.total > eight.parameters + eight.optimizer_state + eight.temporary
    # Each device sends 7/8 of every array twice. Key biases have no gradient, and a tied table may
    # have its three parts added up one by one.
    tables = [leaf for path, leaf in leaves_by_path(state.params) if path.endswith("embedding")]
    no_gradient = [leaf for path, leaf in leaves_by_path(state.params) if path.endswith("key/bias")]
    gradient = nbytes(state.params) - nbytes(no_gradient)
    metrics = 10 * 4
    sent = sum(sent_bytes(program[0].as_text()).values())
    assert gradient <= sent / 2 * 8 / 7 <= gradient + 2 * nbytes(tables) + metrics


@pytest.mark.slow
def test_fsdp_sends_matrices_and_not_the_vectors_of_all_rows(setup):
    """With more rows, only the vectors of the embeddings are more, which are looked up in parts."""
    few, many = (
        sent(tiny, BatchShape(rows, 8, 8))
        for tiny in [setup.of(num_devices=8, parallel={"fsdp": 8})]
        for rows in (32, 128)
    )
    assert many["all-reduce"] == few["all-reduce"]
    tokens_of_all = 2 * 128 * 8 * 4  # the token ids of both sides
    assert many["all-gather"] - few["all-gather"] <= tokens_of_all
    vectors = (128 // 8) * 8 * 8 * 4  # [B, T, D] of one device
    assert 0 < many["all-to-all"] <= 8 * vectors


CONFIG = TransformerConfig(
    source_vocab_size=20,
    target_vocab_size=20,
    d_model=8,
    num_heads=2,
    d_ff=32,
    num_encoder_layers=4,
    num_decoder_layers=4,
    dropout_rate=0.1,
)


@pytest.mark.slow  # Each policy compiles a step; tests/model has their gradients.
def test_remat_changes_memory_and_nothing_else():
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 20, (8, 16)), jnp.int32)
    results, memory = [], []
    for remat, scan_layers in (("none", True), ("products", True), ("full", True), ("full", False)):
        config = dataclasses.replace(CONFIG, remat=remat, scan_layers=scan_layers)
        model = Transformer(config)

        def loss(params, model=model):
            logits = model.apply(
                {"params": params},
                tokens,
                tokens,
                deterministic=False,
                rngs={"dropout": jax.random.key(1)},
            )
            return jnp.sum(jax.nn.log_softmax(logits)[..., 3])

        params = jax.jit(model.init)(jax.random.key(0), tokens, tokens)["params"]
        step = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
        results.append((params, step(params)))
        memory.append(step.memory_analysis().temp_size_in_bytes)
    for other in results[1:]:
        chex.assert_trees_all_close(results[0], other, rtol=1e-5, atol=1e-5)
    none, products, full, _ = memory
    assert full < 0.7 * none
    assert full < products < none
