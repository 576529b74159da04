"""Word-level distillation: a small student learns the predictions of a trained teacher.

    python examples/distillation.py runs/teacher mine.tsv

The options `--train.teacher=runs/teacher` of `flaxformer-mt train` do the same.
"""

import dataclasses
import sys
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

import flaxformer_mt as fmt

path, last_step = sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20_000
teacher = fmt.load(sys.argv[1])
tokenizers, big = teacher.tokenizers, teacher.config.model
small = dataclasses.replace(big, num_decoder_layers=1)
pairs = fmt.read_pairs(path, columns=(1, 2))
data = fmt.packed(pairs, tokenizers, small, rows=64, length=64, seed=0)
mesh, optimizer = fmt.make_mesh(), optax.adam(1e-3, b2=0.98)
State: TypeAlias = dict[str, Any]


def create(key: Array) -> State:
    params = fmt.init(small, key)
    return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}


def update(state: State, batch: fmt.Batch, key: Array, frozen: Any) -> tuple[State, Any]:
    def loss(params: Any) -> tuple[Array, Any]:
        term = fmt.Distillation(weight=0.5, temperature=2.0)
        sums = fmt.cross_entropy(small, params, batch, key, term=term, teacher=(big, frozen))
        return sums.loss / sums.weight, sums.metrics

    gradient, metrics = jax.grad(loss, has_aux=True)(state["params"])
    updates, opt = optimizer.update(gradient, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics


step, state = fmt.compile_step(update, mesh, frozen=teacher.params), fmt.create(create, mesh)
for batch, position in data.batches(mesh):
    state, metrics = step(state, batch)
    if position.step % 100 == 0 or position.step == last_step:
        print(position.step, {name: float(a / b) for name, (a, b) in metrics.items()})
    if position.step == last_step:
        break
fmt.save_run("runs/student", small, tokenizers, state["params"], overwrite=True)
