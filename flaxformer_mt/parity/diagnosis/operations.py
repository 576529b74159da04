"""The operations of our model: inputs, switches and a value.

An operation holds its inputs and its switches; `value()` computes the result. The operation of a
reference with another epsilon, for example, is `normalization.but(epsilon=1e-5)`.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self, dataclass_transform

import numpy as np
import torch
import torch.nn.functional as F

from flaxformer_mt.model.position_biases import distance_buckets
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.parity.references.common import ACTIVATIONS as PUBLISHED_ACTIVATIONS
from flaxformer_mt.parity.references.losses import LOSSES


@dataclass_transform(frozen_default=True, eq_default=False)
class Switches:
    """Fields that may be others in a reference; subclasses are frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, eq=False)(cls)

    def but(self, **changes: Any) -> Self:
        """Returns the same with some inputs or switches replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


class Operation(Switches, abc.ABC):
    """The computation of one value from its inputs."""

    @abc.abstractmethod
    def value(self) -> np.ndarray:
        """Computes the result, in float64 if the inputs are float64."""


class Given(Operation):
    """A value that is known."""

    result: np.ndarray

    def value(self) -> np.ndarray:
        """Returns the value."""
        return self.result


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


class Rotation(Switches):
    """The rotation of queries or keys [B, H, T, K] by angles proportional to the position."""

    layout: str
    """"interleaved" rotates features 2j and 2j + 1 together, "concatenated" j and j + K/2."""
    base: float
    """Frequency j is base**(-2j/K)."""
    direction: int = 1
    """The sign of the angles."""

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


class LinearBias(Switches):
    """A bias of scores that is proportional to the distance between query and key (ALiBi)."""

    slopes: np.ndarray
    """[H], subtracted per unit of distance."""

    def values(self, queries: int, keys: int) -> np.ndarray:
        """[H, T, S]."""
        return -self.slopes[:, None, None] * np.abs(_distances(queries, keys))


class BucketBias(Switches):
    """A learned bias of scores for each head and bucket of distances (T5)."""

    table: np.ndarray
    """[N, H]."""
    bidirectional: bool
    """Use half of the buckets for keys after the query; otherwise these share bucket 0."""
    max_distance: int
    """The distance from which on all keys are in the last bucket."""
    mirrored: bool = False
    """Use the distance from key to query instead."""
    scale: float = 1.0

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
    return np.arange(keys) - np.arange(queries)[:, None]


SPLITS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "head, feature": lambda x, heads: x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2),
    "feature, head": lambda x, heads: x.reshape(*x.shape[:2], -1, heads).transpose(0, 3, 1, 2),
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
    bias: LinearBias | BucketBias | None = None

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


class Divisor(NamedTuple):
    """The divisor of a norm."""

    unbiased: bool
    """Divide the sum of squares by n - 1 instead of n."""
    inside_the_root: bool
    """Add epsilon to the variance instead of its square root."""

    def __call__(self, centered: np.ndarray, epsilon: float) -> np.ndarray:
        """Computes the divisor [..., 1] of centered values [..., D]."""
        count = centered.shape[-1] - self.unbiased
        variance = np.sum(np.square(centered), axis=-1, keepdims=True) / count
        return np.sqrt(variance + epsilon) if self.inside_the_root else np.sqrt(variance) + epsilon

    @property
    def words(self) -> str:
        """A description for messages."""
        where = "inside" if self.inside_the_root else "outside"
        return f"{where} the root of the variance over {'n - 1' if self.unbiased else 'n'}"


DIVISORS = {
    "layer_norm": Divisor(unbiased=False, inside_the_root=True),
    "unbiased_std": Divisor(unbiased=True, inside_the_root=False),
    "unbiased_variance": Divisor(unbiased=True, inside_the_root=True),
    "biased_std": Divisor(unbiased=False, inside_the_root=False),
}
"""The first two are those of `TransformerConfig.norm_kind`."""


class LayerNormalization(Operation):
    """A norm over the last axis of x [B, T, D], with scale and bias [D]."""

    x: np.ndarray
    kind: str
    """A key of `DIVISORS`."""
    epsilon: float
    scale: np.ndarray | float
    bias: np.ndarray | float
    centers: bool = True
    """Subtract the mean; False for a root-mean-square norm."""

    def centered(self) -> np.ndarray:
        """The dividend, [B, T, D]."""
        return self.x - np.mean(self.x, axis=-1, keepdims=True) if self.centers else self.x

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        centered = self.centered()
        return centered / DIVISORS[self.kind](centered, self.epsilon) * self.scale + self.bias


class LinearMap(Operation):
    """x [B, T, D] times a kernel [D, E], plus a bias [E]."""

    x: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray | None

    def value(self) -> np.ndarray:
        """[B, T, E]."""
        return self.x @ self.kernel + (0 if self.bias is None else self.bias)


class Logits(LinearMap):
    """The projection to the vocabulary, [B, T, V], scaled."""

    scale: float

    def value(self) -> np.ndarray:
        """[B, T, V]."""
        return super().value() * self.scale


class Residual(Operation):
    """The residual connection: the input of a sub-layer plus its output, [B, T, D]."""

    x: np.ndarray
    output: np.ndarray

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        return self.x + self.output


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **PUBLISHED_ACTIVATIONS,
    "none": lambda x: x,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
}
"""Activations by name; the first four are those of `TransformerConfig.activation`."""


class Activation(Operation):
    """An elementwise function of the hidden units [B, T, F], times a gate if there is one."""

    hidden: np.ndarray
    kind: str
    """A key of `ACTIVATIONS`."""
    gate: np.ndarray | None = None

    def value(self) -> np.ndarray:
        """[B, T, F]."""
        activated = ACTIVATIONS[self.kind](torch.tensor(self.hidden)).numpy()
        return activated if self.gate is None else activated * self.gate


CONVENTIONS = {
    "uniform": "torch",
    "others": "jadore801120",
    "others_kl": "tunz",
    "non_pad_kl": "annotated",
    "annotated_wide_heads": "annotated_wide_heads",
}
"""A family for each convention of label smoothing; the last counts padding as a class."""

NO_PADDING = -100
"""A padding id that matches no target."""


class Loss(Operation):
    """The label-smoothed cross-entropy of logits [B, T, V], a scalar."""

    logits: np.ndarray
    targets: np.ndarray
    convention: str
    """A key of `CONVENTIONS`."""
    smoothing: float
    pad_id: int
    """Targets that are ignored; `NO_PADDING` = none."""
    reduction: str = "mean over tokens"
    """A key of `REDUCTIONS`."""

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The summed loss and the number of tokens of each sentence, [B] and [B]."""
        loss, sums = LOSSES[CONVENTIONS[self.convention]], np.empty((2, len(self.targets)))
        for row, (logits, targets) in enumerate(zip(self.logits, self.targets, strict=True)):
            tensors = torch.tensor(logits), torch.tensor(targets)
            sums[:, row] = [float(x) for x in loss(*tensors, self.smoothing, self.pad_id)]
        return sums[0], sums[1]

    def value(self) -> np.ndarray:
        """A scalar."""
        return np.asarray(REDUCTIONS[self.reduction](*self.sums(), self.targets.size))


REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray, int], Any]] = {
    "mean over tokens": lambda losses, counts, size: losses.sum() / counts.sum(),
    "sum over tokens": lambda losses, counts, size: losses.sum(),
    "sum over tokens, divided by sentences": lambda losses, counts, size: losses.mean(),
    "mean over sentences of their means": lambda losses, counts, size: (losses / counts).mean(),
    "sum over tokens, divided by tokens and padding": lambda losses, counts, size: (
        losses.sum() / size
    ),
}
"""How the losses and token counts of the sentences, and B*T, are reduced; the first is ours."""
