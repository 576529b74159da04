"""Attention masks: bool [B, 1, Q, K], True = attend."""

from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Int


@struct.dataclass
class Visibility:
    """Which keys the queries of a whole pass attend to, in two equivalent forms.

    The compiler drops the one that nobody reads: fused attention needs no mask.
    """

    mask: Array  # bool, broadcastable to [B, 1, Q, K], True = attend
    query_segments: Array
    """int32 [B, Q]. Queries attend to the keys of their own segment."""
    key_segments: Array
    """int32 [B, K]. Keys of segment 0 are hidden."""
    is_token: Array
    """bool [B, Q], False where the query is padding."""
    causal: bool = struct.field(pytree_node=False)
    """Whether query t attends to no key after t."""


Mask: TypeAlias = Visibility | Array | None
"""Which keys are visible: in a whole pass, or as a mask; None = all."""


def dense_mask(mask: Mask) -> Array | None:
    """Returns the mask of a `Visibility`; others are masks already."""
    return mask.mask if isinstance(mask, Visibility) else mask


def visibility(
    query_tokens: Int[Array, "B Q"],
    key_tokens: Int[Array, "B K"],
    query_segments: Int[Array, "B Q"] | None,
    key_segments: Int[Array, "B K"] | None,
    *,
    pad_id: int,
    causal: bool = False,
    hide_padding: bool = True,
) -> Visibility:
    """Describes which keys queries attend to: those of their sentence, without its padding.

    Segments number the sentences of a packed row, with 0 for padding. Without them a row is one
    sentence, and padding is where the token is `pad_id`, which `hide_padding=False` shows. `causal`
    hides later keys; queries and keys are then the same tokens.
    """
    if query_segments is not None and key_segments is not None:
        mask = segment_mask(query_segments, key_segments)
        is_token = query_segments > 0
    else:
        # Some models start decoding with padding.
        is_token = jnp.asarray(query_tokens != pad_id).at[:, 0].set(True)
        query_segments = jnp.ones(query_tokens.shape, jnp.int32)
        if hide_padding:
            mask = padding_mask(key_tokens, pad_id)
            key_segments = (key_tokens != pad_id).astype(jnp.int32)
        else:
            mask = jnp.ones((1, 1, 1, 1), bool)
            key_segments = jnp.ones(key_tokens.shape, jnp.int32)
    mask = causal_mask(key_tokens.shape[1]) & mask if causal else mask
    return Visibility(mask, query_segments, key_segments, is_token, causal)


def padding_mask(tokens: Int[Array, "B K"], pad_id: int) -> Bool[Array, "B 1 1 K"]:
    """Returns the mask that hides padding keys from every query."""
    return (tokens != pad_id)[:, None, None, :]


def causal_mask(length: Any) -> Bool[Array, "1 1 T T"]:
    """Returns the causal mask: query t attends to keys 0..t."""
    return jnp.tri(length, dtype=bool)[None, None]


def segment_mask(
    query_segments: Int[Array, "B Q"], key_segments: Int[Array, "B K"]
) -> Bool[Array, "B 1 Q K"]:
    """Returns the mask of packed rows: sentences attend only to themselves, nothing to padding."""
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return (same & (key_segments > 0)[:, None, :])[:, None]


def sentence_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Returns where the sentences of packed rows start."""
    return segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]


def ancestor_mask(
    ancestry: Int[Array, "B W P"], positions: Int[Array, "B"], number: Any = 1
) -> Bool[Array, "B 1 NW PW"]:
    """Returns the mask of cached steps: each hypothesis attends to its own earlier tokens.

    `ancestry` is that of `Cache`, `positions` are those of the first of `number` queries of each
    hypothesis. The keys [P * W] are, for each position, those of all hypotheses.
    """
    batch, beams, length = ancestry.shape
    own = ancestry[..., None] == jnp.arange(beams, dtype=jnp.int32)  # [B, W, P, W]
    queries = positions[:, None] + jnp.arange(number, dtype=jnp.int32)  # [B, N]
    written = jnp.arange(length, dtype=jnp.int32) <= queries[:, :, None, None]  # [B, N, 1, P]
    mask = own[:, None] & written[..., None]  # [B, N, W, P, W]
    return mask.reshape(batch, 1, number * beams, length * beams)
