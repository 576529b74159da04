"""The training state."""

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import Array

from flaxformer_mt.config import ExperimentConfig, TrainConfig
from flaxformer_mt.model.functional import init
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.devices import RunDevices, abstract, seed_key
from flaxformer_mt.training.parameters import Params, split


@flax.struct.dataclass
class TrainState:
    """The state that a training step takes and returns, and a checkpoint holds."""

    step: Array
    """Number of steps made, including skipped ones: int32 []."""
    params: Params
    opt_state: optax.OptState
    """Optimizer state of the trained parameters; frozen ones have none."""
    ema: Params | None = None
    """Exponential moving average of `params`, if enabled."""
    skipped: Array = flax.struct.field(default_factory=lambda: jnp.zeros((), jnp.int32))
    """Number of most recent steps in a row that were skipped, because loss, gradient or update was
    not finite: int32 []."""

    @property
    def eval_params(self) -> Params:
        """Parameters for validation and translation: the moving average, if enabled."""
        return self.params if self.ema is None else self.ema


def state_maker(
    config: ExperimentConfig, optimizer: optax.GradientTransformation
) -> Callable[[Array], TrainState]:
    """Returns the `create_state` of a configuration, a function of the key."""
    model = Transformer(config.model)
    return functools.partial(create_state, model=model, optimizer=optimizer, config=config.train)


def abstract_state(
    config: ExperimentConfig, optimizer: optax.GradientTransformation, devices: RunDevices
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state of a configuration."""
    shapes = jax.eval_shape(state_maker(config, optimizer), seed_key(0))
    return abstract(shapes, devices.mesh, devices.rules)


def create_state(
    key: Array, model: nn.Module, optimizer: optax.GradientTransformation, config: TrainConfig
) -> TrainState:
    """Creates the state before the first step; traceable by `jax.eval_shape` and `jax.jit`.

    `config` says whether there is a moving average, and what is frozen.
    """

    @jax.jit
    def create(key: Array) -> TrainState:
        params = init(model, key)
        trained, _ = split(params, config.freeze)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(trained),
            ema=params if config.ema_decay else None,
        )

    return create(key)
