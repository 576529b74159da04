"""The training step and the validation step, as pure functions.

Each device sums over its tokens, and the sums are added over micro-batches and devices before they
are divided by the number of target tokens in the whole batch. Loss and gradient therefore do not
depend on how the batch is split.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import Array

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.data.stream.placement import row_shards
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.functional import apply_to_batch
from flaxformer_mt.model.logical_axes import mesh_of_rules, mesh_platform
from flaxformer_mt.objectives.cross_entropy import Metrics, Objective, Sums
from flaxformer_mt.objectives.losses import accuracy, label_smoothed_cross_entropy
from flaxformer_mt.training.devices import device_key, sum_over_devices
from flaxformer_mt.training.parameters import Params, merge, split
from flaxformer_mt.training.state import TrainState

Tree = TypeVar("Tree")


def train_step(
    state: TrainState,
    batch: Batch,
    key: Array,
    frozen: Any = None,
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
) -> tuple[TrainState, Metrics]:
    """Updates the parameters and their moving average once.

    If the loss, the gradient or the updated parameters are not finite, the update is skipped:
    parameters, average and optimizer state do not change, but the step number, and with it data and
    dropout, advances.

    Args:
      state: before the update.
      batch: B rows, a multiple of `config.accumulation_steps`; under pmap this device's rows.
      key: of the dropout of this step.
      frozen: the last argument of the objective.
      objective: what is minimized.
      optimizer: from `make_optimizer`.
      config: accumulation, moving average, and parameters that are not trained.

    Returns:
      The state after the update, and these metrics:

      - those of the objective, such as "loss" and "accuracy" per target token; the FLOPs are left
        out if parameters are not trained;
      - "objective": what is minimized, if the objective reports no "loss";
      - "padding_fraction", per position;
      - "target_tokens", per step;
      - "gradient_norm", per step: of the trained parameters, before clipping;
      - "skipped_steps", per step: 0 or 1;
      - "nonfinite_loss", "nonfinite_gradient" and "nonfinite_update", per step: 0 or 1, where the
        first of the three that was not finite counts.

      In a skipped step the others have the weight 0, except for the padding fraction: their means
      are those of the other steps.
    """
    gradient, sums = gradients(state.params, batch, key, frozen, objective=objective, config=config)
    norm = optax.tree.norm(gradient)
    one = jnp.ones_like(norm)
    metrics = {**_reported(sums, config), "gradient_norm": (norm, one)}

    def update(state: TrainState) -> tuple[Params, Params, Any]:
        trained, fixed = split(state.params, config.freeze)
        updates, opt_state = optimizer.update(gradient, state.opt_state, trained)
        return optax.apply_updates(trained, updates), fixed, opt_state

    trained, fixed, opt_state = update(state)
    # All are sums over all devices, so that all make the same decision. A finite norm also bounds
    # what is computed from parameters and gradient: the optimizer's state and the moving average.
    loss_is_finite, gradient_is_finite, update_is_finite = map(
        jnp.isfinite, (sums.loss, norm, optax.tree.norm(trained))
    )
    is_finite = loss_is_finite & gradient_is_finite & update_is_finite
    if mesh_platform() == "gpu":
        # Computed again where it is written: XLA would write the new parameters, and read them and
        # the old ones again to choose between them.
        state = jax.lax.optimization_barrier(state)
        trained, fixed, opt_state = update(state)
    params = merge(trained, fixed)
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
    params: Params,
    batch: Batch,
    key: Array,
    frozen: Any = None,
    *,
    objective: Objective,
    config: TrainConfig,
) -> tuple[Params, Sums]:
    """Computes the gradient of the objective; arguments as in `train_step`.

    Returns:
      The gradient with respect to the trained parameters of the mean of the objective over its
      weights in the batch (per target token, for cross-entropy), and the sums of the same pass.
    """
    trained, fixed = split(params, config.freeze)

    def gradient_sum(rows: Batch, part: Array) -> tuple[Params, Sums]:
        part_key = device_key(jax.random.fold_in(key, part))
        if config.dropout_generator == "rbg":
            # Its keys have the words of two of Threefry's.
            words = jax.random.key_data(jax.random.split(part_key))
            part_key = jax.random.wrap_key_data(words.reshape(-1), impl="rbg")

        def loss(trained: Params) -> tuple[Array, Sums]:
            sums = objective(merge(trained, fixed), rows, part_key, frozen)
            metrics = {**sums.metrics, "padding_fraction": _padding(rows)}
            return sums.loss, dataclasses.replace(sums, metrics=metrics)

        return jax.grad(loss, has_aux=True)(trained)

    gradient, sums = sum_over_devices(accumulate(gradient_sum, batch, config.accumulation_steps))
    # Without targets the gradient is 0, not NaN.
    weight = jnp.where(sums.weight > 0, sums.weight, 1)
    return jax.tree.map(lambda g: g / weight.astype(g.dtype), gradient), sums


def _reported(sums: Sums, config: TrainConfig) -> Metrics:
    metrics = {**sums.metrics, "target_tokens": (sums.tokens, jnp.ones_like(sums.tokens))}
    if "loss" not in metrics:
        metrics["objective"] = (sums.loss, sums.weight)
    if config.freeze:  # The gradients of fewer parameters need fewer.
        metrics.pop("flops_per_target_token", None)
    return metrics


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


def eval_step(params: Params, batch: Batch, *, model: nn.Module, config: TrainConfig) -> Metrics:
    """Computes the metrics of a batch without dropout, for any objective.

    Returns:
      "loss" (the label-smoothed cross-entropy), "accuracy", and "cross_entropy" (without label
      smoothing; its exponential is the perplexity), all per target token.
    """
    logits = apply_to_batch(model, params, batch, None)
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
    return sum_over_devices(metrics)


def _padding(batch: Batch) -> tuple[Array, Array]:
    padding, positions = jnp.float32(0), 0
    for segment_ids in (batch.encoder_segment_ids, batch.decoder_segment_ids):
        if segment_ids is not None:
            padding += jnp.sum(jnp.asarray(segment_ids) == 0, dtype=jnp.float32)
            positions += segment_ids.size
    return padding, jnp.float32(positions)


def accumulate(function: Callable[[Any, Array], Tree], batch: Any, parts: int) -> Tree:
    """Sums `function(rows, part)` over parts of the rows of a batch, one after the other.

        def gradient(rows, part):
            loss = lambda params: fmt.cross_entropy(config, params, rows, key_of(part)).loss
            return jax.grad(loss)(params)

        total = fmt.accumulate(gradient, batch, parts=4)

    Part p has the rows p, p + parts, ...: where a device has neighboring rows, every part takes as
    many of each device, and no row moves. Sums of losses do not depend on the number of parts.

    Args:
      function: a pure function of some rows, in the form of `batch`, and the number of the part, an
        int32 scalar, from which keys can be folded.
      batch: a tree of arrays [B, ...].
      parts: their number, which times the number of devices that share the rows divides B.

    Returns:
      The sum of what the function returns, a tree of arrays.

    Raises:
      UserError: the rows cannot be divided so.
    """
    rows, mesh = len(jax.tree.leaves(batch)[0]), mesh_of_rules()
    devices = 1 if mesh is None else row_shards(mesh)
    if parts < 1 or rows % (parts * devices):
        raise UserError(
            f"{rows} rows cannot be divided evenly into {parts} parts on {devices} devices: the "
            f"number of rows has to be a multiple of {parts * devices}"
        )
    if parts == 1:
        return function(batch, jnp.int32(0))
    divided = jax.tree.map(
        lambda rows: rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1), batch
    )
    numbers = jnp.arange(parts, dtype=jnp.int32)

    def add(sums: Any, part: tuple[Any, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(*part)), None

    first = jax.tree.map(lambda rows: rows[0], (divided, numbers))
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *first)
    )
    return jax.lax.scan(add, zeros, (divided, numbers))[0]
