"""Your own training script: every part is a public function, and a restart continues it.

python examples/plain_script.py mine.tsv
"""

import sys
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

import flaxformer_mt as fmt

path, last_step = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
pairs = fmt.read_pairs(path, columns=(1, 2))
tokenizers = fmt.train_tokenizers(pairs, size=8000)
config = fmt.TransformerConfig(d_model=256, num_heads=4, d_ff=1024, **tokenizers.fields)
data = fmt.packed(pairs, tokenizers, config, rows=256, length=64, seed=0)
mesh = fmt.make_mesh()
optimizer = optax.adam(1e-3, b2=0.98)
State: TypeAlias = dict[str, Any]


def create(key: Array) -> State:
    params = fmt.init(config, key)
    return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}


def update(state: State, batch: fmt.Batch, key: Array, frozen: Any) -> tuple[State, Any]:
    def loss(params: Any) -> tuple[Array, fmt.Sums]:
        sums = fmt.cross_entropy(config, params, batch, key, smoothing=0.1)
        return sums.loss / sums.weight, sums

    gradient, sums = jax.grad(loss, has_aux=True)(state["params"])
    updates, opt = optimizer.update(gradient, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, sums


step = fmt.compile_step(update, mesh, seed=0)
with fmt.Checkpoints("runs/mine", optimizer=optimizer) as checkpoints:
    state, position = checkpoints.restore_or(fmt.create(create, mesh, seed=0), data.start)
    for batch, position in data.batches(mesh, position):
        state, sums = step(state, batch)
        if position.step % 1000 == 0:
            checkpoints.save(position.step, state, position)
            print(position.step, sums.loss / sums.weight)
            print(fmt.translate(config, state["params"], tokenizers, ["a dog runs"]))
        if position.step >= last_step:
            break
fmt.save_run("runs/mine-final", config, tokenizers, state["params"], overwrite=True)
