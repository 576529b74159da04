"""Schedules and updates, compared with the published formulas and the optimizers of PyTorch."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.traverse_util import flatten_dict
from transformers import (
    Adafactor,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from flaxformer_mt.config import ExperimentConfig, OptimizerConfig
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.references import losses as published
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule

D, WARMUP, STEPS = 64, 10, 50
RATES = {
    "constant": lambda t: 2.0,
    "inverse_square_root": lambda t: published.inverse_square_root_rate(t, 2.0, WARMUP),
    "noam": lambda t: published.noam_rate(t, 2.0, D, WARMUP),
    "tensor2tensor": lambda t: published.tensor2tensor_rate(t, 2.0, D, WARMUP),
    "one_cycle": lambda t: published.one_cycle_rate(t, 2.0, WARMUP, STEPS),
    "linear": lambda t: 2.0 * min(t / WARMUP, (STEPS + 1 - t) / (STEPS - WARMUP)),
    "cosine": lambda t: (
        2.0 * t / WARMUP
        if t < WARMUP
        else 1 + math.cos(math.pi * max(t - 1 - WARMUP, 0) / (STEPS - WARMUP))
    ),
    "warmup_stable_decay": lambda t: 2.0 * min(t / WARMUP, 1, (STEPS + 1 - t) / (0.2 * STEPS)),
}


def config(**fields):
    return OptimizerConfig(learning_rate=2.0, warmup_steps=WARMUP, **fields)


def rates_of(schedule, steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps, dtype=jnp.int32)))


@pytest.mark.parametrize("name", RATES)
def test_schedules_are_the_published_ones(name, float64):
    schedule = make_schedule(config(schedule=name), D, STEPS)
    ours = rates_of(schedule, STEPS)
    expected = [RATES[name](t) for t in range(1, STEPS + 1)]
    if name == "one_cycle":  # optax interpolates in float32
        np.testing.assert_allclose(ours, expected, atol=2e-7)
    else:
        np.testing.assert_allclose(ours, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup_stable_decay"])
def test_decays_are_those_of_optax_and_transformers(name, float64):
    """After the warm-up, in which Transformers counts from 0."""
    make = {
        "linear": lambda optimizer: get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS),
        "cosine": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS),
        "warmup_stable_decay": lambda optimizer: get_wsd_schedule(
            optimizer, WARMUP, STEPS // 5, STEPS, decay_type="linear"
        ),
    }
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=2.0)
    schedule, theirs = make[name](optimizer), []
    for _ in range(STEPS + 1):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    length = STEPS - WARMUP
    decay = {
        "linear": optax.linear_schedule(2.0, 0.0, length, transition_begin=WARMUP),
        "cosine": lambda count: optax.cosine_decay_schedule(2.0, length)(count - WARMUP),
        "warmup_stable_decay": optax.linear_schedule(
            2.0, 0.0, STEPS // 5, transition_begin=STEPS - STEPS // 5
        ),
    }[name]
    ours = make_schedule(config(schedule=name), D, STEPS)
    rates = rates_of(ours, STEPS + 1)
    np.testing.assert_allclose(rates[WARMUP:], theirs[WARMUP:], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(rates[: WARMUP - 1], theirs[1:WARMUP], rtol=1e-12)
    with jax.numpy_dtype_promotion("standard"):
        of_optax = [float(decay(count)) for count in range(WARMUP, STEPS + 1)]
    np.testing.assert_allclose(rates[WARMUP:], of_optax, rtol=1e-5, atol=1e-6)
    assert rates[-1] == 0 < min(rates[:-1])
    assert float(ours(jnp.int32(2 * STEPS))) == 0


@pytest.mark.parametrize("name", ["inverse_square_root", "noam", "tensor2tensor"])
def test_no_warm_up_starts_at_the_peak(name):
    schedule = make_schedule(OptimizerConfig(schedule=name, warmup_steps=0), D, STEPS)
    rates = [float(schedule(count)) for count in range(5)]
    assert rates == sorted(rates, reverse=True)
    assert np.all(np.isfinite(rates))


@pytest.mark.parametrize("total_steps", [0, 2 * STEPS])
@pytest.mark.parametrize("name", RATES)
def test_a_share_of_the_steps_is_the_same_warm_up(name, total_steps):
    share = OptimizerConfig(schedule=name, warmup=0.3, total_steps=total_steps)
    length = round(0.3 * (total_steps or STEPS))
    steps = OptimizerConfig(schedule=name, warmup_steps=length, total_steps=total_steps)
    first, second = (make_schedule(each, D, STEPS) for each in (share, steps))
    np.testing.assert_array_equal(rates_of(first, STEPS), rates_of(second, STEPS))


def test_the_warm_up_is_given_once():
    with pytest.raises(UserError, match=r"optimizer\.warmup=0\.1 and optimizer\.warmup_steps=9"):
        OptimizerConfig(warmup=0.1, warmup_steps=9)
    both = {"optimizer": {"warmup": 0.1, "warmup_steps": 9}}
    with pytest.raises(UserError, match="say the same: leave one of them out"):
        with_changes(ExperimentConfig(), both)
    by_share = with_changes(ExperimentConfig(), {"optimizer": {"warmup": 0.1}})
    by_steps = with_changes(by_share, {"optimizer": {"warmup_steps": 9}})
    assert (by_steps.optimizer.warmup, by_steps.optimizer.warmup_steps) == (0, 9)
    assert with_changes(by_steps, {"optimizer": {"warmup": 0.1}}) == by_share


@pytest.mark.parametrize(
    ("kind", "weight_decay", "clip_norm"),
    [("adam", 0.0, 0.0), ("adamw", 0.1, 0.0), ("adam", 0.0, 0.5)],
)
def test_trajectories_are_those_of_torch(kind, weight_decay, clip_norm, float64):
    """A quadratic, with Noam's rate, for 30 updates in float64."""
    start = np.random.default_rng(0).normal(size=(4, 3))
    target = np.arange(12.0).reshape(4, 3)
    settings = OptimizerConfig(
        kind=kind,
        schedule="noam",
        warmup_steps=WARMUP,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )

    parameter = torch.tensor(start, requires_grad=True)
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    theirs = make(
        [parameter],
        lr=1.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=weight_decay,
    )
    rates = torch.optim.lr_scheduler.LambdaLR(
        theirs, lambda count: published.noam_rate(count + 1, settings.learning_rate, D, WARMUP)
    )

    optimizer = make_optimizer(settings, make_schedule(settings, D, STEPS))
    params = {"w": jnp.asarray(start)}
    state = optimizer.init(params)

    @jax.jit
    def update(params, state):
        gradients = jax.tree.map(lambda w: 2 * (w - target), params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(30):
        theirs.zero_grad()
        ((parameter - torch.tensor(target)) ** 2).sum().backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([parameter], clip_norm)
        theirs.step()
        rates.step()
        params, state = update(params, state)

    expected = {"w": jnp.asarray(parameter.detach().numpy())}
    # torch's clipping divides by the norm plus 1e-6.
    chex.assert_trees_all_close(params, expected, atol=1e-7 if clip_norm else 1e-12)
    chex.assert_trees_all_equal_dtypes(params, expected)


def test_adafactor_is_that_of_transformers(float64):
    """On matrices that are factored, vectors, and stacked layers, for 20 updates in float64."""
    key = np.random.default_rng(0)
    layers = {"kernel": key.normal(size=(3, 128, 130)), "bias": key.normal(size=(3, 140)) * 1e-5}
    # Layers whose sizes differ do not share a mean.
    layers = {
        name: value * np.array([1e-2, 1, 30]).reshape(3, *[1] * (value.ndim - 1))
        for name, value in layers.items()
    }
    start = {
        "encoder": {"layers": layers},
        "decoder": {"layers": {"scale": key.normal(size=(2, 150))}},
        "output": {"kernel": key.normal(size=(140, 128)), "bias": key.normal(size=150)},
    }
    targets = jax.tree.map(lambda value: value + key.normal(size=value.shape), start)

    def by_parameter(tree):
        """The parameters of each layer by themselves."""
        flat = sorted(flatten_dict(tree, sep="/").items())
        return [
            value for path, values in flat for value in (values if "layers" in path else [values])
        ]

    parameters = [torch.tensor(value, requires_grad=True) for value in by_parameter(start)]
    theirs = Adafactor(parameters, lr=1e-2, relative_step=False)
    optimizer = make_optimizer(
        OptimizerConfig(kind="adafactor", schedule="constant", learning_rate=1e-2),
        optax.constant_schedule(1e-2),
    )
    params = jax.tree.map(jnp.asarray, start)
    state = optimizer.init(params)

    @jax.jit
    def update(params, state):
        gradients = jax.tree.map(lambda value, target: 2 * (value - target), params, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        theirs.zero_grad()
        for parameter, target in zip(parameters, by_parameter(targets), strict=True):
            ((parameter - torch.tensor(target)) ** 2).sum().backward()
        theirs.step()
        params, state = update(params, state)

    expected = [jnp.asarray(parameter.detach().numpy()) for parameter in parameters]
    # optax computes the decay rate in float32.
    chex.assert_trees_all_close(by_parameter(params), expected, rtol=0, atol=1e-8)


def test_adafactor_with_frozen_layers():
    optimizer = make_optimizer(OptimizerConfig(kind="adafactor"), optax.constant_schedule(1e-2))
    params = {"output": {"bias": jnp.ones(3)}}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert np.all(np.asarray(updates["output"]["bias"]) < 0)
