"""How the model represents the order of tokens: one entry per `config.position_kind`.

A position kind can add vectors to the embeddings, add a bias to the scores of self-attention, and
rotate its queries and keys; cross-attention has neither. `POSITION_KINDS` lists what each does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax import Array
from jaxtyping import Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.linear import embedding_init
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.lookup import look_up_positions
from flaxformer_mt.model.masks import Mask, dense_mask
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.model.position_biases import AlibiBias, RelativeBias

Transform: TypeAlias = Callable[[Array], Array]
"""Maps queries or keys [B, H, T, K] to the same shape."""
Bias: TypeAlias = Callable[[Array, Array], Array]
"""Maps the positions of queries [B, T] and keys [B, S] to a bias [B, H, T, S] of their scores."""


@functools.lru_cache
def sinusoidal_table(
    length: int,
    d_model: int,
    *,
    base: float = 10000.0,
    layout: str = "interleaved",
    exponent: str = "paper",
    offset: int = 0,
) -> np.ndarray:
    r"""Computes sines and cosines of geometrically decreasing frequencies, float64 [length, D].

    .. math:: \omega_j = b^{-2j/D}\ \text{(paper)},\quad b^{-j/(D/2-1)}\ \text{(tensor2tensor)}

    The order is sin w0 p, cos w0 p, sin w1 p, ... or, with the layout "concatenated", sines, then
    cosines. If D is odd, the last cosine is left out, or with "concatenated" and "tensor2tensor"
    there is one pair less and a zero at the end. `offset` is the position of row 0.

    The table is computed on the host, because an angle in float32 is already off by 1e-5 at
    position 200.

    Source: Vaswani et al. 2017, section 3.5; tensor2tensor `get_timing_signal_1d`; for the odd D
    of "concatenated" and "paper" `MarianSinusoidalPositionalEmbedding`.
    """
    ends_with_zero = layout == "concatenated" and exponent == "tensor2tensor"
    pairs = d_model // 2 if ends_with_zero else (d_model + 1) // 2
    j = np.arange(pairs)
    power = 2 * j / d_model if exponent == "paper" else j / max(d_model // 2 - 1, 1)
    angles = (np.arange(length) + offset)[:, None] * base**-power  # [length, pairs]
    if layout == "interleaved":
        waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1)  # [length, pairs, 2]
        table = waves.reshape(length, 2 * pairs)[:, :d_model]
    else:
        table = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)[:, :d_model]
        table = np.pad(table, ((0, 0), (0, d_model - table.shape[1])))
    table.flags.writeable = False  # The cache hands the same array to every caller.
    return table


def sinusoids(config: TransformerConfig, length: int) -> np.ndarray:
    """Computes the table of a configuration, float64 [length, D]; see `sinusoidal_table`."""
    c = config
    return sinusoidal_table(
        length,
        c.d_model,
        base=c.position_base,
        layout=c.position_layout,
        exponent=c.position_exponent,
        offset=c.position_offset,
    )


class PositionEncoding(nn.Module):
    """Vectors that are added to the embeddings: fixed sinusoids or a learned table."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, positions: Int[Array, "B T"], length: Any) -> Float[Array, "B T D"]:
        """Looks up positions below `length`, an integer or symbolic, in the compute dtype.

        One that is not below max(length, config.max_length), for a learned table max_length, gives
        NaN. `ValueError` if `length` exceeds the learned table.
        """
        c = self.config
        if c.position_kind == "learned":
            rows = c.max_length + c.position_offset
            if length > c.max_length:
                raise ValueError(
                    f"length {length} is more than the {c.max_length} learned positions"
                )
            table = self.param(
                "embedding", embedding_init(c), (rows, c.d_model), jnp.dtype(c.param_dtype)
            )
            positions = positions + c.position_offset
        else:
            rows = max(c.max_length, length)  # In this order also for a symbolic length.
            table = jnp.asarray(sinusoids(c, rows), jnp.dtype(c.dtype))
        vectors = look_up_positions(table, positions, jnp.dtype(c.dtype))
        return constrain(vectors, "batch", "length", "embed")


@functools.lru_cache
def rotation_table(length: int, width: int, base: float) -> np.ndarray:
    r"""Cosines and sines of the rotation angles.

    .. math:: \theta_{p,j} = p\, b^{-2j/K},\quad 0 \le j < K/2

    Returns:
      float64 [length, K]: K/2 cosines, then K/2 sines. It is computed on the host, because an angle
      in float32 is already off by 1e-5 at position 200.
    """
    frequencies = base ** -(np.arange(0, width, 2) / width)
    angles = np.arange(length)[:, None] * frequencies  # [P, K/2]
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    table.flags.writeable = False  # The cache hands the same array to every caller.
    return table


def rotations(
    config: TransformerConfig, positions: Int[Array, "B T"], length: Any
) -> Float[Array, "B 1 T K"]:
    """Looks up K/2 cosines and K/2 sines, in float32 at least; all heads and layers share them.

    Positions that are not below max(length, config.max_length) give NaN.
    """
    c = config
    table = jnp.asarray(
        rotation_table(max(c.max_length, length), c.key_width, c.position_base),
        at_least_float32(jnp.dtype(c.dtype)),
    )
    return table.at[positions].get(mode="fill", fill_value=jnp.nan)[:, None]


def rotate(
    config: TransformerConfig, x: Float[Array, "B H T K"], rotations: Float[Array, "#B 1 #T K"]
) -> Float[Array, "B H T K"]:
    r"""Rotates K/2 pairs of features, each in its plane.

    .. math:: (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta)

    With `position_layout` "interleaved" pair j consists of features 2j and 2j + 1 (Su et al., Llama
    as published by Meta), with "concatenated" of features j and j + K/2 (GPT-NeoX, Hugging Face).
    The product of a rotated query and a rotated key depends on their distance only, so that
    `position_offset` would change nothing and is not used.

    The arithmetic is in float32 at least, the result in the dtype of `x`.

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


class PositionKind(NamedTuple):
    """What a value of `config.position_kind` means."""

    encoding: Callable[[TransformerConfig], Any] | None = None
    """Module(config); (positions [B, T], upper bound of the positions) -> [B, T, D], which is added
    to the embeddings."""
    bias: Callable[[TransformerConfig, bool], Any] | None = None
    """Module(config, bidirectional); (positions of queries [B, T], of keys [B, S]) -> [B, H, T, S],
    which is added to the scores of self-attention before the softmax. B may be 1."""
    rotates: bool = False
    """Whether the queries and keys of self-attention are rotated, see `rotate`."""

    @property
    def acts_in_attention(self) -> bool:
        return self.bias is not None or self.rotates


POSITION_KINDS: dict[str, PositionKind] = {
    "sinusoidal": PositionKind(encoding=PositionEncoding),
    "learned": PositionKind(encoding=PositionEncoding),
    "rotary": PositionKind(rotates=True),
    "alibi": PositionKind(bias=AlibiBias),
    "t5_relative": PositionKind(bias=RelativeBias),
    "none": PositionKind(),
}
"""By value of `config.position_kind`."""


@struct.dataclass
class AttentionPositions:
    """The positions of the queries and keys of self-attention, and what is computed from them."""

    queries: Array  # int32 [B, T], or [1, T] if all rows are the same
    keys: Array  # int32 [B, S], or [1, S]
    rotations: Array | None
    """Those of the queries, which in a whole pass are the keys, and in a cached step have the
    positions of the new keys; None if nothing is rotated."""
    bias: Array | None = None
    """[B, H, T, S], or [1, H, T, S]: the bias that all layers of the stack share, if they do."""
    near: Array | None = None
    """bool [B, 1, T, S]: the keys within `config.attention_window`, if there is one."""


def attention_positions(
    config: TransformerConfig,
    queries: Int[Array, "B T"],
    keys: Int[Array, "#B S"],
    length: Any,
) -> AttentionPositions | None:
    """Prepares positions below `length` for all layers; None if attention does not need them."""
    kind = POSITION_KINDS[config.position_kind]
    if not kind.acts_in_attention and not config.attention_window:
        return None
    angles = rotations(config, queries, length) if kind.rotates else None
    return AttentionPositions(queries, keys, angles)


def position_bias(config: TransformerConfig, *, bidirectional: bool, shared: bool) -> Any:
    """Creates the module of the bias of a stack (`shared`) or of a layer; None if it has none."""
    bias = POSITION_KINDS[config.position_kind].bias
    # A bias without parameters belongs to the layer, where XLA fuses it with the scores.
    is_shared = bias is RelativeBias and config.relative_position_sharing == "stack"
    return None if bias is None or shared != is_shared else bias(config, bidirectional)


def of_stack(
    positions: AttentionPositions | None, module: Bias | None, window: int, *, bidirectional: bool
) -> AttentionPositions | None:
    """Adds what the layers of a stack share: the bias that `module` computes, and the window."""
    if positions is None:
        return None
    queries, keys = positions.queries, positions.keys
    bias = None if module is None else module(queries, keys)
    near = None
    if window:
        distance = (queries[:, :, None] - keys[:, None, :])[:, None]
        # As in transformers, where only the decoder's window counts the query's own token.
        near = jnp.abs(distance) <= window if bidirectional else distance < window
    return dataclasses.replace(positions, bias=bias, near=near)


def within(mask: Mask, positions: AttentionPositions | None, is_local: Array | None) -> Mask:
    """Hides keys outside the window, if there is one, in a layer that `is_local`, bool []."""
    if positions is None or positions.near is None:
        return mask
    near = positions.near | ~cast(Array, is_local)
    dense = dense_mask(mask)
    return near if dense is None else dense & near


def bias_and_transform(
    config: TransformerConfig, positions: AttentionPositions | None, module: Bias | None
) -> tuple[Array | None, Transform | None]:
    """Returns the bias [B, H, T, S] of a layer, and the transform of its queries and keys.

    The bias is its own, which `module` computes, or that of its stack.
    """
    if positions is None:
        return None, None
    bias = positions.bias if module is None else module(positions.queries, positions.keys)
    if positions.rotations is None:
        return bias, None
    return bias, lambda x: rotate(config, x, positions.rotations)
