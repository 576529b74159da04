"""Rotary position embedding (RoPE): queries and keys are rotated by their positions."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.numerics import at_least_float32


@functools.lru_cache
def rotation_table(length: int, width: int, base: float) -> np.ndarray:
    r"""Cosines and sines of the rotation angles.

    .. math:: \theta_{p,j} = p\, b^{-2j/K},\quad 0 \le j < K/2

    Args:
      length: number of positions P.
      width: K, which is even.
      base: b.

    Returns:
      float64 [P, K]: K/2 cosines, then K/2 sines. It is computed on the host, because an angle in
      float32 is already off by 1e-5 at position 200.
    """
    frequencies = base ** -(np.arange(0, width, 2) / width)
    angles = np.arange(length)[:, None] * frequencies  # [P, K/2]
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    table.flags.writeable = False  # The cache hands the same array to every caller.
    return table


def rotations(config: TransformerConfig, positions: Array, length: int) -> Array:
    """Looks up the rotations of positions; these are the same for all heads and layers.

    Args:
      config: its `key_width`, `position_base`, `max_length` and `dtype` are used.
      positions: int32 [B, T], from 0. One that is not below max(length, config.max_length) gives
        NaN.
      length: upper bound of the positions.

    Returns:
      [B, 1, T, K]: K/2 cosines, then K/2 sines, in float32 at least.
    """
    c = config
    table = jnp.asarray(
        rotation_table(max(c.max_length, length), c.key_width, c.position_base),
        at_least_float32(jnp.dtype(c.dtype)),
    )
    return table.at[positions].get(mode="fill", fill_value=jnp.nan)[:, None]


def rotate(config: TransformerConfig, x: Array, rotations: Array) -> Array:
    r"""Rotates K/2 pairs of features, each in its plane.

    .. math:: (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta)

    With `position_layout` "interleaved" pair j consists of features 2j and 2j + 1 (Su et al., Llama
    as published by Meta), with "concatenated" of features j and j + K/2 (GPT-NeoX, Hugging Face).
    The product of a rotated query and a rotated key depends on their distance only, so that
    `position_offset` would change nothing and is not used.

    Args:
      config: its `position_layout` is used.
      x: queries or keys [B, H, T, K].
      rotations: from `rotations`.

    Returns:
      [B, H, T, K] in the dtype of `x`; the arithmetic is in float32 at least.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    equation 34; OpenNMT-py 3, `apply_rotary_emb`.
    """
    half = x.shape[-1] // 2
    cos, sin = rotations[..., :half], rotations[..., half:]
    wide = x.astype(rotations.dtype)
    if config.position_layout == "interleaved":
        a, b = wide[..., 0::2], wide[..., 1::2]
    else:
        a, b = wide[..., :half], wide[..., half:]
    rotated = a * cos - b * sin, a * sin + b * cos
    if config.position_layout == "interleaved":
        y = jnp.stack(rotated, axis=-1).reshape(x.shape)
    else:
        y = jnp.concatenate(rotated, axis=-1)
    return y.astype(x.dtype)
