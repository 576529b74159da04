"""One training step and one validation step, as pure functions.

A device sums over its tokens, sums are added over micro-batches and devices, and only then is
anything divided: by the number of target tokens in the whole batch. So loss and gradient do not
depend on how the batch is split.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.data.batches import Batch
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.losses import accuracy, label_smoothed_cross_entropy
from flaxformer_mt.training.state import Params, TrainState

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
    """One update of the parameters.

    Args:
      state: before the update.
      batch: B rows, a multiple of `config.accumulation_steps`; under pmap this device's rows.
      model: a `Transformer`.
      optimizer: from `make_optimizer`.
      config: label smoothing and accumulation.
      axis_name: the pmap axis of the devices that share a batch, if any.

    Returns:
      The state after the update, and the figures "loss" and "accuracy" (a target token),
      "padding_fraction" (a position) and "gradient_norm" (a step; before clipping).
    """
    step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

    def loss_sum(params: Params, rows: Batch, part: Array) -> tuple[Array, Metrics]:
        key = jax.random.fold_in(step_key, part)
        if axis_name:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        logits = _apply(model, params, rows, deterministic=False, rngs={"dropout": key})
        metrics = {
            **_figures(logits, rows, model, config),
            "padding_fraction": _padding(rows),
        }
        return metrics["loss"][0], metrics

    def gradient_sum(rows: Batch, part: Array) -> tuple[Params, Metrics]:
        return jax.grad(loss_sum, has_aux=True)(state.params, rows, part)

    sums = _sum_over_parts(gradient_sum, batch, config.accumulation_steps)
    gradients, metrics = jax.lax.psum(sums, axis_name) if axis_name else sums

    tokens = metrics["loss"][1]
    tokens = jnp.where(tokens > 0, tokens, 1)  # no target at all: a gradient of 0, not NaN
    gradients = jax.tree.map(lambda g: g / tokens.astype(g.dtype), gradients)
    norm = optax.tree.norm(gradients)
    metrics["gradient_norm"] = (norm, jnp.ones_like(norm))

    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new_state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, metrics


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


def _apply(model: Transformer, params: Params, batch: Batch, **options: Any) -> Array:
    """The logits [B, T, V] of a batch."""
    logits = model.apply(
        {"params": params},
        batch.encoder_input_tokens,
        batch.decoder_input_tokens,
        encoder_segment_ids=batch.encoder_segment_ids,
        decoder_segment_ids=batch.decoder_segment_ids,
        encoder_positions=batch.encoder_positions,
        decoder_positions=batch.decoder_positions,
        **options,
    )
    return cast(Array, logits)


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
