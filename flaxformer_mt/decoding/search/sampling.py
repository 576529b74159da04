"""Sampling of tokens, optionally restricted to the more probable ones.

An excluded token has a logit of minus infinity.

Source of the formulas: `generation/logits_process.py` of Hugging Face transformers.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.top_k import in_blocks, top_k

Logits = Float[Array, "*rows V"]


def filter_logits(logits: Logits, options: SearchOptions) -> Logits:
    """Applies temperature, top_k, top_p, min_p and epsilon_cutoff, in this order."""
    if options.temperature is not None:
        logits = logits / options.temperature
    if options.top_k:
        logits = keep_top_k(logits, options.top_k)
    if options.top_p is not None:
        logits = keep_top_p(logits, options.top_p)
    if options.min_p is not None:
        logits = keep_min_p(logits, options.min_p)
    if options.epsilon_cutoff is not None:
        logits = keep_above_epsilon(logits, options.epsilon_cutoff)
    return logits


def keep_top_k(logits: Logits, count: int) -> Logits:
    """Keeps the `count` most probable tokens, and those as probable as the last of them."""
    best, _ = top_k(logits, count)
    return _exclude(logits, logits < best[..., -1:])


def keep_top_p(logits: Logits, probability: float | Array) -> Logits:
    """Keeps the most probable tokens whose probabilities sum to at least `probability`.

    Tokens as probable as the last one kept, and the most probable token, are always kept.

    Source: Holtzman et al. 2020.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)

    def as_float(bits: Array) -> Array:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def bisect(_: int, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        too_low, high_enough = interval
        middle = too_low + (high_enough - too_low) // 2
        above = jnp.where(probabilities > as_float(middle), probabilities, 0.0)
        is_enough = above.sum(axis=-1, keepdims=True) < probability
        return jnp.where(is_enough, too_low, middle), jnp.where(is_enough, middle, high_enough)

    # The smallest probability kept is the lowest value above which the sum is too small. The bit
    # patterns of positive floats are ordered like the floats, so 30 bisections of [0, 1] find it
    # exactly. Sorting the vocabulary takes a hundred times longer.
    zero = jnp.zeros((*logits.shape[:-1], 1), jnp.int32)
    one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    _, least = lax.fori_loop(0, 30, bisect, (zero - 1, zero + one))
    return _exclude(logits, probabilities < as_float(least))


def keep_min_p(logits: Logits, share: float | Array) -> Logits:
    """Keeps tokens with at least `share` of the highest probability."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    highest = probabilities.max(axis=-1, keepdims=True)
    return _exclude(logits, probabilities < share * highest)


def keep_above_epsilon(logits: Logits, epsilon: float | Array) -> Logits:
    """Keeps tokens with at least probability `epsilon`, and the most probable one.

    Source: Hewitt et al. 2022.
    """
    highest = logits.max(axis=-1, keepdims=True)
    return _exclude(logits, (jax.nn.softmax(logits, axis=-1) < epsilon) & (logits < highest))


def sample(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B"], logits: Float[Array, "B W V"]
) -> Int[Array, "B W"]:
    """Samples the next token of each hypothesis.

    The result is a function of the row's Threefry key, the index of the sample, its position (the
    number of tokens that the samples of the row have) and its logits alone.
    """
    num_samples = logits.shape[1]
    blocks = in_blocks(logits)
    num_blocks, width = blocks.shape[1:]
    blocks = blocks.reshape(*logits.shape[:2], num_blocks, width)

    def noise(key: Array, position: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(key, index), position)
        return jax.random.gumbel(key, (num_blocks + width,), jnp.float32)

    keys = jax.random.wrap_key_data(keys, impl="threefry2x32")
    of_samples = jax.vmap(noise, in_axes=(None, None, 0))
    of_rows = jax.vmap(of_samples, in_axes=(0, 0, None))
    noises = of_rows(keys, positions, jnp.arange(num_samples, dtype=jnp.int32))

    # The argmax of logits plus Gumbel noise is a sample (Gumbel 1954). Random numbers are
    # expensive: sampling a block, then a token in it, takes 2 sqrt(V) of them instead of V.
    block = jnp.argmax(jax.nn.logsumexp(blocks, axis=-1) + noises[..., :num_blocks], axis=-1)
    within = jnp.take_along_axis(blocks, block[..., None, None], axis=2)[:, :, 0]
    token = jnp.argmax(within + noises[..., num_blocks:], axis=-1)
    return (block * width + token).astype(jnp.int32)


def _exclude(logits: Array, excluded: Array) -> Array:
    return jnp.where(excluded, -jnp.inf, logits)
