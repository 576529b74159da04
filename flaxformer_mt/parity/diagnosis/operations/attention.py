"""The inside of attention: scores, weights, and the context."""

import dataclasses
from collections.abc import Callable

import numpy as np

from flaxformer_mt.parity.diagnosis.operations.base import Operation
from flaxformer_mt.parity.diagnosis.operations.positions import Rotation, ScoreBias


def _split_interleaved(x: np.ndarray, num_heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1, num_heads).transpose(0, 3, 1, 2)


SPLITS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "head, feature": lambda x, heads: x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2),
    "feature, head": _split_interleaved,
    "without a transpose": lambda x, heads: x.reshape(len(x), heads, x.shape[1], -1),
}
"""How [B, T, H*K] may be split into heads [B, H, T, K]; the first is correct."""

JOINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "head, feature": lambda x: x.swapaxes(1, 2),
    "feature, head": lambda x: x.transpose(0, 2, 3, 1),
    "without a transpose": lambda x: x,
    "along the batch": lambda x: x.swapaxes(0, 1),
}
"""How heads [B, H, T, U] may be reordered before flattening to [B, T, H*U]; the first is
correct."""


SHARINGS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "repeated": lambda x, times: np.repeat(x, times, axis=1),
    "tiled": lambda x, times: np.tile(x, (1, times, 1, 1)),
}
"""How heads [B, G, S, K] of keys and values may become [B, H, S, K]; the first is correct."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scores(Operation):
    """Scaled dot products of queries [B, T, H*K] and keys [B, S, G*K], masked with -inf."""

    query: np.ndarray
    key: np.ndarray
    num_heads: int
    kv_heads: int
    scale: float
    padding: np.ndarray
    """bool [B, 1, 1, S], True = attend."""
    causal: np.ndarray
    """bool [T, S], True = attend."""
    split: str = "head, feature"
    """A key of `SPLITS`."""
    sharing: str = "repeated"
    """A key of `SHARINGS`."""
    fill: float = -np.inf
    """The value of a masked score ..."""
    adds_fill: bool = False
    """... or, if True, the value added to it."""
    rotation: Rotation | None = None
    """Applied to queries and keys."""
    bias: ScoreBias | None = None
    """Added to the scaled products."""

    def mask(self) -> np.ndarray:
        """The combined mask, bool [B, 1, T, S], True = attend."""
        return self.padding & self.causal

    def products(self) -> np.ndarray:
        """The unmasked scores, [B, H, T, S]."""
        query = SPLITS[self.split](self.query, self.num_heads)
        key = SPLITS[self.split](self.key, self.kv_heads)
        key = SHARINGS[self.sharing](key, self.num_heads // self.kv_heads)
        if self.rotation is not None:
            query, key = self.rotation(query), self.rotation(key)
        return query @ key.swapaxes(2, 3) * self.scale + self.bias_values()

    def bias_values(self) -> np.ndarray:
        """The bias, [H, T, S]; zeros without one."""
        lengths = self.query.shape[1], self.key.shape[1]
        return np.zeros((1, *lengths)) if self.bias is None else self.bias.values(*lengths)

    def value(self) -> np.ndarray:
        """[B, H, T, S]."""
        products = self.products()
        masked = products + self.fill if self.adds_fill else self.fill
        return np.where(self.mask(), products, masked)


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax(Operation):
    """Attention weights: the softmax of scores over one axis; zeros where all are masked."""

    scores: np.ndarray
    axis: int = -1

    def value(self) -> np.ndarray:
        """[B, H, T, S]."""
        largest = np.max(self.scores, axis=self.axis, keepdims=True)
        powers = np.exp(self.scores - np.where(np.isfinite(largest), largest, 0))
        total = np.sum(powers, axis=self.axis, keepdims=True)
        return powers / np.where(total == 0, 1, total)


@dataclasses.dataclass(frozen=True, eq=False)
class Context(Operation):
    """The attention-weighted sum of values [B, S, G*U], with heads joined."""

    weights: np.ndarray
    values: np.ndarray
    num_heads: int
    kv_heads: int
    split: str = "head, feature"
    sharing: str = "repeated"
    join: str = "head, feature"

    def heads(self) -> np.ndarray:
        """The values by head, [B, H, S, U]."""
        heads = SPLITS[self.split](self.values, self.kv_heads)
        return SHARINGS[self.sharing](heads, self.num_heads // self.kv_heads)

    def value(self) -> np.ndarray:
        """[B, T, H*U]."""
        batch, _, length, _ = self.weights.shape
        return JOINS[self.join](self.weights @ self.heads()).reshape(batch, length, -1)
