"""Who may attend to whom: bool masks [B, 1, Q, K], True = attend."""

import jax.numpy as jnp
from jax import Array


def padding_mask(tokens: Array, pad_id: int) -> Array:
    """Hides padding from every query.

    Args:
      tokens: [B, K] keys' tokens.
      pad_id: the token that is padding.

    Returns:
      [B, 1, 1, K].
    """
    return (tokens != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Array:
    """Hides the future: query t attends to keys 0..t.

    Returns:
      [1, 1, T, T].
    """
    return jnp.tri(length, dtype=bool)[None, None]


def segment_mask(query_segments: Array, key_segments: Array) -> Array:
    """Keeps the sentences of a packed row apart, and padding (segment 0) out.

    Args:
      query_segments: [B, Q] number of each query's sentence in its row; 0 is padding.
      key_segments: [B, K] the same for keys.

    Returns:
      [B, 1, Q, K].
    """
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return (same & (key_segments > 0)[:, None, :])[:, None]
