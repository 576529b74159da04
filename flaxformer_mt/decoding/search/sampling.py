"""Drawing tokens at random, from all or from the more probable ones.

Source of the formulas: the classes of the same names in `generation/logits_process.py` of Hugging
Face transformers. All logits are float32 [..., V]; what is ruled out is minus infinity.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxformer_mt.decoding.search.top_k import in_blocks, top_k


def likely_tokens(
    logits: Array,
    *,
    temperature: float | Array | None = None,
    top_k: int = 0,
    top_p: float | Array | None = None,
    min_p: float | Array | None = None,
    epsilon_cutoff: float | Array | None = None,
) -> Array:
    """The logits to draw from, after all options that are asked for, in this order.

    `config.DecodeConfig` explains the options; None, and 0 for `top_k`, asks for nothing.
    """
    if temperature is not None:
        logits = logits / temperature
    if top_k:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    if epsilon_cutoff is not None:
        logits = keep_above_epsilon(logits, epsilon_cutoff)
    return logits


def keep_top_k(logits: Array, count: int) -> Array:
    """Rules out all but the `count` most probable tokens, and those equal to the last of them."""
    best, _ = top_k(logits, count)
    return _rule_out(logits, logits < best[..., -1:])


def keep_top_p(logits: Array, probability: float | Array) -> Array:
    """Rules out all but the most probable tokens that together have at least `probability`.

    What is equal to the last that stays also stays, and the most probable token always does.

    Source: Holtzman et al. 2020.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)

    def as_float(bits: Array) -> Array:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def halve(_: int, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        too_low, high_enough = interval
        middle = too_low + (high_enough - too_low) // 2
        above = jnp.where(probabilities > as_float(middle), probabilities, 0.0)
        is_enough = above.sum(axis=-1, keepdims=True) < probability
        return jnp.where(is_enough, too_low, middle), jnp.where(is_enough, middle, high_enough)

    # The least probability that stays is the lowest above which there is less than asked for. Bits
    # of positive numbers are ordered like the numbers, so 30 halvings of the interval from 0 to 1
    # find it exactly. To sort the vocabulary takes a hundred times longer.
    zero = jnp.zeros((*logits.shape[:-1], 1), jnp.int32)
    one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    _, least = lax.fori_loop(0, 30, halve, (zero - 1, zero + one))
    return _rule_out(logits, probabilities < as_float(least))


def keep_min_p(logits: Array, share: float | Array) -> Array:
    """Rules out tokens of less than `share` of the highest probability."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    highest = probabilities.max(axis=-1, keepdims=True)
    return _rule_out(logits, probabilities < share * highest)


def keep_above_epsilon(logits: Array, epsilon: float | Array) -> Array:
    """Rules out tokens of a lower probability than `epsilon`, but never the most probable one.

    Source: Hewitt et al. 2022.
    """
    highest = logits.max(axis=-1, keepdims=True)
    return _rule_out(logits, (jax.nn.softmax(logits, axis=-1) < epsilon) & (logits < highest))


def draw(keys: Array, positions: Array, logits: Array) -> Array:
    """Draws each sample's next token.

    What is drawn follows from the row's key, the number of the sample, its position and its logits
    alone.

    Args:
      keys: uint32 [B, 2], one threefry key a row.
      positions: int32 [B], tokens that the samples of a row already have.
      logits: [B, W, V], of the W samples of a row.

    Returns:
      int32 [B, W].
    """
    num_samples = logits.shape[1]
    blocks = in_blocks(logits)
    num_blocks, width = blocks.shape[1:]
    blocks = blocks.reshape(*logits.shape[:2], num_blocks, width)

    def noise(key: Array, position: Array, sample: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.gumbel(key, (num_blocks + width,), jnp.float32)

    keys = jax.random.wrap_key_data(keys, impl="threefry2x32")
    of_samples = jax.vmap(noise, in_axes=(None, None, 0))
    of_rows = jax.vmap(of_samples, in_axes=(0, 0, None))
    noises = of_rows(keys, positions, jnp.arange(num_samples, dtype=jnp.int32))

    # The largest sum of logit and Gumbel noise is a draw (Gumbel 1954). Random numbers are dear: a
    # block of the vocabulary is drawn, and then a token of it, with 2 sqrt(V) of them and not V.
    block = jnp.argmax(jax.nn.logsumexp(blocks, axis=-1) + noises[..., :num_blocks], axis=-1)
    within = jnp.take_along_axis(blocks, block[..., None, None], axis=2)[:, :, 0]
    token = jnp.argmax(within + noises[..., num_blocks:], axis=-1)
    return (block * width + token).astype(jnp.int32)


def _rule_out(logits: Array, tokens: Array) -> Array:
    return jnp.where(tokens, -jnp.inf, logits)
