"""Embedding lookup and positions."""

import dataclasses

import numpy as np

from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.parity.diagnosis.operations.base import Operation


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup(Operation):
    """Embedding lookup: rows of a table [V, D], scaled."""

    table: np.ndarray
    tokens: np.ndarray
    scale: float
    zeroed: tuple[int, ...]
    """Tokens that embed to the zero vector."""

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        zero = np.isin(self.tokens, self.zeroed)
        vectors = self.table[np.where(zero, 0, self.tokens)]
        return np.where(zero[..., None], 0, vectors) * self.scale


@dataclasses.dataclass(frozen=True, eq=False)
class AddPositions(Operation):
    """Position vectors, sinusoidal or from a learned table [P, D], added to embeddings."""

    embedding: np.ndarray
    positions: np.ndarray
    """int [B, T] or [1, T], from 0."""
    learned: np.ndarray | None
    layout: str
    exponent: str
    base: float
    offset: int
    scale: float = 1.0
    """Factor of the position vectors."""

    def vectors(self) -> np.ndarray:
        """The position vectors, [B, T, D] or [1, T, D]; NaN past the end of a learned table."""
        if self.learned is not None:
            rows = self.positions + self.offset
            inside = (rows >= 0) & (rows < len(self.learned))
            vectors = self.learned[np.where(inside, rows, 0)]
            return self.scale * np.where(inside[..., None], vectors, np.nan)
        table = sinusoidal_table(
            int(self.positions.max()) + 1,
            self.embedding.shape[-1],
            base=self.base,
            layout=self.layout,
            exponent=self.exponent,
            offset=self.offset,
        )
        return self.scale * table[self.positions]

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        return self.embedding + self.vectors()


def token_positions(real: np.ndarray) -> np.ndarray:
    """Returns the index of each token among the real tokens of its row, int [B, T]."""
    return np.maximum(np.cumsum(real, axis=1) - 1, 0)
