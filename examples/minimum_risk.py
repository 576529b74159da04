"""Minimum-risk training: samples that are drawn in the step, weighted by how wrong they are.

    python examples/minimum_risk.py runs/mine mine.tsv

The risk is 1 - F1 of the tokens of a sample and the reference. Source: Shen et al. 2016.
"""

import sys
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

import flaxformer_mt as fmt

n, sharpness, length = 8, 0.05, 32  # n samples per sentence.
model = fmt.load(sys.argv[1])
config, tokenizers = model.config.model, model.tokenizers
pairs, last_step = fmt.read_pairs(sys.argv[2], columns=(1, 2)), int((sys.argv[3:] or ["500"])[0])
data = fmt.packed(
    pairs, tokenizers, config, rows=16, length=length, batching="buckets", bucket_lengths=(length,)
)  # One pair per row: `fmt.sample` refuses packed rows.
mesh, optimizer = fmt.make_mesh(), optax.adam(1e-5)
State: TypeAlias = dict[str, Any]


def token_f1(tokens: Array, weights: Array, references: Any, reference_weights: Any) -> Array:
    def counts(tokens: Array, weights: Array) -> Array:
        return (jax.nn.one_hot(tokens, config.target_vocab_size) * weights[..., None]).sum(-2)

    both = counts(tokens, weights), counts(references, reference_weights)[:, None]
    common = jnp.minimum(*both).sum(-1)
    return 2 * common / (both[0].sum(-1) + both[1].sum(-1))


def update(state: State, batch: fmt.Batch, key: Array, frozen: Any) -> tuple[State, Any]:
    samples = fmt.sample(config, state["params"], batch, key, n, max_length=length, unpacked=True)
    references = batch.decoder_target_tokens, batch.decoder_loss_weights
    risk = 1 - token_f1(samples.tokens, samples.weights, *references)
    rows = samples.rows(batch)  # B * n rows, each with a source and one of its samples.

    def expected_risk(params: Any) -> Array:
        log_p = jax.nn.log_softmax(fmt.apply(config, params, rows))
        of_tokens = jnp.take_along_axis(log_p, rows.decoder_target_tokens[..., None], -1)[..., 0]
        log_q = jnp.sum(of_tokens * rows.decoder_loss_weights, -1).reshape(-1, n)
        return jnp.mean(jnp.sum(jax.nn.softmax(sharpness * log_q) * risk, axis=-1))

    value, gradient = jax.value_and_grad(expected_risk)(state["params"])
    updates, opt = optimizer.update(gradient, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, value


state = {"params": model.params, "opt": optimizer.init(model.params), "step": jnp.int32(0)}
state, step = fmt.place(state, mesh), fmt.compile_step(update, mesh, seed=0)
for batch, position in data.batches(mesh):
    state, risk = step(state, batch)
    print(position.step, f"expected risk {risk:.4f}")
    if position.step == last_step:
        break
fmt.save_run("runs/minimum-risk", config, tokenizers, state["params"], overwrite=True)
