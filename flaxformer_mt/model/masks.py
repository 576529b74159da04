"""Attention masks: bool [B, 1, Q, K], True = attend."""

import jax.numpy as jnp
from jax import Array


def padding_mask(tokens: Array, pad_id: int) -> Array:
    """Returns the mask that hides padding from every query.

    Args:
      tokens: [B, K], of the keys.
      pad_id: the padding token.

    Returns:
      [B, 1, 1, K].
    """
    return (tokens != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Array:
    """Returns the causal mask: query t attends to keys 0..t.

    Returns:
      [1, 1, T, T].
    """
    return jnp.tri(length, dtype=bool)[None, None]


def segment_mask(query_segments: Array, key_segments: Array) -> Array:
    """Returns the mask of packed rows: sentences attend only to themselves, nothing to padding.

    Args:
      query_segments: [B, Q], the number of each query's sentence in its row; 0 is padding.
      key_segments: [B, K], the same for keys.

    Returns:
      [B, 1, Q, K].
    """
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return (same & (key_segments > 0)[:, None, :])[:, None]


def sentence_starts(segments: Array) -> Array:
    """Returns where the sentences of packed rows start.

    Args:
      segments: [B, T], the number of each token's sentence in its row; 0 is padding.

    Returns:
      bool [B, T].
    """
    return segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]


def ancestor_mask(ancestry: Array, positions: Array) -> Array:
    """Returns the mask of cached steps: each hypothesis attends to its own earlier tokens.

    Args:
      ancestry: int32 [B, W, P], the hypothesis that wrote each token of hypothesis w.
      positions: int32 [B], the position of the query; later ones are hidden.

    Returns:
      [B, 1, W, P * W]: for each position, the keys of all hypotheses.
    """
    batch, beams, length = ancestry.shape
    own = ancestry[..., None] == jnp.arange(beams, dtype=jnp.int32)  # [B, W, P, W]
    written = jnp.arange(length, dtype=jnp.int32) <= positions[:, None, None]  # [B, 1, P]
    return (own & written[..., None]).reshape(batch, 1, beams, length * beams)
