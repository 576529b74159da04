"""Position encodings, in every published layout."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.numerics import embedding_init


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
    r"""Sines and cosines of geometrically falling frequencies.

    .. math:: \omega_j = b^{-2j/D}\ \text{(paper)},\quad b^{-j/(D/2-1)}\ \text{(tensor2tensor)}

    Args:
      length: rows.
      d_model: D. Where it is odd, the last cosine is left out, or with "concatenated" and
        "tensor2tensor" there is one pair less and a zero at the end.
      base: b.
      layout: "interleaved" (sin w0 p, cos w0 p, sin w1 p, ...) or "concatenated" (sines, then
        cosines).
      exponent: "paper" or "tensor2tensor".
      offset: the position of row 0.

    Returns:
      float64 [length, D]. It is computed on the host, because an angle in float32 is already off
      by 1e-5 at position 200.

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


class PositionEncoding(nn.Module):
    """What is added to the embeddings to say where in its sentence a token stands."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, positions: Array, length: int) -> Array:
        """Looks positions up.

        Args:
          positions: int32 [B, T], from 0. One that is not below max(length, config.max_length)
            (for a learned table: below max_length) gives NaN, so that it cannot pass unnoticed.
          length: rows that the caller may ask for.

        Returns:
          [B, T, D] in the compute dtype.

        Raises:
          ValueError: `length` is more than a learned table has.
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
            table = jnp.asarray(
                sinusoidal_table(
                    max(c.max_length, length),  # In this order also for a symbolic length.
                    c.d_model,
                    base=c.position_base,
                    layout=c.position_layout,
                    exponent=c.position_exponent,
                    offset=c.position_offset,
                ),
                jnp.dtype(c.dtype),
            )
        table = table.astype(jnp.dtype(c.dtype))
        return table.at[positions].get(mode="fill", fill_value=jnp.nan)
