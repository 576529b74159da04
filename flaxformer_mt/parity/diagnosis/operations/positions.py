"""Positions inside self-attention: rotations of queries and keys, and biases of the scores."""

import abc
import dataclasses
from typing import Any, Self

import numpy as np

from flaxformer_mt.model.relative_bias import distance_buckets


@dataclasses.dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of queries or keys [B, H, T, K] by angles proportional to the position."""

    layout: str
    """"interleaved" rotates features 2j and 2j + 1 together, "concatenated" j and j + K/2."""
    base: float
    """Frequency j is base**(-2j/K)."""
    direction: int = 1
    """The sign of the angles."""

    def but(self, **changes: Any) -> Self:
        """Returns the rotation with some switches replaced."""
        return dataclasses.replace(self, **changes)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[B, H, T, K] to [B, H, T, K]."""
        length, width = x.shape[-2:]
        frequencies = self.base ** -(np.arange(0, width, 2) / width)
        phases = np.exp(1j * self.direction * np.arange(length)[:, None] * frequencies)
        if self.layout == "interleaved":
            rotated = (x[..., 0::2] + 1j * x[..., 1::2]) * phases
            return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)
        rotated = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * phases
        return np.concatenate([rotated.real, rotated.imag], axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreBias(abc.ABC):
    """A bias of attention scores that depends on the positions of query and key."""

    @abc.abstractmethod
    def values(self, queries: int, keys: int) -> np.ndarray:
        """Computes the bias [H, T, S] of positions 0 ... T-1 and 0 ... S-1."""

    def but(self, **changes: Any) -> Self:
        """Returns the bias with some switches replaced."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearBias(ScoreBias):
    """A bias proportional to the distance between query and key (ALiBi)."""

    slopes: np.ndarray
    """[H], subtracted per unit of distance."""

    def values(self, queries: int, keys: int) -> np.ndarray:
        """[H, T, S]."""
        return -self.slopes[:, None, None] * np.abs(_distances(queries, keys))


@dataclasses.dataclass(frozen=True, eq=False)
class BucketBias(ScoreBias):
    """A learned bias for each head and bucket of distances (T5)."""

    table: np.ndarray
    """[N, H]."""
    bidirectional: bool
    """Use half of the buckets for keys after the query; otherwise these share bucket 0."""
    max_distance: int
    """The distance from which on all keys are in the last bucket."""
    mirrored: bool = False
    """Use the distance from key to query instead."""
    scale: float = 1.0
    """The factor of the bias."""

    def values(self, queries: int, keys: int) -> np.ndarray:
        """[H, T, S]."""
        distances = _distances(queries, keys) * (-1 if self.mirrored else 1)
        buckets = len(self.table) // 2 if self.bidirectional else len(self.table)
        lengths = np.abs(distances) if self.bidirectional else np.maximum(-distances, 0)
        indices = distance_buckets(buckets, self.max_distance)[
            np.minimum(lengths, self.max_distance)
        ]
        if self.bidirectional:
            indices = indices + buckets * (distances > 0)
        return self.scale * self.table[indices].transpose(2, 0, 1)


def _distances(queries: int, keys: int) -> np.ndarray:
    """Returns the position of each key minus that of each query, [T, S]."""
    return np.arange(keys) - np.arange(queries)[:, None]
