"""Who may attend to whom: bool masks [B, 1, Q, K], True = attend; and where sentences start."""

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


def sentence_starts(segments: Array) -> Array:
    """Where in its row a sentence starts, for what is not to remember the one before.

    Args:
      segments: [B, T], number of each token's sentence in its row; 0 is padding.

    Returns:
      [B, T].
    """
    return segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]


def ancestor_mask(ancestry: Array, positions: Array) -> Array:
    """Shows each hypothesis its own past, among what all hypotheses of its sentence have written.

    Args:
      ancestry: int32 [B, W, P], by which hypothesis each token of hypothesis w was written.
      positions: int32 [B], the place of the token that attends; those after it are hidden.

    Returns:
      [B, 1, W, P * W]: token by token, what was written by each hypothesis.
    """
    batch, beams, length = ancestry.shape
    own = ancestry[..., None] == jnp.arange(beams, dtype=jnp.int32)  # [B, W, P, W]
    past = jnp.arange(length, dtype=jnp.int32) <= positions[:, None, None]  # [B, 1, P]
    return (own & past[..., None]).reshape(batch, 1, beams, length * beams)
