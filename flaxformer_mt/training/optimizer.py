"""Learning rate schedules and optimizers, as optax transformations.

Optax counts updates from 0, the published formulas from t = 1; no update has a rate of 0.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array

from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.config.optimizer import KINDS
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import states
from flaxformer_mt.training.parameters import is_matrix, per_layer


def make_schedule(config: OptimizerConfig, d_model: int, num_steps: int) -> optax.Schedule:
    r"""Returns the learning rate schedule of a configuration for D = `d_model`.

    With r = `learning_rate`, w = `warmup_length` (0 counts as 1) and N = `total_steps`, by default
    the `num_steps` of the run, the rate of update t is

    - inverse_square_root: :math:`r \min(t / w, \sqrt{w / t})`, of Ott et al. 2019 (fairseq), which
      starts at t = 0;
    - noam: :math:`r D^{-1/2} \min(t^{-1/2}, t \cdot w^{-3/2})`, Vaswani et al. 2017, equation 3,
      with r = 1;
    - tensor2tensor: :math:`r D^{-1/2} \min(1, t / w) \max(t, w)^{-1/2}`, Vaswani et al. 2018
      (`linear_warmup * rsqrt_decay * rsqrt_hidden_size`), with r = 2 there and in `tunz`;
    - one_cycle: a cosine from r/25 to r, the rate after w updates, then one to r/250,000: Smith and
      Topin 2018, with cosines and constants as in fastai (and `annotated_wide_heads`), where w is
      0.3 of all steps. It ends after N;
    - linear: :math:`r \min(t / w, u)`, u = (N + 1 - t) / (N - `warmup_length`), and 0 after N;
    - cosine: :math:`r \min(t / w, (1 - \cos \pi u) / 2)`, Loshchilov and Hutter 2017, without
      restarts;
    - warmup_stable_decay: :math:`r \min(t / w, 1, (N + 1 - t) / (d N))` with d = `decay`, Hu et al.
      2024 (MiniCPM), with the linear decay of Hägele et al. 2024.

    After the warm-up, the last three are those of Hugging Face Transformers.

    Returns:
      A function of the number of updates made (int32) to the rate of the next one (a scalar in
      JAX's default float).

    Raises:
      UserError: the warm-up, and the decay, are longer than a schedule that has an end.
    """
    rate, warmup = config.learning_rate, warmup_length(config, num_steps)
    w = max(warmup, 1)
    if config.schedule == "constant":
        return optax.constant_schedule(rate)
    total = config.total_steps or num_steps
    if config.schedule_has_end:
        _require_space(config, warmup, total)
    if config.schedule == "one_cycle":
        return _one_cycle(rate, warmup, total)
    by_width = rate * d_model**-0.5

    def left(t: Array, length: float) -> Array:
        """1 at the start of a decay of some length that ends with the schedule, 0 after it."""
        return jnp.clip((total + 1 - t) / length, 0, 1)

    formulas: dict[str, Callable[[Array], Array]] = {
        "inverse_square_root": lambda t: rate * jnp.minimum(t / w, jnp.sqrt(w / t)),
        "noam": lambda t: by_width * jnp.minimum(t**-0.5, t * w**-1.5),
        "tensor2tensor": lambda t: by_width * jnp.minimum(1, t / w) * jnp.maximum(t, w) ** -0.5,
        "linear": lambda t: rate * jnp.minimum(t / w, left(t, total - warmup)),
        "cosine": lambda t: (
            rate * jnp.minimum(t / w, (1 - jnp.cos(jnp.pi * left(t, total - warmup))) / 2)
        ),
        "warmup_stable_decay": lambda t: rate * jnp.minimum(t / w, left(t, config.decay * total)),
    }
    formula = formulas[config.schedule]
    return lambda count: formula(jnp.asarray(count, float) + 1)


def warmup_length(config: OptimizerConfig, num_steps: int) -> int:
    """Returns w for a run of `num_steps` steps; a share is at least one and not all of them."""
    if not config.warmup:
        return config.warmup_steps
    total = config.total_steps or num_steps
    return max(1, min(round(config.warmup * total), total - 1))


def _require_space(config: OptimizerConfig, warmup_steps: int, total_steps: int) -> None:
    """Raises `UserError` if a schedule with an end has no steps for its parts."""
    decay = config.decay * total_steps if config.schedule == "warmup_stable_decay" else 1
    lowest = 1 if config.schedule == "one_cycle" else 0
    if not lowest <= warmup_steps <= total_steps - decay:
        raise UserError(
            f"optimizer.warmup_steps={warmup_steps} must be at least {lowest}, and leave {decay:g} "
            f"of {total_steps} steps to the decay of optimizer.schedule={config.schedule}: give "
            "optimizer.warmup, a share of them, or the length of a longer schedule, of which only "
            "the first steps are trained, as optimizer.total_steps"
        )


def _one_cycle(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    schedule = _with_standard_promotion(
        optax.piecewise_interpolate_schedule(
            "cosine", peak / 25, {warmup_steps: 25, total_steps: 1 / 250_000}
        )
    )
    # Optax would divide int32 counts in float32, even if the default is float64.
    return lambda count: schedule(jnp.asarray(count, float))


UserOptimizer: TypeAlias = Callable[[optax.Schedule], optax.GradientTransformation]
"""Makes an optimizer with a learning rate schedule, as `optax.lion` does."""


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, own: UserOptimizer | None = None
) -> optax.GradientTransformation:
    """Makes an optimizer with a schedule, after clipping by global norm if configured.

    A function `own` makes the optimizer if the configuration does not name a built-in one.

    Adafactor has no momentum, as T5 is trained with: matrices have factored second moments if both
    dimensions are at least 128.

    Muon orthogonalizes the update of each matrix of each layer; AdamW trains the other parameters.
    The updates of matrices have the root mean square of Adam's, 0.2, so that one learning rate and
    one weight decay serve both.

    Source: Kingma and Ba 2015 (Adam); Loshchilov and Hutter 2019 (AdamW); Shazeer and Stern 2018
    (Adafactor); Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", with
    the scale of Liu et al. 2025, "Muon is Scalable for LLM Training".
    """
    decay = {"weight_decay": config.weight_decay}
    moments = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    match config.kind:
        case "adam":
            optimizer = optax.adam(schedule, **moments)
        case "adamw":
            optimizer = optax.adamw(schedule, **decay, **moments)
        case "adafactor":
            optimizer = per_layer(optax.adafactor(schedule))
        case "muon":
            optimizer = _muon(config, schedule, optax.adamw(schedule, **decay, **moments))
        case _ if own is None:
            raise UserError(
                f"optimizer.kind={config.kind} is none of {', '.join(KINDS)}, but the name of a "
                "function: start and continue the run from Python, with "
                "flaxformer_mt.train(config, workdir, optimizer=FUNCTION)"
            )
        case _:
            optimizer = _made(own, schedule)
    if config.clip_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)

    return optax.GradientTransformation(optimizer.init, _with_standard_promotion(optimizer.update))


def with_optimizer(config: OptimizerConfig, own: UserOptimizer) -> OptimizerConfig:
    """Returns a configuration that records a function that makes an optimizer.

    The constants are those of `states.of_optimizer`, without those of the schedule.

    Raises:
      TypeError: the function does not make an optimizer.
      UserError: it has no name, or that of a built-in optimizer.
    """
    kind = states.name_of(own, "optimizer", KINDS)
    made = states.of_optimizer(_made(own, optax.constant_schedule(1.0)).update)
    prefix = f"{states.OPTIMIZER}/"
    constants = (f"{name.removeprefix(prefix)}={value!r}" for name, value in made.items())
    return dataclasses.replace(config, kind=kind, constants=tuple(sorted(constants)))


def _made(own: UserOptimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    with jax.numpy_dtype_promotion("standard"):
        made = own(schedule)
    if not isinstance(made, optax.GradientTransformation):
        raise TypeError(
            "optimizer must be a function that returns an optax.GradientTransformation, such as "
            f"optax.lion, not {type(made).__name__}"
        )
    return made


def _muon(
    config: OptimizerConfig, schedule: optax.Schedule, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    def last_two_axes(tree: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), tree)

    def labels(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: "matrix" if is_matrix(path, leaf) else "other", tree
        )

    def with_rms_of_adam(update: Array) -> Array:
        return 0.2 * max(update.shape[-2:]) ** 0.5 * update

    matrices = optax.chain(
        optax.contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=last_two_axes),
        optax.stateless(lambda updates, _: jax.tree.map(with_rms_of_adam, updates)),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"matrix": matrices, "other": others}, labels)


def _with_standard_promotion(function: Callable) -> Callable:
    """Wraps a function of optax, which mixes ints and floats, for strict dtype promotion."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    return wrapped
