"""A training step: its normalisation, its dropout, its metrics."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_setup import mean_loss

import flaxformer_mt as fmt
from flaxformer_mt.training import step as training_step


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("jit", [True, False])
def test_a_step_reports_the_mean_over_target_tokens_and_keeps_types(setup, jit):
    tiny = setup.of(bigram=True)
    state, batch = tiny.state(), tiny.batch(0)
    differentiated = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)
    loss, expected = differentiated(tiny.model, state.params, batch)
    step = jax.jit(tiny.pure_train_step) if jit else tiny.pure_train_step
    new_state, metrics = step(state, batch, tiny.key(state))

    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], loss, rtol=1e-5)
    norm, one = metrics["gradient_norm"]
    np.testing.assert_allclose(norm, optax.tree.norm(expected), rtol=1e-5)
    assert one == 1


def test_gpus_compute_the_same_update_where_they_write_it(setup, monkeypatch):
    tiny = setup.of(bigram=True, ema_decay=0.5)
    state = tiny.state()
    arguments = state, tiny.batch(0), tiny.key(state)
    expected = jax.jit(lambda *each: tiny.pure_train_step(*each))(*arguments)
    monkeypatch.setattr(training_step, "mesh_platform", lambda: "gpu")
    program = jax.make_jaxpr(lambda *each: tiny.pure_train_step(*each))
    assert "optimization_barrier" in str(program(*arguments))
    result = jax.jit(lambda *each: tiny.pure_train_step(*each))(*arguments)
    chex.assert_trees_all_close(result, expected, rtol=1e-6)


def test_metrics_count_tokens_and_positions(setup):
    tiny = setup.of(bigram=True, accumulation_steps=4)
    batch = tiny.batch(0)
    metrics = jax.device_get(tiny.train_step(tiny.state(), tiny.placed_batch(0))[1])
    tokens = np.sum(batch.decoder_loss_weights)
    assert metrics["loss"][1] == metrics["accuracy"][1] == tokens
    sides = (batch.encoder_segment_ids, batch.decoder_segment_ids)
    assert metrics["padding_fraction"] == (
        sum(np.sum(side == 0) for side in sides),
        sum(side.size for side in sides),
    )


def test_a_batch_without_targets_changes_nothing(setup):
    tiny = setup.of(bigram=True)
    before = jax.device_get(tiny.state().params)
    empty = jax.tree.map(np.zeros_like, tiny.batch(0))
    state, metrics = tiny.train_step(tiny.state(), tiny.devices.place_batch(empty))
    chex.assert_trees_all_equal(jax.device_get(state.params), before)
    assert metrics["gradient_norm"] == (0, 1)
    assert metrics["loss"] == (0, 0)


def test_dropout_follows_from_seed_and_step(setup):
    def loss(step=0, seed=0):
        tiny = setup.of(bigram=True, model={"dropout_rate": 0.5}, seed=seed)
        state = setup.of(bigram=True).state().replace(step=jnp.int32(step))
        return float(tiny.train_step(state, tiny.placed_batch(0))[1]["loss"][0])

    assert loss() == loss()
    assert loss() != loss(step=1)
    assert loss() != loss(seed=1)


def test_a_step_of_ones_own_gets_the_key_of_seed_and_step():
    def update(state, batch, key, frozen):
        return {"step": state["step"] + 1}, jax.random.key_data(key)

    step = fmt.compile_step(update, fmt.make_mesh(devices=jax.devices()[:1]), seed=7)
    state = {"step": jnp.int32(3)}
    for number in (3, 4):
        state, key = step(state, jnp.ones((1,)))
        expected = jax.random.fold_in(jax.random.key(7), number)
        np.testing.assert_array_equal(key, jax.random.key_data(expected))


@pytest.mark.parametrize("split", [{"accumulation_steps": 2}, {"num_devices": 2}])
def test_parts_and_devices_drop_different_units(setup, split):
    """Where all rows are equal, two halves have the same loss only by the same dropout."""
    batch = setup.of().batch(0)
    fullest = np.argmax(batch.decoder_loss_weights.sum(axis=1))
    row = jax.tree.map(lambda rows: rows[fullest][None], batch)

    def loss(num_rows, **fields):
        tiny = setup.of("pmap", bigram=True, model={"dropout_rate": 0.5}, **fields)
        rows = jax.tree.map(lambda rows: np.repeat(rows, num_rows, axis=0), row)
        _, metrics = tiny.train_step(tiny.state(), tiny.devices.place_batch(rows))
        return float(metrics["loss"][0])

    assert abs(loss(2, **split) - 2 * loss(1)) > 1e-2


def test_validation_has_no_dropout_and_knows_the_cross_entropy(setup):
    tiny = setup.of(bigram=True, model={"dropout_rate": 0.5})
    params, batch = tiny.state().params, tiny.placed_batch(0)
    metrics = tiny.eval_step(params, batch)
    loss, tokens = metrics["loss"]
    np.testing.assert_allclose(loss / tokens, mean_loss(tiny.model, params, batch), rtol=1e-5)
    assert metrics["cross_entropy"][0] != loss
    assert metrics["cross_entropy"][1] == tokens


@pytest.mark.slow
def test_a_language_model_needs_no_source(setup):
    tiny = setup.of(model={"has_inputs": False}, accumulation_steps=2)
    params, batch = tiny.state().params, tiny.batch(0)
    assert batch.encoder_input_tokens is None
    expected = mean_loss(tiny.model, params, batch)
    for metrics in (
        tiny.train_step(tiny.state(), tiny.placed_batch(0))[1],
        tiny.eval_step(params, tiny.placed_batch(0)),
    ):
        np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], expected, rtol=1e-5)
    metrics = tiny.train_step(tiny.state(), tiny.placed_batch(0))[1]
    assert metrics["padding_fraction"][1] == batch.decoder_segment_ids.size


@pytest.mark.slow
def test_bfloat16_computes_nearly_the_same_and_stores_float32(setup):
    wide, narrow = setup.of(), setup.of(model={"dtype": "bfloat16"})
    state, batch = wide.state(), wide.batch(0)
    expected, sums = wide.gradients(state, batch)
    expected_loss = sums.loss / sums.weight

    new_state, metrics = narrow.train_step(narrow.state(), narrow.placed_batch(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    # After one step, Adam's first moment is the gradient times 1 - beta1.
    moment = optax.tree.get(new_state.opt_state, "mu")
    distance = optax.tree.norm(jax.tree.map(lambda m, g: m / np.float32(0.1) - g, moment, expected))
    assert 0 < distance / optax.tree.norm(expected) < 0.05
    for loss, tokens in (
        metrics["loss"],
        narrow.eval_step(narrow.state().params, narrow.placed_batch(0))["loss"],
    ):
        assert loss.dtype == jnp.float32
        np.testing.assert_allclose(loss / tokens, expected_loss, rtol=0.01)
