"""Direct preference optimization: the better of two translations becomes more probable.

    python examples/preferences.py runs/mine preferences.jsonl

Each line of the file has a "source", a "chosen" and a "rejected" translation. Source: Rafailov et
al. 2023, equation 7, with the model before training as the reference.
"""

import json
import sys
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

import flaxformer_mt as fmt

beta, length, rows, model = 0.1, 64, 16, fmt.load(sys.argv[1])
config, tokenizers = model.config.model, model.tokenizers
lines = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]
last_step = int(sys.argv[3]) if len(sys.argv) > 3 else 10 * len(lines) // rows
mesh, optimizer = fmt.make_mesh(), optax.adam(1e-5)
State: TypeAlias = dict[str, Any]
Batches: TypeAlias = dict[str, fmt.Batch]


def log_probabilities(params: Any, batch: fmt.Batch, key: Array | None = None) -> Array:
    log_p = jax.nn.log_softmax(fmt.apply(config, params, batch, key))
    targets = jnp.take_along_axis(log_p, batch.decoder_target_tokens[..., None], axis=-1)
    return jnp.sum(targets[..., 0] * batch.decoder_loss_weights, axis=-1)


def update(state: State, batch: Batches, key: Array, frozen: Any) -> tuple[State, Any]:
    def loss(params: Any) -> tuple[Array, dict[str, Array]]:
        chosen, rejected = (
            log_probabilities(params, side, key) - log_probabilities(frozen, side)
            for side in (batch["chosen"], batch["rejected"])
        )
        losses = -jax.nn.log_sigmoid(beta * (chosen - rejected))
        return losses.mean(), {"loss": losses.mean(), "preferred": jnp.mean(chosen > rejected)}

    gradient, metrics = jax.grad(loss, has_aux=True)(state["params"])
    updates, opt = optimizer.update(gradient, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics


def batch_of(step: int, side: str) -> fmt.Batch:
    part = [lines[(step * rows + row) % len(lines)] for row in range(rows)]
    pairs = [(line["source"], line[side]) for line in part]
    return fmt.padded(pairs, tokenizers, config, length=length, mesh=mesh)


params = model.params
state = {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}
state, step = fmt.place(state, mesh), fmt.compile_step(update, mesh, frozen=params)
for number in range(last_step):
    sides = {side: batch_of(number, side) for side in ("chosen", "rejected")}
    state, metrics = step(state, sides)
    print(number + 1, {name: round(float(value), 4) for name, value in metrics.items()})
fmt.save_run("runs/preferred", config, tokenizers, state["params"], overwrite=True)
