"""What the kernels of both platforms share: their inputs, and the mathematics of one block."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

LOWEST = -1e30
"""Stands for minus infinity, of which differences are NaN."""
LANES = 128
"""The width of a TPU's registers: longer rows are padded to multiples."""
SUBLANES = 32
"""The height of a TPU's registers, for numbers of 8 bits: short rows are padded to multiples."""
MAX_KEYS = 1024
"""The longest row of keys on TPUs: the scores of a block, in float32, are in fast memory."""


class AttentionOptions(NamedTuple):
    """The static options of fused attention."""

    backend: str
    """"pallas_gpu" or "pallas_tpu"."""
    causal: bool
    """Whether query t attends to no key after t."""
    dropout_threshold: int
    """A weight is dropped if its random number of 16 bits is below it."""
    interpret: bool
    """Whether the kernel is interpreted, as on CPUs."""

    @property
    def dropped(self) -> float:
        """The share of the weights that dropout sets to 0."""
        return self.dropout_threshold / 2**16


class Operands(NamedTuple):
    """`AttentionInputs` in a kernel's layout; in a kernel, references to blocks of them.

    Vectors are [B, T, H, K] and [B, S, G, K], or packed. Biases are float32.
    """

    query: Any
    key: Any
    value: Any
    query_segments: Any
    key_segments: Any
    bias: Any = None
    dropout: Any = None
    """On TPUs int8 [B, H, T, S], 0 where dropout sets a weight to 0, otherwise 1; on GPUs uint32
    [B, H, T], the words of `kept_weights`; None without dropout."""
    query_bias: Any = None
    value_bias: Any = None


class Saved(NamedTuple):
    """What the backward pass on GPUs needs of the forward pass; on TPUs it needs nothing."""

    context: Any = None
    """[B, T, H, K]."""
    logsumexp: Any = None
    """float32 [B, H, T], of the scores; of a query without keys, far below any score."""


class Gradients(NamedTuple):
    """The gradients of queries, keys and values, which are packed as these are."""

    query: Any
    key: Any
    value: Any
    query_bias: Any = None
    """float32 [B, H, K], of each row and head, as `value_bias`; None without these biases."""
    value_bias: Any = None


def visible_keys(
    query_segments: Array, key_segments: Array, first_query: Any, first_key: Any, causal: bool
) -> Array:
    """Returns which keys of a block its queries attend to, bool [Q, N].

    Segments are int32 [Q, 1] and [1, N]. The first query and key of the block are given by their
    index in the row.
    """
    visible = (query_segments == key_segments) & (key_segments > 0)
    if causal:
        queries = first_query + lax.broadcasted_iota(jnp.int32, visible.shape, 0)
        keys = first_key + lax.broadcasted_iota(jnp.int32, visible.shape, 1)
        visible &= keys <= queries
    return visible


def product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Multiplies two matrices over one axis of each, and sums in float32.

    Products of float32 are as exact as everywhere (`jax_default_matmul_precision`).
    """
    return lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=None if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def scores(query: Array, key: Array, bias: Array | None, scale: float) -> Array:
    """Returns the scores [Q, N], in float32, of queries [Q, K] and keys [N, K]."""
    scaled = product(query, key, (1, 1)) * scale
    return scaled if bias is None else scaled + bias


def kept_weights(words: Array, keys: Array, threshold: int) -> Array:
    """Returns which weights dropout keeps, from a counter-based generator that kernels can afford.

    Each query has a random word, drawn by JAX; the number of a key is a hash of this word and the
    index of the key: two rounds of multiplication and shift (Mueller and Wellons, "Prospecting for
    Hash Functions", 2018). JAX's own generator would take ten times the operations, and more time
    than all products of the attention.

    Args:
      words: uint32, of each weight's query.
      keys: uint32, the index of each weight's key in its row.
      threshold: a weight is dropped if its random number of 16 bits is below it.
    """
    x = words + keys * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0xD35A2D97)
    return x >> jnp.uint32(16) >= jnp.uint32(threshold)


def dropout_factors(kept: Array | None, dropped: float) -> Array | None:
    """Returns the factors, 0 or 1 / (1 - dropped), of the weights; None without dropout."""
    return None if kept is None else kept.astype(jnp.float32) * (1 / (1 - dropped))


def score_gradients(
    weights: Array, of_weights: Array, along: Array, factors: Array | None
) -> tuple[Array, Array]:
    r"""Computes the gradient of the scores of a block.

    .. math:: \partial s = w \odot (m \odot \partial w - \sum_u y_u\, \partial y_u)

    Args:
      weights: w, float32 [Q, N], before dropout.
      of_weights: the gradient of the weights after dropout, float32 [Q, N].
      along: the sum over the features of the context y and its gradient, float32 [Q, 1].
      factors: m, float32 [Q, N], of dropout.

    Returns:
      The weights after dropout, and the gradient of the scores; float32 [Q, N].
    """
    if factors is None:
        return weights, weights * (of_weights - along)
    return weights * factors, weights * (of_weights * factors - along)


def repeated(x: Array, heads: int) -> Array:
    """Repeats the heads of [B, S, G, ...] for the query heads of their group: [B, S, H, ...]."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def summed(x: Array, groups: int) -> Array:
    """Adds up the gradients of the heads of each group: [B, S, H, ...] to [B, S, G, ...]."""
    if x.shape[2] == groups:
        return x
    parts = x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])
    return jnp.sum(parts, axis=3, dtype=jnp.float32).astype(x.dtype)


def padded(x: Array, axis: int, multiple: int) -> Array:
    """Appends zeros to an axis until its size is a multiple."""
    missing = -x.shape[axis] % multiple
    return x if not missing else jnp.pad(x, [(0, missing * (a == axis)) for a in range(x.ndim)])


def padded_operands(operands: Operands, queries: int, keys: int) -> Operands:
    """Appends queries that attend to nothing, and hidden keys, up to multiples."""

    def of_pairs(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = padded(x, 2, queries)
        return x if x.ndim == 3 else padded(x, 3, keys)

    def of_keys(x: Array | None) -> Array | None:
        return None if x is None else padded(x, 1, keys)

    return operands._replace(
        query=padded(operands.query, 1, queries),
        key=of_keys(operands.key),
        value=of_keys(operands.value),
        query_segments=padded(operands.query_segments, 1, queries),
        key_segments=padded(operands.key_segments, 1, keys),
        bias=of_pairs(operands.bias),
        dropout=of_pairs(operands.dropout),
    )


def heads_per_block(heads: int, width: int) -> int | None:
    """Returns the number of heads of one block on TPUs, None if their widths do not add up."""
    together = max(LANES // width, 1)
    if heads * width <= LANES or (heads % together == 0 and together * width % LANES == 0):
        return min(together, heads)
    return None
