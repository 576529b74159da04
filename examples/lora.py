"""Adapters of an imported model, W + (alpha / r) A B (LoRA, Hu et al. 2021), exported to PEFT."""
# python examples/lora.py opus-mt-en-de mine.tsv 2000

import sys
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

import flaxformer_mt as fmt

rank, alpha, model = 8, 16, fmt.load(sys.argv[1])
config, tokenizers = model.config.model, model.tokenizers
pairs, last_step = fmt.read_pairs(sys.argv[2], columns=(1, 2)), int(sys.argv[3])
data = fmt.packed(pairs, tokenizers, config, rows=32, length=64, seed=0)
mesh, optimizer = fmt.make_mesh(), optax.adam(1e-3)
State: TypeAlias = dict[str, Any]


def create(key: Array) -> State:
    adapters = {}
    for path, kernel in flatten_dict(model.params, sep="/").items():
        if path.endswith(("query/kernel", "value/kernel")):
            key, own = jax.random.split(key)
            a = jax.random.normal(own, (*kernel.shape[:-1], rank)) / rank
            adapters[path] = {"a": a, "b": jnp.zeros((*kernel.shape[:-2], rank, kernel.shape[-1]))}
    return {"adapters": adapters, "opt": optimizer.init(adapters), "step": jnp.int32(0)}


def merged(base: Any, adapters: Any) -> Any:
    leaves = flatten_dict(base, sep="/")
    for path, adapter in adapters.items():
        leaves[path] = leaves[path] + alpha / rank * adapter["a"] @ adapter["b"]
    return unflatten_dict(leaves, sep="/")


def update(state: State, batch: fmt.Batch, key: Array, frozen: Any) -> tuple[State, Any]:
    def loss(adapters: Any) -> Array:
        sums = fmt.cross_entropy(config, merged(frozen, adapters), batch, key, smoothing=0.1)
        return sums.loss / sums.weight

    value, gradient = jax.value_and_grad(loss)(state["adapters"])
    updates, opt = optimizer.update(gradient, state["opt"])
    adapters = optax.apply_updates(state["adapters"], updates)
    return {"adapters": adapters, "opt": opt, "step": state["step"] + 1}, value


step = fmt.compile_step(update, mesh, frozen=model.params)
with fmt.Checkpoints("runs/adapters", optimizer=optimizer) as checkpoints:  # Adapters only.
    state, position = checkpoints.restore_or(fmt.create(create, mesh), data.start)
    batches = data.batches(mesh, position)
    while position.step < last_step:
        batch, position = next(batches)
        state, loss = step(state, batch)
        if position.step % 100 == 0:
            checkpoints.save(position.step, state, position)
            print(position.step, f"loss {loss:.4f}")
adapters = jax.device_get(state["adapters"])
fmt.save_adapter("runs/adapter", model, adapters, alpha=alpha)  # For peft.PeftModel and fmt.load.
params = jax.device_get(merged(model.params, adapters))
fmt.save_run("runs/merged", config, tokenizers, params, overwrite=True)
