"""All that changes while a model is trained."""

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.parameters import Params, split


@flax.struct.dataclass
class TrainState:
    """The value that a training step takes and returns; what a checkpoint holds."""

    step: Array
    """Steps made, skipped ones included: int32 []."""
    params: Params
    opt_state: optax.OptState
    """Of the trained parameters only: frozen ones have no moments."""
    key: Array
    """Raw data of the key of all dropout, uint32; a step folds its number in and never changes
    it."""
    ema: Params | None = None
    """The moving average of `params`, if there is one."""
    skipped: Array = flax.struct.field(default_factory=lambda: jnp.zeros((), jnp.int32))
    """The last so many steps changed nothing, as loss or gradient was not finite: int32 []."""

    @property
    def eval_params(self) -> Params:
        """What to validate and translate with: the average, or else the parameters."""
        return self.params if self.ema is None else self.ema


def create_state(
    model: Transformer, optimizer: optax.GradientTransformation, config: TrainConfig
) -> TrainState:
    """The state before the first step.

    May itself be traced, by `jax.eval_shape` or by a jit that places what it makes.

    Args:
      model: its parameters are drawn.
      optimizer: from `make_optimizer`.
      config: its `seed` gives initial parameters and dropout; it says whether there is an average,
        which starts at the initial parameters, and what is frozen.

    Raises:
      UserError: `config.freeze` does not fit the model.
    """

    @jax.jit
    def create(key: Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        tokens = jnp.zeros((1, 1), jnp.int32)  # no parameter depends on their shape
        source = tokens if model.config.has_inputs else None
        params = model.init(params_key, source, tokens)["params"]
        trained, _ = split(params, config.freeze)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(trained),
            key=jax.random.key_data(dropout_key),
            ema=params if config.ema_decay else None,
            skipped=jnp.zeros((), jnp.int32),
        )

    return create(jax.random.key(config.seed))
