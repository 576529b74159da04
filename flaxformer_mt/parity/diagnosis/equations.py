"""What our model computes at each site, as equations in numpy whose parts can be exchanged.

An operation holds its inputs and its switches; `value()` is its result. The model of a reference
that has another epsilon, say, is `norm.but(epsilon=1e-5)`.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F

from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.parity.diagnosis.evidence import (
    Evidence,
    Place,
    optional_parameter,
    parameter,
    place,
)
from flaxformer_mt.parity.references.losses import LOSSES


class NotComputed(Exception):
    """Our model does not compute what was asked for: layers alone have no embeddings."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(abc.ABC):
    """What a site's value is computed from, and how."""

    @abc.abstractmethod
    def value(self) -> np.ndarray:
        """The result, in float64 where the inputs are."""

    def but(self, **changes: Any) -> Self:
        """The same operation with other inputs or switches."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Operation):
    """A value that is already there."""

    result: np.ndarray

    def value(self) -> np.ndarray:
        """It."""
        return self.result


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup(Operation):
    """Token vectors [B, T, D]: rows of a table [V, D], times a scale."""

    table: np.ndarray
    tokens: np.ndarray
    scale: float
    zeroed: tuple[int, ...]
    """Tokens that give the zero vector."""

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        zero = np.isin(self.tokens, self.zeroed)
        vectors = self.table[np.where(zero, 0, self.tokens)]
        return np.where(zero[..., None], 0, vectors) * self.scale


@dataclasses.dataclass(frozen=True, eq=False)
class AddPositions(Operation):
    """Position vectors, sinusoids or rows of a learned table [P, D], added to [B, T, D]."""

    embedding: np.ndarray
    positions: np.ndarray
    """int [B, T] or [1, T], from 0."""
    learned: np.ndarray | None
    layout: str
    exponent: str
    base: float
    offset: int
    scale: float = 1.0
    """Of the position vectors."""

    def vectors(self) -> np.ndarray:
        """What is added: [B, T, D] or [1, T, D]; NaN behind the end of a learned table."""
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


class Divisor(NamedTuple):
    """What a norm divides by."""

    unbiased: bool
    """Whether squares are summed up over n - 1, not n."""
    inside_the_root: bool
    """Whether epsilon is added to the variance, not to its root."""

    def __call__(self, centred: np.ndarray, epsilon: float) -> np.ndarray:
        """[..., 1] of [..., D]."""
        count = centred.shape[-1] - self.unbiased
        variance = np.sum(np.square(centred), axis=-1, keepdims=True) / count
        return np.sqrt(variance + epsilon) if self.inside_the_root else np.sqrt(variance) + epsilon

    @property
    def words(self) -> str:
        """For a sentence."""
        where = "inside" if self.inside_the_root else "outside"
        return f"{where} the root of the variance over {'n - 1' if self.unbiased else 'n'}"


DIVISORS = {
    "layer_norm": Divisor(unbiased=False, inside_the_root=True),
    "unbiased_std": Divisor(unbiased=True, inside_the_root=False),
    "unbiased_variance": Divisor(unbiased=True, inside_the_root=True),
    "biased_std": Divisor(unbiased=False, inside_the_root=False),
}
"""The first two are those of `TransformerConfig.norm_kind`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Norm(Operation):
    """A layer norm over the last axis of x [B, T, D], with scale and bias [D]."""

    x: np.ndarray
    kind: str
    """A key of `DIVISORS`."""
    epsilon: float
    scale: np.ndarray | float
    bias: np.ndarray | float
    centres: bool = True
    """False: the mean is not taken off (root-mean-square norm)."""

    def centred(self) -> np.ndarray:
        """[B, T, D] before it is divided."""
        return self.x - np.mean(self.x, axis=-1, keepdims=True) if self.centres else self.x

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        centred = self.centred()
        return centred / DIVISORS[self.kind](centred, self.epsilon) * self.scale + self.bias


@dataclasses.dataclass(frozen=True, eq=False)
class Projection(Operation):
    """x [B, T, D] times a kernel [D, E], plus a bias [E]."""

    x: np.ndarray
    kernel: np.ndarray
    bias: np.ndarray | None

    def value(self) -> np.ndarray:
        """[B, T, E]."""
        return self.x @ self.kernel + (0 if self.bias is None else self.bias)


@dataclasses.dataclass(frozen=True, eq=False)
class Logits(Projection):
    """The last projection, to [B, T, V], which may be scaled."""

    scale: float

    def value(self) -> np.ndarray:
        """[B, T, V]."""
        return super().value() * self.scale


def _split_interleaved(x: np.ndarray, num_heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1, num_heads).transpose(0, 3, 1, 2)


SPLITS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "head, feature": lambda x, heads: x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2),
    "feature, head": _split_interleaved,
    "without a transpose": lambda x, heads: x.reshape(len(x), heads, x.shape[1], -1),
}
"""Ways from [B, T, H*K] to [B, H, T, K]; the first is right."""

JOINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "head, feature": lambda x: x.swapaxes(1, 2),
    "feature, head": lambda x: x.transpose(0, 2, 3, 1),
    "without a transpose": lambda x: x,
    "along the batch": lambda x: x.swapaxes(0, 1),
}
"""What heads [B, H, T, U] are turned into before they are flattened to [B, T, H*U]."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scores(Operation):
    """Products of queries [B, T, H*K] and keys [B, S, H*K]: [B, H, T, S], -inf where hidden."""

    query: np.ndarray
    key: np.ndarray
    num_heads: int
    scale: float
    padding: np.ndarray
    """bool [B, 1, 1, S], True = may be seen."""
    causal: np.ndarray
    """bool [T, S], True = may be seen."""
    split: str = "head, feature"
    """A key of `SPLITS`."""
    fill: float = -np.inf
    """What a hidden score becomes ..."""
    adds_fill: bool = False
    """... or what is added to it."""

    def mask(self) -> np.ndarray:
        """What may be seen, bool [B, 1, T, S]."""
        return self.padding & self.causal

    def products(self) -> np.ndarray:
        """[B, H, T, S], nothing hidden."""
        query, key = (SPLITS[self.split](x, self.num_heads) for x in (self.query, self.key))
        return query @ key.swapaxes(2, 3) * self.scale

    def value(self) -> np.ndarray:
        """[B, H, T, S]."""
        products = self.products()
        hidden = products + self.fill if self.adds_fill else self.fill
        return np.where(self.mask(), products, hidden)


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax(Operation):
    """Weights [B, H, T, S] of scores, over one axis; zeros where nothing may be seen."""

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
    """Weighted sums of values [B, S, H*U], heads joined: [B, T, H*U]."""

    weights: np.ndarray
    values: np.ndarray
    num_heads: int
    split: str = "head, feature"
    join: str = "head, feature"

    def heads(self) -> np.ndarray:
        """The values by head, [B, H, S, U]."""
        return SPLITS[self.split](self.values, self.num_heads)

    def value(self) -> np.ndarray:
        """[B, T, H*U]."""
        batch, _, length, _ = self.weights.shape
        return JOINS[self.join](self.weights @ self.heads()).reshape(batch, length, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Residual(Operation):
    """What went into a sub-layer, plus what came out: [B, T, D]."""

    x: np.ndarray
    output: np.ndarray

    def value(self) -> np.ndarray:
        """[B, T, D]."""
        return self.x + self.output


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "none": lambda x: x,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
}
"""By name; the first four are those of `TransformerConfig.activation`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Activation(Operation):
    """A function of every hidden number [B, T, F]."""

    hidden: np.ndarray
    kind: str
    """A key of `ACTIVATIONS`."""

    def value(self) -> np.ndarray:
        """[B, T, F]."""
        return ACTIVATIONS[self.kind](torch.tensor(self.hidden)).numpy()


CONVENTIONS = {
    "uniform": "torch",
    "others": "jadore801120",
    "others_kl": "tunz",
    "non_pad_kl": "annotated",
    "annotated_wide_heads": "annotated_wide_heads",
}
"""Label smoothing by our names (the last is of a model that counts padding), and a family that has
it."""

NO_PADDING = -100
"""No target is this class."""


@dataclasses.dataclass(frozen=True, eq=False)
class Loss(Operation):
    """The smoothed cross entropy of logits [B, T, V], a number."""

    logits: np.ndarray
    targets: np.ndarray
    convention: str
    """A key of `CONVENTIONS`."""
    smoothing: float
    pad_id: int
    """Targets that are left out; `NO_PADDING` = none."""
    reduction: str = "mean over tokens"
    """A key of `REDUCTIONS`."""

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Each sentence's loss and number of tokens, [B] and [B]."""
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
"""What is made of the losses and token counts of sentences, and of B*T; the first is ours."""


def operation(evidence: Evidence, site: str) -> Operation:
    """What our model computes at a site, from its values at earlier ones.

    Raises:
      NotComputed: it is computed from what stands below the layers, which stand alone.
    """
    found = place(site)
    return _OPERATIONS[found.part](evidence, found)


# Each value of a layer starts from one of the following three.


def stack_input(evidence: Evidence, stack: str) -> np.ndarray:
    """What goes into a stack's first layer, [B, T, D].

    Raises:
      NotComputed: the layers stand alone.
    """
    side = "source" if stack == "encoder" else "target"
    sites = (f"{stack}/embedding_norm", f"{side}/embedded", f"{side}/embedding")
    for site in sites:
        if site in evidence.ours:
            return evidence.ours[site]
    raise NotComputed


def sublayer_input(evidence: Evidence, place: Place) -> np.ndarray:
    """What the residual carries into a sub-layer, not normalised by it, [B, T, D]."""
    attends = place.stack == "decoder" and evidence.config.has_inputs
    groups = ["self_attention", *(["cross_attention"] if attends else []), "feed_forward"]
    index = groups.index(place.group)
    if index:
        end = "norm" if evidence.config.norm_position == "post" else "sum"
        return evidence.ours[f"{place.prefix}/{groups[index - 1]}_{end}"]
    return layer_input(evidence, place.stack, place.layer or 0)


def layer_input(evidence: Evidence, stack: str, layer: int) -> np.ndarray:
    """What goes into a layer; of the layer behind the last one: what goes out of that."""
    if layer:
        return evidence.ours[f"{stack}/layers/{layer - 1}"]
    return stack_input(evidence, stack)


def sublayer_operand(evidence: Evidence, place: Place) -> np.ndarray:
    """What a sub-layer's function is applied to, [B, T, D]."""
    if evidence.config.norm_position == "pre":
        return evidence.ours[f"{place.prefix}/{place.group}_norm"]
    return sublayer_input(evidence, place)


def stack_output(evidence: Evidence, stack: str, *, normalised: bool = True) -> np.ndarray:
    """What comes out of a stack, [B, T, D]."""
    if normalised and f"{stack}/final_norm" in evidence.ours:
        return evidence.ours[f"{stack}/final_norm"]
    c = evidence.config
    layers = c.num_encoder_layers if stack == "encoder" else c.num_decoder_layers
    return layer_input(evidence, stack, layers)


def embedding_table(evidence: Evidence, stack: str) -> np.ndarray:
    """[V, D]."""
    own = stack == "encoder" and not evidence.config.shares_source_and_target
    return evidence.params["source_embedding/embedding" if own else "target_embedding/embedding"]


def _lookup(evidence: Evidence, place: Place) -> Lookup:
    c = evidence.config
    return Lookup(
        table=embedding_table(evidence, place.stack),
        tokens=evidence.source if place.stack == "encoder" else evidence.target_input,
        scale=c.d_model**0.5 if c.scale_embeddings else 1.0,
        zeroed=(-1, c.pad_id) if c.zero_pad_embeddings else (-1,),
    )


def _add_positions(evidence: Evidence, place: Place) -> AddPositions:
    c = evidence.config
    side = "source" if place.stack == "encoder" else "target"
    embedding = evidence.ours[f"{side}/embedding"]
    columns = AddPositions(
        embedding=embedding,
        positions=np.arange(embedding.shape[1])[None],
        learned=optional_parameter(evidence, f"{side}_positions/embedding"),
        layout=c.position_layout,
        exponent=c.position_exponent,
        base=c.position_base,
        offset=c.position_offset,
    )
    # Some models count real tokens and not columns; what ours has computed tells whether it does.
    real = evidence.real_source if place.stack == "encoder" else evidence.real_target
    found = evidence.ours[f"{side}/embedded"]
    counted = columns.but(positions=token_positions(real))
    return min(columns, counted, key=lambda added: np.abs(added.value() - found)[real].max())


def token_positions(real: np.ndarray) -> np.ndarray:
    """Each token's place among the real ones of its row, int [B, T] from 0."""
    return np.maximum(np.cumsum(real, axis=1) - 1, 0)


def norm(evidence: Evidence, place: Place, x: np.ndarray) -> Norm:
    """The norm of a sub-layer, of embeddings or on top, applied to x [B, T, D]."""
    layers = "" if place.layer is None else "layers/"
    path = f"{place.stack}/{layers}{place.group}_norm"
    scale, bias = (parameter(evidence, f"{path}/{name}", place.layer) for name in ("scale", "bias"))
    return Norm(x, evidence.config.norm_kind, evidence.config.norm_epsilon, scale, bias)


def _norm(evidence: Evidence, place: Place) -> Norm:
    if place.group == "embedding":
        side = "source" if place.stack == "encoder" else "target"
        sites = (f"{side}/embedded", f"{side}/embedding")
        x = evidence.ours[sites[0] if sites[0] in evidence.ours else sites[1]]
    elif place.group == "final":
        x = stack_output(evidence, place.stack, normalised=False)
    elif evidence.config.norm_position == "pre":
        x = sublayer_input(evidence, place)
    else:
        x = evidence.ours[f"{place.prefix}/{place.group}_sum"]
    return norm(evidence, place, x)


def projection(evidence: Evidence, place: Place, x: np.ndarray) -> Projection:
    """The projection of an attention or feed-forward network, applied to x."""
    kernel = parameter(evidence, f"{place.path}/kernel", place.layer)
    return Projection(x, kernel, optional_parameter(evidence, f"{place.path}/bias", place.layer))


def _from_operand(evidence: Evidence, place: Place) -> Projection:
    return projection(evidence, place, sublayer_operand(evidence, place))


def _from_attended(evidence: Evidence, place: Place) -> Projection:
    if place.group == "cross_attention":
        return projection(evidence, place, stack_output(evidence, "encoder"))
    return _from_operand(evidence, place)


def _output(evidence: Evidence, place: Place) -> Projection:
    before = "activated" if place.group == "feed_forward" else "context"
    return projection(evidence, place, evidence.ours[f"{place.prefix}/{place.group}/{before}"])


def _scores(evidence: Evidence, place: Place) -> Scores:
    c, prefix = evidence.config, f"{place.prefix}/{place.group}"
    query, key = evidence.ours[f"{prefix}/query"], evidence.ours[f"{prefix}/key"]
    everything = np.ones((query.shape[1], key.shape[1]), bool)
    of_target = place.stack == "decoder" and place.group == "self_attention"
    if not of_target:
        padding = evidence.real_source
    elif c.mask_target_padding and c.target_vocab_size:
        padding = evidence.target_input != c.pad_id
    else:
        padding = np.ones_like(evidence.real_target)
    return Scores(
        query=query,
        key=key,
        num_heads=c.num_heads,
        scale=c.key_width**-0.5,
        padding=padding[:, None, None],
        causal=np.tril(everything) if of_target else everything,
    )


def _softmax(evidence: Evidence, place: Place) -> Softmax:
    return Softmax(evidence.ours[f"{place.prefix}/{place.group}/scores"])


def _context(evidence: Evidence, place: Place) -> Context:
    prefix = f"{place.prefix}/{place.group}"
    return Context(
        evidence.ours[f"{prefix}/weights"],
        evidence.ours[f"{prefix}/value"],
        evidence.config.num_heads,
    )


def _activation(evidence: Evidence, place: Place) -> Activation:
    hidden = evidence.ours[f"{place.prefix}/{place.group}/hidden"]
    return Activation(hidden, evidence.config.activation)


def _residual(evidence: Evidence, place: Place) -> Residual:
    output = evidence.ours[f"{place.prefix}/{place.group}/output"]
    return Residual(sublayer_input(evidence, place), output)


def _layer(evidence: Evidence, place: Place) -> Given:
    end = "norm" if evidence.config.norm_position == "post" else "sum"
    return Given(evidence.ours[f"{place.prefix}/feed_forward_{end}"])


def _logits(evidence: Evidence, place: Place) -> Operation:
    c = evidence.config
    x = stack_output(evidence, "decoder")
    if not c.target_vocab_size:
        return Given(x)
    if c.shares_target_and_output:
        kernel = embedding_table(evidence, "decoder").T
    else:
        kernel = evidence.params["output/kernel"]
    scale = c.d_model**-0.5 if c.scale_logits else 1.0
    return Logits(x, kernel, optional_parameter(evidence, "output/bias"), scale)


def _loss(evidence: Evidence, place: Place) -> Loss:
    return Loss(
        logits=evidence.ours["logits"],
        targets=evidence.target_output.astype(np.int64),
        convention=evidence.convention,
        smoothing=evidence.smoothing,
        pad_id=evidence.config.pad_id,
    )


_OPERATIONS: dict[str, Callable[[Evidence, Place], Operation]] = {
    "embedding": _lookup,
    "embedded": _add_positions,
    "norm": _norm,
    "query": _from_operand,
    "key": _from_attended,
    "value": _from_attended,
    "scores": _scores,
    "weights": _softmax,
    "context": _context,
    "hidden": _from_operand,
    "activated": _activation,
    "output": _output,
    "sum": _residual,
    "layer": _layer,
    "logits": _logits,
    "loss": _loss,
}
"""By the part of a site."""
