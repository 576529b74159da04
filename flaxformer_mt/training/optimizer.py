"""Learning rate schedules and optimizers, as optax transformations.

Optax counts updates from 0, the published formulas from t = 1; no update has a rate of 0.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.sharding import path_name


def make_schedule(config: OptimizerConfig, d_model: int, num_steps: int) -> optax.Schedule:
    r"""Returns the learning rate schedule of a configuration for D = `d_model`.

    With r = `learning_rate` and w = `warmup_length` (0 counts as 1), the rate of update t is

    - inverse_square_root: :math:`r \min(t / w, \sqrt{w / t})`, of Ott et al. 2019 (fairseq), which
      starts at t = 0;
    - noam: :math:`r D^{-1/2} \min(t^{-1/2}, t \cdot w^{-3/2})`, Vaswani et al. 2017, equation 3,
      with r = 1;
    - tensor2tensor: :math:`r D^{-1/2} \min(1, t / w) \max(t, w)^{-1/2}`, Vaswani et al. 2018
      (`linear_warmup * rsqrt_decay * rsqrt_hidden_size`), with r = 2 there and in `tunz`;
    - one_cycle: a cosine from r/25 to r, the rate after w updates, then one to r/250,000: Smith and
      Topin 2018, with cosines and constants as in fastai (and `annotated_wide_heads`), where w is
      0.3 of all steps. It ends after `total_steps`, by default the `num_steps` of the run.

    Returns:
      A function of the number of updates made (int32) to the rate of the next one (a scalar in
      JAX's default float).

    Raises:
      UserError: the warm-up is not shorter than one cycle.
    """
    rate, warmup = config.learning_rate, config.warmup_length(num_steps)
    w = max(warmup, 1)
    if config.schedule == "constant":
        return optax.constant_schedule(rate)
    if config.schedule == "one_cycle":
        return _one_cycle(rate, warmup, config.total_steps or num_steps)
    by_width = rate * d_model**-0.5
    formulas: dict[str, Callable[[Array], Array]] = {
        "inverse_square_root": lambda t: rate * jnp.minimum(t / w, jnp.sqrt(w / t)),
        "noam": lambda t: by_width * jnp.minimum(t**-0.5, t * w**-1.5),
        "tensor2tensor": lambda t: by_width * jnp.minimum(1, t / w) * jnp.maximum(t, w) ** -0.5,
    }
    formula = formulas[config.schedule]
    return lambda count: formula(jnp.asarray(count, float) + 1)


def _one_cycle(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    if not 0 < warmup_steps < total_steps:
        raise UserError(
            f"optimizer.warmup_steps={warmup_steps} must lie between 0 and the {total_steps} steps "
            "of optimizer.schedule=one_cycle; 0.3 of them is usual. To train only the first steps "
            "of a longer cycle, set optimizer.total_steps to its length"
        )
    schedule = _with_standard_promotion(
        optax.piecewise_interpolate_schedule(
            "cosine", peak / 25, {warmup_steps: 25, total_steps: 1 / 250_000}
        )
    )
    # Optax would divide int32 counts in float32, even if the default is float64.
    return lambda count: schedule(jnp.asarray(count, float))


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Makes an optimizer with a schedule, after clipping by global norm if configured.

    Adafactor has no momentum, as T5 is trained with: matrices have factored second moments if both
    dimensions are at least 128.

    Source: Kingma and Ba 2015 (Adam); Loshchilov and Hutter 2019 (AdamW); Shazeer and Stern 2018
    (Adafactor).
    """
    moments = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    match config.kind:
        case "adam":
            optimizer = optax.adam(schedule, **moments)
        case "adamw":
            optimizer = optax.adamw(schedule, weight_decay=config.weight_decay, **moments)
        case "adafactor":
            optimizer = _for_each_layer(optax.adafactor(schedule))
    if config.clip_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)

    return optax.GradientTransformation(optimizer.init, _with_standard_promotion(optimizer.update))


def _for_each_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies an optimizer to each layer of stacked parameters [L, ...] by itself.

    Its means over a parameter must not include other layers.
    """

    def over_layers(function: Callable) -> Callable:
        def wrapped(tree: Any, *rest: Any) -> Any:
            # All layers may be frozen.
            return (jax.vmap(function) if jax.tree.leaves(tree) else function)(tree, *rest)

        return wrapped

    def label(path: Any, _: Any) -> str:
        stack, *rest = path_name(path).split("/")
        return stack if rest[:1] == ["layers"] else "other"

    layers = optax.GradientTransformation(
        over_layers(optimizer.init), over_layers(optimizer.update)
    )
    # The stacks may differ in their number of layers.
    return optax.partition(
        {"encoder": layers, "decoder": layers, "other": optimizer},
        functools.partial(jax.tree_util.tree_map_with_path, label),
    )


def _with_standard_promotion(function: Callable) -> Callable:
    """Wraps a function of optax, which mixes ints and floats, for strict dtype promotion."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    return wrapped
