"""The training step and the validation step, as pure functions.

Each device sums over its tokens, and the sums are added over micro-batches and devices before they
are divided by the number of target tokens in the whole batch. Loss and gradient therefore do not
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
from flaxformer_mt.model.logical_axes import mesh_platform
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.flops import training_flops, work_of_batch
from flaxformer_mt.training.losses import accuracy, label_smoothed_cross_entropy
from flaxformer_mt.training.parameters import Params, merge, split
from flaxformer_mt.training.r_drop import num_passes
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.training.vocabulary_loss import CrossEntropyOptions, chunked_cross_entropy

Metrics: TypeAlias = dict[str, tuple[Array, Array]]
"""By name, a sum and the weight to divide it by; both are additive over batches and devices."""


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    axis_name: str | None = None,
) -> tuple[TrainState, Metrics]:
    """Updates the parameters and their moving average once.

    If the loss, the gradient or the updated parameters are not finite, the update is skipped:
    parameters, average and optimizer state do not change, but the step number, and with it data and
    dropout, advances.

    Args:
      state: before the update.
      batch: B rows, a multiple of `config.accumulation_steps`; under pmap this device's rows.
      model: a `Transformer`.
      optimizer: from `make_optimizer`.
      config: label smoothing, accumulation, R-Drop, moving average, and frozen parameters.
      axis_name: the pmap axis of the devices that share a batch, if any.

    Returns:
      The state after the update, and these metrics:

      - "loss" and "accuracy", per target token;
      - "r_drop", per target token, with R-Drop: the divergence of the two predictions;
      - "padding_fraction", per position;
      - "flops_per_target_token" (see `training_flops`), unless parameters are frozen;
      - "gradient_norm", per step: of the trained parameters, before clipping;
      - "skipped_steps", per step: 0 or 1;
      - "nonfinite_loss", "nonfinite_gradient" and "nonfinite_update", per step: 0 or 1, where the
        first of the three that was not finite counts.

      In a skipped step the others have the weight 0, except for the padding fraction: their means
      are those of the other steps.
    """
    gradient, metrics = gradients(state, batch, model=model, config=config, axis_name=axis_name)
    norm = optax.tree.norm(gradient)
    one = jnp.ones_like(norm)
    metrics["gradient_norm"] = (norm, one)

    def update(state: TrainState) -> tuple[Params, Params, Any]:
        trained, frozen = split(state.params, config.freeze)
        updates, opt_state = optimizer.update(gradient, state.opt_state, trained)
        return optax.apply_updates(trained, updates), frozen, opt_state

    trained, frozen, opt_state = update(state)
    # All are sums over all devices, so that all make the same decision. A finite norm also bounds
    # what is computed from parameters and gradient: the optimizer's state and the moving average.
    loss_is_finite, gradient_is_finite, update_is_finite = map(
        jnp.isfinite, (metrics["loss"][0], norm, optax.tree.norm(trained))
    )
    is_finite = loss_is_finite & gradient_is_finite & update_is_finite
    if mesh_platform() == "gpu":
        # Computed again where it is written: XLA would write the new parameters, and read them and
        # the old ones again to choose between them.
        state = jax.lax.optimization_barrier(state)
        trained, frozen, opt_state = update(state)
    params = merge(trained, frozen)
    ema = None if state.ema is None else moving_average(state.ema, params, config.ema_decay)
    updated = dataclasses.replace(
        state, params=params, opt_state=opt_state, ema=ema, skipped=jnp.zeros_like(state.skipped)
    )
    unchanged = dataclasses.replace(state, skipped=state.skipped + 1)
    new_state = jax.tree.map(functools.partial(jnp.where, is_finite), updated, unchanged)
    metrics = {
        **jax.tree.map(lambda value: jnp.where(is_finite, value, 0), metrics),
        "padding_fraction": metrics["padding_fraction"],
        **{
            name: (jnp.where(holds, one, 0), one)
            for name, holds in (
                ("skipped_steps", ~is_finite),
                ("nonfinite_loss", ~loss_is_finite),
                ("nonfinite_gradient", loss_is_finite & ~gradient_is_finite),
                ("nonfinite_update", loss_is_finite & gradient_is_finite & ~update_is_finite),
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
    """Computes the gradient of the training objective; arguments as in `train_step`.

    Returns:
      The gradient with respect to the trained parameters of the mean over all target tokens of the
      batch, and the metrics of the same pass: "loss", "accuracy", "padding_fraction",
      "flops_per_target_token" and, with R-Drop, "r_drop".
    """
    step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    trained, frozen = split(state.params, config.freeze)

    def gradient_sum(rows: Batch, part: Array) -> tuple[Params, Metrics]:
        key = jax.random.fold_in(step_key, part)
        if axis_name:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        if config.dropout_generator == "rbg":
            # Its keys have the words of two of Threefry's.
            words = jax.random.key_data(jax.random.split(key))
            key = jax.random.wrap_key_data(words.reshape(-1), impl="rbg")

        def objective(trained: Params) -> tuple[Array, Metrics]:
            return _objective(model, merge(trained, frozen), rows, key, config)

        return jax.grad(objective, has_aux=True)(trained)

    sums = _sum_over_parts(gradient_sum, batch, config.accumulation_steps)
    gradient, metrics = jax.lax.psum(sums, axis_name) if axis_name else sums
    tokens = metrics["loss"][1]
    tokens = jnp.where(tokens > 0, tokens, 1)  # Without targets the gradient is 0, not NaN.
    return jax.tree.map(lambda g: g / tokens.astype(g.dtype), gradient), metrics


def moving_average(average: Params, params: Params, decay: float) -> Params:
    r"""Updates the exponential moving average of the parameters.

    .. math:: \bar\theta_t = d \bar\theta_{t-1} + (1 - d)\, \theta_t

    It starts at the initial parameters, :math:`\bar\theta_0 = \theta_0`, without bias correction:
    after t steps these have the weight d^t, and :math:`\bar\theta_t` is a weighted mean of
    parameters from the first step on. In the first 1 / (1 - d) steps (1,000 for d = 0.999) it is
    closer to the initial parameters than to the current ones.

    Source: Polyak and Juditsky 1992; with a decay, Kingma and Ba 2015, section 7.2.
    """
    # In this form the average of a constant parameter does not change by a single bit.
    return jax.tree.map(lambda mean, new: mean + (1 - decay) * (new - mean), average, params)


def eval_step(
    params: Params,
    batch: Batch,
    *,
    model: Transformer,
    config: TrainConfig,
    axis_name: str | None = None,
) -> Metrics:
    """Computes the metrics of a batch without dropout; arguments as in `train_step`.

    Returns:
      "loss" (the label-smoothed cross-entropy), "accuracy", and "cross_entropy" (without label
      smoothing; its exponential is the perplexity), all per target token.
    """
    logits = _apply(model, params, batch, deterministic=True)
    targets, weights = batch.decoder_target_tokens, batch.decoder_loss_weights
    loss = label_smoothed_cross_entropy(
        logits,
        targets,
        weights,
        smoothing=config.label_smoothing,
        convention=config.label_smoothing_convention,
        pad_id=model.config.pad_id,
    )
    metrics = {
        "loss": loss,
        "accuracy": accuracy(logits, targets, weights),
        "cross_entropy": label_smoothed_cross_entropy(logits, targets, weights),
    }
    return jax.lax.psum(metrics, axis_name) if axis_name else metrics


def _objective(
    model: Transformer, params: Params, batch: Batch, key: Array, config: TrainConfig
) -> tuple[Array, Metrics]:
    r"""Computes the objective, summed over the target tokens of some rows, and their metrics.

    With R-Drop it is

    .. math:: -\log p_1(y) - \log p_2(y)
        + \alpha \tfrac{1}{2} \left( KL(p_1 \| p_2) + KL(p_2 \| p_1) \right)

    p_1 and p_2 are the predictions of the same model with two dropout masks. (With label smoothing,
    the first two terms are the smoothed cross-entropy, as in the authors' code.) The gradient is
    therefore twice as long as without R-Drop, even if alpha is small: Adam is invariant to that,
    but `optimizer.clip_norm` must be doubled. The reported loss and accuracy are the means of the
    two passes.

    Source: Liang et al. 2021, equation 4.
    """
    passes = num_passes(config.r_drop)
    # A row and its copy are neighbours, and therefore on the same device.
    rows = jax.tree.map(functools.partial(jnp.repeat, repeats=passes, axis=0), batch)
    factors = _apply(model, params, rows, deterministic=False, rngs={"dropout": key}, project=False)
    objective, correct, divergence, weight = chunked_cross_entropy(
        factors.vectors,
        factors.table,
        factors.bias,
        rows.decoder_target_tokens,
        rows.decoder_loss_weights,
        CrossEntropyOptions(
            factors.scale,
            config.label_smoothing,
            config.label_smoothing_convention,
            model.config.pad_id,
            config.r_drop,
        ),
    )
    tokens = weight / passes
    metrics = {
        "loss": ((objective - config.r_drop * divergence) / passes, tokens),
        "accuracy": (correct / passes, tokens),
        "padding_fraction": _padding(batch),
        **_flops(model, batch, tokens, config, passes),
    }
    if config.r_drop:
        metrics["r_drop"] = (divergence, tokens)
    return objective, metrics


def _apply(model: Transformer, params: Params, batch: Batch, **options: Any) -> Any:
    """Applies the model to a batch, with the given options of `Transformer.__call__`."""
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


def _padding(batch: Batch) -> tuple[Array, Array]:
    """Counts the padding positions of source and target, and all positions."""
    padding, positions = jnp.float32(0), 0
    for segment_ids in (batch.encoder_segment_ids, batch.decoder_segment_ids):
        if segment_ids is not None:
            padding += jnp.sum(jnp.asarray(segment_ids) == 0, dtype=jnp.float32)
            positions += segment_ids.size
    return padding, jnp.float32(positions)


def _flops(
    model: Transformer, batch: Batch, tokens: Array, config: TrainConfig, passes: int
) -> Metrics:
    """Counts the model FLOPs; not for frozen parameters, which need fewer."""
    if config.freeze:
        return {}
    flops = training_flops(model.config, work_of_batch(batch))
    return {"flops_per_target_token": (passes * flops, tokens)}


def _sum_over_parts(function: Callable[[Batch, Array], Any], batch: Batch, num_parts: int) -> Any:
    """Sums function(rows, part) over parts of the batch, sequentially.

    Part p consists of rows p, p + num_parts, ...: if a device holds neighbouring rows, every part
    takes the same number of rows of each device, and no row has to move.
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
