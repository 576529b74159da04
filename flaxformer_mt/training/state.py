"""All that changes while a model is trained."""

from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxformer_mt.model.transformer import Transformer

Params: TypeAlias = dict[str, Any]
"""Nested dicts of arrays, as `Transformer.init` returns them."""


@flax.struct.dataclass
class TrainState:
    """The value that a training step takes and returns; what a checkpoint holds."""

    step: Array
    """Updates made, int32 []."""
    params: Params
    opt_state: optax.OptState
    key: Array
    """Raw data of the key of all dropout, uint32; a step folds its number in and never changes
    it."""


def create_state(
    model: Transformer, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """The state before the first step.

    Args:
      model: its parameters are drawn.
      optimizer: from `make_optimizer`.
      seed: of initial parameters and dropout.
    """

    @jax.jit
    def create(key: Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        tokens = jnp.zeros((1, 1), jnp.int32)  # no parameter depends on their shape
        source = tokens if model.config.has_inputs else None
        params = model.init(params_key, source, tokens)["params"]
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            key=jax.random.key_data(dropout_key),
        )

    return create(jax.random.key(seed))
