"""One training step and one validation step, as pure functions.

A device sums over its tokens, sums are added over micro-batches and devices, and only then is
anything divided: by the number of target tokens in the whole batch. So loss and gradient do not
depend on how the batch is split.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.losses import (
    Projection,
    accuracy,
    label_smoothed_cross_entropy,
    projected_cross_entropy,
)
from flaxformer_mt.training.parameters import Params, merge, split
from flaxformer_mt.training.r_drop import divergence
from flaxformer_mt.training.state import TrainState

Metrics: TypeAlias = dict[str, tuple[Array, Array]]
"""For each figure a sum and the weight to divide it by, so that figures can be added first."""


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    axis_name: str | None = None,
) -> tuple[TrainState, Metrics]:
    """One update of the parameters, and of their average.

    Where loss or gradient is not finite, the step is skipped: parameters, average and optimizer
    state stay as they are. Only the number of the step goes on, and with it data and dropout.

    Args:
      state: before the update.
      batch: B rows, a multiple of `config.accumulation_steps`; under pmap this device's rows.
      model: a `Transformer`.
      optimizer: from `make_optimizer`.
      config: label smoothing, accumulation, R-Drop, average, and what is frozen.
      axis_name: the pmap axis of the devices that share a batch, if any.

    Returns:
      The state after the update, and these figures:

      - "loss" and "accuracy", a target token;
      - "r_drop", a target token, if that is on: how far the two predictions are apart;
      - "padding_fraction", a position;
      - "gradient_norm", a step: of what is trained, before clipping;
      - "skipped_steps", "nonfinite_loss" and "nonfinite_gradient", a step: 1 where that is so.

      But for the last four, those of a skipped step are 0 and weigh 0: means are those of the
      other steps.
    """
    gradient, metrics = gradients(state, batch, model=model, config=config, axis_name=axis_name)
    norm = optax.tree.norm(gradient)
    one = jnp.ones_like(norm)
    metrics["gradient_norm"] = (norm, one)
    # Both were summed over all devices, which therefore decide alike.
    loss_is_finite, gradient_is_finite = jnp.isfinite(metrics["loss"][0]), jnp.isfinite(norm)
    is_good = loss_is_finite & gradient_is_finite

    trained, frozen = split(state.params, config.freeze)
    updates, opt_state = optimizer.update(gradient, state.opt_state, trained)
    params = merge(optax.apply_updates(trained, updates), frozen)
    ema = None if state.ema is None else moving_average(state.ema, params, config.ema_decay)
    updated = dataclasses.replace(
        state, params=params, opt_state=opt_state, ema=ema, skipped=jnp.zeros_like(state.skipped)
    )
    passed_over = dataclasses.replace(state, skipped=state.skipped + 1)
    new_state = jax.tree.map(functools.partial(jnp.where, is_good), updated, passed_over)
    metrics = {
        **jax.tree.map(lambda value: jnp.where(is_good, value, 0), metrics),
        "padding_fraction": metrics["padding_fraction"],
        **{
            name: (jnp.where(holds, one, 0), one)
            for name, holds in (
                ("skipped_steps", ~is_good),
                ("nonfinite_loss", ~loss_is_finite),
                ("nonfinite_gradient", ~gradient_is_finite),
            )
        },
    }
    return dataclasses.replace(new_state, step=state.step + 1), metrics


def gradients(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    config: TrainConfig,
    axis_name: str | None = None,
) -> tuple[Params, Metrics]:
    """The gradient of what a training step minimises; arguments as in `train_step`.

    Returns:
      The gradient with respect to the trained parameters, of the mean over all target tokens of
      the batch, however it is divided into parts and among devices; and the figures that come with
      it: "loss", "accuracy", "padding_fraction" and maybe "r_drop".
    """
    step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    trained, frozen = split(state.params, config.freeze)

    def gradient_sum(rows: Batch, part: Array) -> tuple[Params, Metrics]:
        key = jax.random.fold_in(step_key, part)
        if axis_name:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))

        def objective(trained: Params) -> tuple[Array, Metrics]:
            return _objective(model, merge(trained, frozen), rows, key, config)

        return jax.grad(objective, has_aux=True)(trained)

    sums = _sum_over_parts(gradient_sum, batch, config.accumulation_steps)
    gradient, metrics = jax.lax.psum(sums, axis_name) if axis_name else sums
    tokens = metrics["loss"][1]
    tokens = jnp.where(tokens > 0, tokens, 1)  # no target at all: a gradient of 0, not NaN
    return jax.tree.map(lambda g: g / tokens.astype(g.dtype), gradient), metrics


def moving_average(average: Params, params: Params, decay: float) -> Params:
    r"""The exponential moving average after one more step.

    .. math:: \bar\theta_t = d \bar\theta_{t-1} + (1 - d)\, \theta_t

    It starts at the initial parameters, :math:`\bar\theta_0 = \theta_0`, and is not corrected for
    that: after t steps these still have a share of d^t, and :math:`\bar\theta_t` is a mean of
    parameters, as it should be, from the first step on. In the first 1 / (1 - d) steps (1,000 for
    d = 0.999) it is closer to the start than to where training has got to.

    Source: Polyak and Juditsky 1992; with a decay, Kingma and Ba 2015, section 7.2.
    """
    # Written so that a parameter that does not change leaves its average as it is, to the bit.
    return jax.tree.map(lambda mean, new: mean + (1 - decay) * (new - mean), average, params)


def eval_step(
    params: Params,
    batch: Batch,
    *,
    model: Transformer,
    config: TrainConfig,
    axis_name: str | None = None,
) -> Metrics:
    """The figures of a batch without dropout; arguments as in `train_step`.

    Returns:
      "loss" (what training minimises), "accuracy", and "cross_entropy" (the loss without label
      smoothing, whose exponential is the perplexity), all a target token.
    """
    logits = _apply(model, params, batch, deterministic=True)
    metrics = _figures(logits, batch, model, config)
    metrics["cross_entropy"] = label_smoothed_cross_entropy(
        logits, batch.decoder_target_tokens, batch.decoder_loss_weights
    )
    return jax.lax.psum(metrics, axis_name) if axis_name else metrics


def _objective(
    model: Transformer, params: Params, batch: Batch, key: Array, config: TrainConfig
) -> tuple[Array, Metrics]:
    """What is minimised, summed over the target tokens of some rows, and the figures of these."""
    if config.r_drop:
        return _r_drop_objective(model, params, batch, key, config)
    factors = _apply(
        model, params, batch, deterministic=False, rngs={"dropout": key}, project=False
    )
    loss, correct, tokens = projected_cross_entropy(
        factors.vectors,
        factors.table,
        factors.bias,
        batch.decoder_target_tokens,
        batch.decoder_loss_weights,
        Projection(
            factors.scale,
            config.label_smoothing,
            config.label_smoothing_convention,
            model.config.pad_id,
        ),
    )
    return loss, {
        "loss": (loss, tokens),
        "accuracy": (correct, tokens),
        "padding_fraction": _padding(batch),
    }


def _r_drop_objective(
    model: Transformer, params: Params, batch: Batch, key: Array, config: TrainConfig
) -> tuple[Array, Metrics]:
    r"""The objective of R-Drop, summed over target tokens.

    .. math:: -\log p_1(y) - \log p_2(y)
        + \alpha \tfrac{1}{2} \left( KL(p_1 \| p_2) + KL(p_2 \| p_1) \right)

    p_1 and p_2 are the predictions of the same model under two draws of dropout. (With label
    smoothing, the first two terms are the smoothed cross entropy, as in the authors' code.) The
    gradient is therefore twice as long as without R-Drop, even if alpha is small: Adam does not
    mind, but `optimizer.clip_norm` must allow for it.

    The loss and accuracy that are reported are the means of the two passes.

    Source: Liang et al. 2021, equation 4.
    """
    # A row and its copy stay neighbours, and so on the same device.
    twice = jax.tree.map(functools.partial(jnp.repeat, repeats=2, axis=0), batch)
    logits = _apply(model, params, twice, deterministic=False, rngs={"dropout": key})
    sums = _figures(logits, twice, model, config)
    pairs = logits.reshape(-1, 2, *logits.shape[1:])  # [B, 2, T, V]
    apart = divergence(pairs[:, 0], pairs[:, 1], batch.decoder_loss_weights)
    metrics = {
        **jax.tree.map(lambda value: value / 2, sums),
        "r_drop": apart,
        "padding_fraction": _padding(batch),
    }
    return sums["loss"][0] + config.r_drop * apart[0], metrics


def _apply(model: Transformer, params: Params, batch: Batch, **options: Any) -> Any:
    """The logits [B, T, V] of a batch, or what the options ask for."""
    return model.apply(
        {"params": params},
        batch.encoder_input_tokens,
        batch.decoder_input_tokens,
        encoder_segment_ids=batch.encoder_segment_ids,
        decoder_segment_ids=batch.decoder_segment_ids,
        encoder_positions=batch.encoder_positions,
        decoder_positions=batch.decoder_positions,
        **options,
    )


def _figures(logits: Array, batch: Batch, model: Transformer, config: TrainConfig) -> Metrics:
    """Loss and accuracy."""
    targets, weights = batch.decoder_target_tokens, batch.decoder_loss_weights
    loss = label_smoothed_cross_entropy(
        logits,
        targets,
        weights,
        smoothing=config.label_smoothing,
        convention=config.label_smoothing_convention,
        pad_id=model.config.pad_id,
    )
    return {"loss": loss, "accuracy": accuracy(logits, targets, weights)}


def _padding(batch: Batch) -> tuple[Array, Array]:
    """How many positions of source and target hold no token, and how many positions there are."""
    padding, positions = jnp.float32(0), 0
    for segment_ids in (batch.encoder_segment_ids, batch.decoder_segment_ids):
        if segment_ids is not None:
            padding += jnp.sum(jnp.asarray(segment_ids) == 0, dtype=jnp.float32)
            positions += segment_ids.size
    return padding, jnp.float32(positions)


def _sum_over_parts(function: Callable[[Batch, Array], Any], batch: Batch, num_parts: int) -> Any:
    """Adds up function(rows, part) over parts of the batch, one after the other.

    Part p consists of rows p, p + num_parts, ...: where a device holds neighbouring rows, every
    part takes as many of each device's rows, and no row has to move.
    """
    if num_parts == 1:
        return function(batch, jnp.int32(0))
    parts = jax.tree.map(
        lambda rows: rows.reshape(-1, num_parts, *rows.shape[1:]).swapaxes(0, 1), batch
    )
    numbers = jnp.arange(num_parts, dtype=jnp.int32)

    def add(sums: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(*part)), None

    first = jax.tree.map(lambda rows: rows[0], (parts, numbers))
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *first)
    )
    return jax.lax.scan(add, zeros, (parts, numbers))[0]
