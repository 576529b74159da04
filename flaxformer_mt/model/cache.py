"""The decoding cache: what incremental decoding keeps of the source and of the target so far."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Int

from flaxformer_mt.model.attention import KeyValue


@struct.dataclass
class KeyValueCache:
    """The key/value cache of one layer's self-attention: P tokens of W hypotheses per sentence."""

    key: Array
    """[B, G, K, P, W]; with a single hypothesis [B, G, P, 1, K]."""
    value: Array  # [B, G, P, W, U]

    # On CPUs, products with keys in columns take half the time if there are several queries. With
    # one query they gain nothing, and writing a column takes longer than writing a row.

    @classmethod
    def empty(cls, key_shape: tuple[int, ...], value_width: int, dtype: Any) -> "KeyValueCache":
        """Creates a cache without tokens; `key_shape` is B, G, P, W, K."""
        batch, heads, length, beams, key_width = key_shape
        columns = (batch, heads, key_width, length, beams)
        return cls(
            jnp.zeros(key_shape if beams == 1 else columns, dtype),
            jnp.zeros((batch, heads, length, beams, value_width), dtype),
        )

    @property
    def _has_columns(self) -> bool:
        return self.value.shape[3] != 1  # Not `> 1`: an exported model's W is a symbol.

    def append(self, new: KeyValue, positions: Int[Array, "B"]) -> "KeyValueCache":
        """Stores keys [B, G, N * W, K] and values [B, G, N * W, U] of N tokens per hypothesis.

        `positions` are those of the first ones; those of all are below P.
        """
        beams = self.value.shape[3]
        number = new.key.shape[2] // beams

        def by_token(x: Array) -> Array:  # [B, N, G, W, K]
            return x.reshape(*x.shape[:2], number, beams, x.shape[3]).swapaxes(1, 2)

        rows = jnp.arange(positions.shape[0])[:, None]
        slots = positions[:, None] + jnp.arange(number, dtype=positions.dtype)  # [B, N]
        options: Any = {"mode": "promise_in_bounds", "unique_indices": True}
        if self._has_columns:
            columns = by_token(new.key).swapaxes(3, 4)
            key = self.key.at[rows, :, :, slots].set(columns, **options)
        else:
            key = self.key.at[rows, :, slots].set(by_token(new.key), **options)
        value = self.value.at[rows, :, slots].set(by_token(new.value), **options)
        return dataclasses.replace(self, key=key, value=value)

    def joined(self) -> KeyValue:
        """Returns keys [B, G, P * W, K] and values [B, G, P * W, U] of all hypotheses."""
        batch_and_heads, width = self.value.shape[:2], self.value.shape[4]
        value = self.value.reshape(*batch_and_heads, -1, width)
        if self._has_columns:
            key = self.key.reshape(*self.key.shape[:3], -1).swapaxes(2, 3)
        else:
            key = self.key.reshape(*batch_and_heads, -1, self.key.shape[4])
        return KeyValue(key, value)

    def reordered(self, parents: Array) -> "KeyValueCache":
        del parents  # `Cache.ancestry` says which hypothesis wrote each token.
        return self

    def resized(self, max_length: int) -> "KeyValueCache":
        return dataclasses.replace(
            self,
            key=_resize(self.key, max_length, 3 if self._has_columns else 2),
            value=_resize(self.value, max_length, 2),
        )


@struct.dataclass
class RecurrentState:
    """The state of one layer's recurrent unit."""

    memory: Array  # [B, W, D], in float32 at least

    def reordered(self, parents: Array) -> "RecurrentState":
        return dataclasses.replace(self, memory=_gather_hypotheses(self.memory, parents))

    def resized(self, max_length: int) -> "RecurrentState":
        del max_length  # The size does not depend on the length of the target.
        return self


LayerState: TypeAlias = KeyValueCache | RecurrentState
"""What a decoder layer keeps of the target so far."""


@struct.dataclass
class Cache:
    """The decoding cache of all layers, for W hypotheses per sentence.

    Cached tokens stay where they were written when hypotheses continue one another: only
    `ancestry`, and the states of recurrent units, are reordered.
    """

    layers: tuple[LayerState, ...]
    """The target so far, by layer."""
    cross: tuple[KeyValue | None, ...]
    """Keys [B, G, S, K] and values [B, G, S, U] of the source, by layer; None without inputs."""
    cross_mask: Array | None  # [B, 1, 1, S], True = attend
    ancestry: Array
    """int32 [B, W, P], the hypothesis that wrote each token of hypothesis w."""


def reorder_cache(cache: Cache, parents: Int[Array, "B W"]) -> Cache:
    """Lets new hypothesis w of sentence b continue old hypothesis parents[b, w]."""
    layers = tuple(layer.reordered(parents) for layer in cache.layers)
    ancestry = _gather_hypotheses(cache.ancestry, parents)
    return dataclasses.replace(cache, layers=layers, ancestry=ancestry)


def insert_rows(cache: Cache, new: Cache, rows: Int[Array, "R"]) -> Cache:
    """Assigns rows of the cache to the sentences of a new one, whose targets are empty.

    The caches have the same S, W and P; a sentence whose row is not below B is dropped.
    """

    def replace(old: Array, inserted: Array) -> Array:
        return old.at[rows].set(inserted, mode="drop")

    # The layers' states need no reset: a sentence reads only what it has written itself.
    cross, cross_mask = jax.tree.map(
        replace, (cache.cross, cache.cross_mask), (new.cross, new.cross_mask)
    )
    return dataclasses.replace(cache, cross=cross, cross_mask=cross_mask)


def resize_cache(cache: Cache, max_length: int) -> Cache:
    """Returns the cache with the capacity P = `max_length`; its tokens must fit."""
    layers = tuple(layer.resized(max_length) for layer in cache.layers)
    return dataclasses.replace(
        cache, layers=layers, ancestry=_resize(cache.ancestry, max_length, 2)
    )


def _gather_hypotheses(array: Array, parents: Array) -> Array:
    return jnp.take_along_axis(array, parents[:, :, None], axis=1)


def _resize(array: Array, size: int, axis: int) -> Array:
    kept = lax.slice_in_dim(array, 0, min(size, array.shape[axis]), axis=axis)
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, size - kept.shape[axis])
    return jnp.pad(kept, padding)
