"""Features of the training step: skipped steps, moving average, R-Drop, freezing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from flaxformer_mt.errors import UserError
from flaxformer_mt.objectives.losses import token_losses
from flaxformer_mt.training.parameters import merge, split


def run(tiny, steps):
    """The states before, between and after some steps, on the host."""
    state = tiny.state()
    states = [jax.device_get(state)]
    for step in range(steps):
        state, _ = tiny.train_step(state, tiny.placed_batch(step))
        states.append(jax.device_get(state))
    return states


# Skipping.


@pytest.mark.slow_except("mesh")
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_a_loss_that_is_not_finite_changes_nothing_on_any_device(setup, strategy):
    tiny = setup.of(
        strategy,
        num_devices=2,
        bigram=True,
        model={"dropout_rate": 0.5},
        accumulation_steps=2,
        ema_decay=0.5,
    )
    good = tiny.batch(0)
    weights = good.decoder_loss_weights.copy()
    weights[0, 0] = np.nan  # in the rows of one device, in one part
    bad = good.replace(decoder_loss_weights=weights)

    state, _ = tiny.train_step(tiny.state(), tiny.devices.place_batch(good))
    before = jax.device_get(state)
    for times in (1, 2):
        state, metrics = tiny.train_step(state, tiny.devices.place_batch(bad))
        metrics = jax.device_get(metrics)
        expected = before.replace(step=before.step + times, skipped=before.skipped + times)
        for shard in range(2):
            chex.assert_trees_all_equal(
                jax.tree.map(lambda leaf, n=shard: np.asarray(leaf.addressable_data(n)), state),
                expected,
            )
        assert metrics["skipped_steps"] == metrics["nonfinite_loss"] == (1, 1)
        assert metrics["nonfinite_gradient"] == metrics["nonfinite_update"] == (0, 1)
        for name in ("loss", "accuracy", "gradient_norm"):
            assert metrics[name] == (0, 0)
        assert metrics["padding_fraction"][1] == 2 * good.decoder_segment_ids.size

    state, metrics = tiny.train_step(state, tiny.devices.place_batch(good))
    assert state.skipped == 0
    assert jax.device_get(metrics["skipped_steps"]) == (0, 1)
    assert metrics["loss"][1] == good.decoder_loss_weights.sum()
    assert not np.array_equal(state.ema["Dense_0"]["kernel"], before.ema["Dense_0"]["kernel"])


def test_a_gradient_that_is_not_finite_is_told_from_such_a_loss(setup):
    """Weights of opposite sign let the loss stay finite while the gradient's norm overflows."""
    tiny = setup.of(bigram=True)
    batch = tiny.batch(0)
    first, second = np.argwhere(batch.decoder_loss_weights)[:2]
    weights = np.zeros_like(batch.decoder_loss_weights)
    weights[tuple(first)], weights[tuple(second)] = 1e25, -1e25
    bad = tiny.devices.place_batch(batch.replace(decoder_loss_weights=weights))
    state, metrics = tiny.train_step(tiny.state(), bad)
    metrics = jax.device_get(metrics)
    assert metrics["nonfinite_loss"] == (0, 1)
    assert metrics["nonfinite_gradient"] == metrics["skipped_steps"] == (1, 1)
    assert state.skipped == 1
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(tiny.state().params))


# The moving average.


def test_the_average_starts_at_the_initial_parameters_and_follows_its_formula(setup):
    first, *others = run(setup.of(bigram=True, ema_decay=0.75), steps=3)
    chex.assert_trees_all_equal(first.ema, first.params)
    average = first.params
    for state in others:
        average = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, average, state.params)
        chex.assert_trees_all_close(state.ema, average, rtol=1e-6)
        chex.assert_trees_all_equal(state.eval_params, state.ema)


# R-Drop.


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_r_drop_is_the_formula_of_the_paper(setup, num_devices):
    """Equation 4 of Liang et al. 2021, written out with the same draws of dropout."""
    tiny = setup.of(num_devices=num_devices, bigram=True, model={"dropout_rate": 0.5}, r_drop=5.0)
    state, batch = tiny.state(), tiny.batch(0)
    key = jax.random.fold_in(tiny.key(state), 0)
    weights, tokens = batch.decoder_loss_weights, batch.decoder_loss_weights.sum()

    @jax.jit
    def formula(params):
        logits = tiny.model.apply(
            {"params": params},
            None,
            np.repeat(batch.decoder_input_tokens, 2, axis=0),
            deterministic=False,
            rngs={"dropout": key},
        )
        likelihoods = [
            jnp.sum(token_losses(z, batch.decoder_target_tokens, 0.1) * weights) / tokens
            for z in (logits[::2], logits[1::2])
        ]
        p, q = (jax.nn.softmax(z) for z in (logits[::2], logits[1::2]))
        there, back = (
            jnp.sum(jnp.sum(a * jnp.log(a / b), axis=-1) * weights) / tokens
            for a, b in ((p, q), (q, p))
        )
        apart = (there + back) / 2
        return sum(likelihoods) + 5.0 * apart, (sum(likelihoods) / 2, apart)

    (_, (loss, apart)), expected = jax.value_and_grad(formula, has_aux=True)(state.params)
    gradient, sums = tiny.gradients(state, tiny.placed_batch(0))
    metrics = sums.metrics
    chex.assert_trees_all_close(gradient, expected, atol=1e-6)
    for name, value in (("loss", loss), ("r_drop", apart)):
        assert metrics[name][1] == tokens
        np.testing.assert_allclose(metrics[name][0] / tokens, value, rtol=1e-5)
    assert apart > 1e-2  # A thousand times the tolerance, whichever masks dropout draws.
    assert metrics["accuracy"][1] == tokens
    assert metrics["padding_fraction"][1] == 2 * weights.size


# Freezing.


def test_frozen_parameters_and_their_average_stay_as_they_are_to_the_bit(setup):
    tiny = setup.of(
        bigram=True,
        optimizer={"kind": "adamw", "weight_decay": 0.1, "clip_norm": 0.1},
        freeze=("^Embed", "bias$"),
        ema_decay=0.9,
    )
    before, *_, after = run(tiny, steps=3)
    for params in (after.params, after.ema):
        assert np.array_equal(params["Embed_0"]["embedding"], before.params["Embed_0"]["embedding"])
        assert np.array_equal(params["Dense_0"]["bias"], before.params["Dense_0"]["bias"])
        assert not np.array_equal(params["Dense_0"]["kernel"], before.params["Dense_0"]["kernel"])


def test_what_is_trained_has_the_gradient_that_it_would_have_had(setup):
    free, bound = setup.of(bigram=True), setup.of(bigram=True, freeze=("Embed",))
    state, batch = free.state(), free.batch(0)
    everything, _ = free.gradients(state, batch)
    gradient, _ = bound.gradients(state, batch)
    assert set(gradient) == {"Dense_0"}
    chex.assert_trees_all_close(gradient["Dense_0"], everything["Dense_0"], atol=1e-7)


def test_split_parts_a_tree_and_merge_joins_it():
    params = {"encoder": {"norm": {"scale": 1, "bias": 2}}, "decoder": {"norm": {"bias": 3}}}
    trained, frozen = split(params, ("encoder/.*scale", "decoder/"))
    assert flatten_dict(trained, sep="/") == {"encoder/norm/bias": 2}
    assert flatten_dict(frozen, sep="/") == {"encoder/norm/scale": 1, "decoder/norm/bias": 3}
    assert merge(trained, frozen) == params


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (("decoder/", "encodr/"), r"'encodr/' matches no parameter; .* begin with decoder/, enc"),
        (("encoder/", ""), "freezes all parameters"),
        (("encoder(",), r"'encoder\(' is not a regular expression"),
        (("(" * 5000,), "is not a regular expression"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(freeze, message):
    with pytest.raises(UserError, match=f"train.freeze.*{message}") as caught:
        split({"encoder": {"bias": 1}, "decoder": {"bias": 2}}, freeze)
    assert "\n" not in str(caught.value)


# The initial state.


def test_a_rule_that_fits_no_parameter_is_found_before_anything_is_computed(setup):
    tiny = setup.of(bigram=True, freeze=("encoder/",))
    with pytest.raises(UserError, match=r"train\.freeze: 'encoder/' matches no parameter"):
        _ = tiny.state_shapes
