"""Training our model and a published one from the same weights gives the same losses."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import torch
from toy_references import ALL, DOUBLE_PROJECTION, ONE_OF_EACH, VARIANTS, Variant

from flaxformer_mt import interop, parity
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.optimizer_probe import differences, updates_of_optax, updates_of_torch
from flaxformer_mt.parity.sides import precision

# Enough not to be memorized: a loss near 0 is dominated by rounding.
BATCHES = 32
SMALL = {"num_encoder_layers": 2, "num_decoder_layers": 1}


def small(variant: Variant, dtype: str = "float64"):
    """A reference with few layers, and its configuration."""
    reference = dataclasses.replace(variant, sizes=variant.sizes | SMALL).build(dtype)
    config, _ = interop.load(variant.family, reference.state_dict(), **variant.hints)
    return reference, config


def train(variant: Variant, num_steps: int, dtype: str = "float64", **options) -> parity.Trajectory:
    reference, config = small(variant, dtype)
    side = recipe(variant.family).source_padding
    batches = [
        parity.example(config, rows=8, source_padding=side, seed=seed) for seed in range(BATCHES)
    ]
    options = variant.hints | options
    return parity.trajectory(variant.family, reference, batches, num_steps, **options)


def learned(found: parity.Trajectory) -> bool:
    """Whether the mean loss has decreased: constant curves would prove nothing."""
    return found.theirs.loss[-BATCHES:].mean() < found.theirs.loss[:BATCHES].mean()


@pytest.mark.slow
def test_layers_alone_may_be_given_tokens_of_a_larger_vocabulary():
    reference, config = small(DOUBLE_PROJECTION)
    batch = parity.example(config, rows=8)
    # Modulo D, these would be padding, which losses ignore.
    batch = batch._replace(target_output=batch.target_output * config.d_model)
    found = parity.trajectory("double_projection", reference, [batch], 2, **DOUBLE_PROJECTION.hints)
    assert found.first_divergence is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_a_hundred_steps_in_float64(name):
    found = train(ALL[name], 100)
    assert found.first_divergence is None
    assert learned(found)


@pytest.mark.slow
def test_float32_stays_within_its_own_tolerance():
    assert train(ALL["tunz"], 50, "float32").first_divergence is None


def wrong(**changes) -> dict:
    return {"recipe": dataclasses.replace(recipe("tunz"), **changes)}


def adam(kind=torch.optim.Adam, **options):
    return lambda parameters: kind(parameters, **{"betas": (0.9, 0.997), "eps": 1e-9} | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "step", "quantity", "explanation"),
    [
        (
            {"rate": lambda t, d_model: recipe("tunz").rate(t + 1, d_model)},
            1,
            "rate",
            "whether steps count from 0",
        ),
        ({"loss": recipe("torch").loss}, 1, "loss", "the forward pass and the loss"),
        ({"adam": adam(eps=1e-4)}, 2, "loss", "the first update differs: Adam's epsilon is 0.0001"),
        ({"adam": adam(torch.optim.AdamW, weight_decay=1)}, 1, "parameter_norm", "weight decay"),
        (
            {"adam": adam(betas=(0.9, 0.9))},
            3,
            "loss",
            "update 2 is the first to differ: Adam's decay rates are (0.9, 0.9) in the reference, "
            "(0.9, 0.997) in ours",
        ),
        ({"adam": adam(betas=(0.9, 0.9))}, 3, "loss", "it is not rounding"),
    ],
)
def test_what_differs_first_is_named(changes, step, quantity, explanation):
    found = train(VARIANTS["tunz"], 4, **wrong(**changes)).first_divergence
    assert (found.step, found.quantity) == (step, quantity)
    assert explanation in found.explanation


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ({}, {}, []),
        ({"eps": 1e-9}, {}, ["Adam's epsilon is 1e-09 in the reference, 1e-08 in ours"]),
        ({"eps": 1e-5}, {"eps": 1e-30}, ["Adam's epsilon is 1e-05 in the reference, 0 in ours"]),
        (
            {"betas": (0.8, 0.98)},
            {},
            ["decay rates are (0.8, 0.98) in the reference, (0.9, 0.999)"],
        ),
        ({"lr": 2e-3}, {}, ["the first update is 0.002 in the reference and 0.001 in ours"]),
        ({"weight_decay": 0.1}, {}, ["weight decay: a parameter of 1"]),
    ],
)
def test_how_two_optimizers_differ(theirs, ours, says):
    """Whether or not the training has come to where it shows."""
    with precision("float64"), jax.numpy_dtype_promotion("standard"):
        found = differences(
            updates_of_optax(optax.adam(**{"learning_rate": 1e-3} | ours)),
            updates_of_torch(lambda p: torch.optim.Adam(p, **{"lr": 1e-3} | theirs)),
        )
    assert len(found) == len(says)
    assert all(words in sentence for words, sentence in zip(says, found, strict=True)), found


@pytest.mark.slow
def test_a_training_that_amplifies_rounding_is_told_from_a_bug():
    """At a rate of 0.07, PyTorch's own runs diverge as well."""
    variant = VARIANTS["jadore801120_prj_all"]
    reference, config = small(variant)
    too_fast = {"recipe": recipe(variant.family, warmup_steps=50)}
    batches = [parity.example(config)]
    found = parity.trajectory(variant.family, reference, batches, 100, **too_fast, **variant.hints)
    assert found.first_divergence.step > 10
    assert "amplifies rounding" in found.first_divergence.explanation


@pytest.mark.slow
def test_a_gradient_that_is_cut_off_is_found_before_the_update():
    variant = VARIANTS["tunz"]
    reference, config = small(variant)
    embed = reference.t_vocab_embedding.register_forward_hook(lambda m, a, output: output.detach())
    found = parity.trajectory("tunz", reference, [parity.example(config)], 2, **variant.hints)
    assert found.first_divergence.quantity == "gradient_norm"
    assert found.first_divergence.step == 1
    embed.remove()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_curves():
    first, second = (train(VARIANTS["tunz"], 3) for _ in range(2))
    for ours, again in zip(first.ours, second.ours, strict=True):
        np.testing.assert_array_equal(ours, again)
