"""What self-attention remembers of the target while it is written, token by token."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from flaxformer_mt.model.attention import KeyValue


@struct.dataclass
class Past:
    """Keys and values of all tokens that the W hypotheses of each sentence have written.

    There is room for P tokens of each.
    """

    key: Array
    """[B, H, K, P, W]; of a single hypothesis [B, H, P, 1, K]."""
    value: Array
    """[B, H, P, W, U]"""

    # Products with keys in columns take half as long, on CPUs, if there are several queries. With
    # one query they gain nothing, and writing a column takes longer than writing a row.

    @classmethod
    def empty(cls, key_shape: tuple[int, ...], value_width: int, dtype: Any) -> Self:
        """Of targets without tokens.

        Args:
          key_shape: B, H, P, W, K.
          value_width: U.
          dtype: of keys and values.
        """
        batch, heads, length, beams, key_width = key_shape
        columns = (batch, heads, key_width, length, beams)
        return cls(
            jnp.zeros(key_shape if beams == 1 else columns, dtype),
            jnp.zeros((batch, heads, length, beams, value_width), dtype),
        )

    @property
    def _has_columns(self) -> bool:
        return self.value.shape[3] != 1  # Not `> 1`: an exported model's W is a symbol.

    def append(self, new: KeyValue, positions: Array) -> Self:
        """Writes one token's keys and values of every hypothesis to its place.

        Args:
          new: keys [B, H, W, K] and values [B, H, W, U].
          positions: int32 [B], below P.
        """
        rows = jnp.arange(positions.shape[0])
        how: Any = {"mode": "promise_in_bounds", "unique_indices": True}
        if self._has_columns:
            key = self.key.at[rows, :, :, positions].set(new.key.swapaxes(2, 3), **how)
        else:
            key = self.key.at[rows, :, positions].set(new.key, **how)
        return dataclasses.replace(
            self, key=key, value=self.value.at[rows, :, positions].set(new.value, **how)
        )

    def joined(self) -> KeyValue:
        """All that hypotheses have written as that of one sentence.

        Returns:
          Keys [B, H, P * W, K] and values [B, H, P * W, U].
        """
        batch_and_heads, width = self.value.shape[:2], self.value.shape[4]
        value = self.value.reshape(*batch_and_heads, -1, width)
        if self._has_columns:
            key = self.key.reshape(*self.key.shape[:3], -1).swapaxes(2, 3)
        else:
            key = self.key.reshape(*batch_and_heads, -1, self.key.shape[4])
        return KeyValue(key, value)

    def resized(self, max_length: int) -> Self:
        """The same, with room for P = `max_length` tokens; those that there are must fit."""
        return dataclasses.replace(
            self,
            key=resize(self.key, max_length, 3 if self._has_columns else 2),
            value=resize(self.value, max_length, 2),
        )


def resize(array: Array, size: int, axis: int) -> Array:
    """Cuts an axis off at `size`, or fills it up with zeros."""
    kept = lax.slice_in_dim(array, 0, min(size, array.shape[axis]), axis=axis)
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, size - kept.shape[axis])
    return jnp.pad(kept, padding)
