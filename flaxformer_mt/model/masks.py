"""Attention masks: bool [B, 1, Q, K], True = attend."""

import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class Visibility:
    """Which keys the queries of a whole pass attend to, in two equivalent forms.

    The compiler drops the one that nobody reads: fused attention needs no mask.
    """

    mask: Array
    """bool, broadcastable to [B, 1, Q, K], True = attend."""
    query_segments: Array
    """int32 [B, Q]. Queries attend to the keys of their own segment."""
    key_segments: Array
    """int32 [B, K]. Keys of segment 0 are hidden."""
    causal: bool = struct.field(pytree_node=False)
    """Whether query t attends to no key after t."""


def dense_mask(mask: Visibility | Array | None) -> Array | None:
    """Returns the mask of a `Visibility`; others are masks already."""
    return mask.mask if isinstance(mask, Visibility) else mask


def visibility(
    query_tokens: Array,
    key_tokens: Array,
    query_segments: Array | None,
    key_segments: Array | None,
    *,
    pad_id: int,
    causal: bool = False,
    hide_padding: bool = True,
) -> Visibility:
    """Describes which keys queries attend to: those of their sentence, without its padding.

    Args:
      query_tokens: [B, Q].
      key_tokens: [B, K].
      query_segments: int32 [B, Q], the number of each query's sentence in its row; None if a row is
        one sentence.
      key_segments: int32 [B, K], the same for keys; 0 is padding.
      pad_id: the padding token, which tells padding without segments.
      causal: hide later keys; queries and keys are the same tokens.
      hide_padding: False shows padding, without segments.
    """
    if query_segments is not None and key_segments is not None:
        mask = segment_mask(query_segments, key_segments)
    else:
        query_segments = jnp.ones(query_tokens.shape, jnp.int32)
        if hide_padding:
            mask = padding_mask(key_tokens, pad_id)
            key_segments = (key_tokens != pad_id).astype(jnp.int32)
        else:
            mask = jnp.ones((1, 1, 1, 1), bool)
            key_segments = jnp.ones(key_tokens.shape, jnp.int32)
    mask = causal_mask(key_tokens.shape[1]) & mask if causal else mask
    return Visibility(mask, query_segments, key_segments, causal)


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
