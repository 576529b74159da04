"""Speculative decoding: a small model proposes tokens, and the large one verifies them in one step.

    python examples/speculative_decoding.py runs/large runs/small < sentences.txt

The tokens are those of greedy search with the large model. Source: Leviathan et al. 2023.
"""

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import flaxformer_mt as fmt

loaded = [fmt.load(folder) for folder in sys.argv[1:3]]
tokenizers, params = loaded[0].tokenizers, [model.params for model in loaded]
modules = [fmt.Transformer(tokenizers.with_sizes(model.config.model)) for model in loaded]
config, end, longest = modules[0].config, modules[0].config.eos_id, 64
batch = fmt.padded([(line.strip(), "") for line in sys.stdin], tokenizers, config, length=longest)


@functools.partial(jax.jit, static_argnums=2)
def search(params: Any, source: Array, k: int) -> tuple[Array, Any]:
    """Returns tokens [B, T], and the number of steps of the large model."""
    models = [module.bind({"params": tree}) for module, tree in zip(modules, params, strict=True)]

    def best(model: Any, tokens: Array, cache: Any, positions: Array) -> tuple[Array, Any]:
        # The most probable token after each of [B, N].
        logits, cache = model.decode_step(tokens, cache, positions)
        logits = logits.at[..., jnp.array([config.pad_id, config.bos_id])].set(-jnp.inf)
        return logits.argmax(-1).astype(jnp.int32), cache

    def step(state: Any) -> Any:
        found, number, last, done, (cache, small_cache), steps = state
        each = [last]
        for i in range(k + 1 if k else 0):  # The last of these only completes the cache.
            token, small_cache = best(models[1], each[-1], small_cache, number + i)
            each.append(token)
        given = jnp.concatenate(each[: k + 1], axis=1)  # [B, k + 1]
        verified, cache = best(models[0], given, cache, number)
        agreed = jnp.cumprod(given[:, 1:] == verified[:, :-1], axis=1).sum(1, keepdims=True)
        found = jax.vmap(jax.lax.dynamic_update_slice)(found, verified, number[:, None])
        ended = ((verified == end) & (jnp.arange(k + 1) <= agreed)).any(1)
        number = jnp.where(done, number, number + agreed[:, 0] + 1)
        last, done = jnp.take_along_axis(verified, agreed, 1), done | ended | (number >= longest)
        return found, number, last, done, (cache, small_cache), steps + 1

    at, room = jnp.zeros(len(source), jnp.int32), longest + 2 * k + 2
    caches = tuple(each.init_cache(each.encode(source), source, 1, room) for each in models)
    state = jnp.full((len(at), room), end), at, at[:, None] + config.bos_id, at > 0, caches, 0
    found, *_, steps = jax.lax.while_loop(lambda state: ~state[3].all(), step, state)
    return found[:, :longest], steps


for k in (0, 4):
    search(params, batch.encoder_input_tokens, k)  # Compiles.
    begin = time.perf_counter()
    tokens, steps = jax.device_get(search(params, batch.encoder_input_tokens, k))
    speed = len(tokens) / (time.perf_counter() - begin)
    texts = tokenizers.target.decode([row[: (row != end).cumprod().sum()] for row in tokens])
    print(f"{k} proposals: {steps} steps, {speed:.1f} sentences per second", *texts, sep="\n")
