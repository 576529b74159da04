"""Fused attention as a differentiable function of arrays that a mesh may shard."""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from flaxformer_mt.errors import UserError
from flaxformer_mt.model.kernels import attention_blocks as blocks
from flaxformer_mt.model.kernels import gpu_refusal
from flaxformer_mt.model.kernels.attention_blocks import (
    AttentionOptions,
    Gradients,
    Operands,
    Saved,
)
from flaxformer_mt.model.logical_axes import dividing_axes, on_each_device
from flaxformer_mt.model.numerics import masked_softmax, random_uint16

PLATFORMS = {"pallas_gpu": "gpu", "pallas_tpu": "tpu"}
"""The platform of each backend that fuses."""
FUSED_ATTENTION = "fused_attention"
"""The name of the kernels' results, for `is_fused_attention`."""


class AttentionCase(NamedTuple):
    """What the choice of a backend depends on."""

    platform: str
    """Of the program: "cpu", "gpu" or "tpu"."""
    device_kind: str
    """As the device calls itself: "NVIDIA H100 80GB HBM3"."""
    dtype: jnp.dtype
    """Of queries, keys and values."""
    query_shape: tuple[int, ...]
    """[B, H, T, K]."""
    key_length: int
    """S."""
    value_width: int
    """U."""


def choose_backend(requested: str, case: AttentionCase) -> str:
    """Returns the backend of a whole pass whose weights nobody reads: "einsum" or a fused one.

    Args:
      requested: `config.attention_backend`. "auto" takes the fused backend of the platform for
        every case that it can do; `tests/model/test_fused_attention.py` compares them.
      case: of this attention.

    Raises:
      UserError: the requested backend cannot do the case.
    """
    if requested in PLATFORMS:
        if reason := refusal(requested, case):
            raise UserError(f"model.attention_backend={requested} {reason}: use auto or einsum")
        return requested
    for backend, platform in PLATFORMS.items():
        if requested == "auto" and platform == case.platform and not refusal(backend, case):
            return backend
    return "einsum"


def refusal(backend: str, case: AttentionCase) -> str:
    """Returns why a fused backend cannot compute a case, or "" if it can.

    On CPUs, the one for TPUs is interpreted, and can do what it can on its own platform.
    """
    _, heads, _, width = case.query_shape
    if backend == "pallas_gpu" and (reason := gpu_refusal(case.platform, case.device_kind)):
        return reason
    if backend == "pallas_tpu" and case.platform not in ("tpu", "cpu"):
        return f"is for platform tpu, but this program is for {case.platform}"
    if not all(isinstance(size, int) for size in (*case.query_shape, case.key_length)):
        return "needs shapes that are known when the program is compiled"
    dtypes = ["bfloat16"] if backend == "pallas_gpu" else ["bfloat16", "float32"]
    if case.dtype not in dtypes:
        return f"computes in {' or '.join(dtypes)}, not in {case.dtype}"
    if width != case.value_width:
        return f"needs values as wide as keys, not {case.value_width} and {width}"
    if backend == "pallas_gpu" and width not in (16, 32, 64, 128):
        return f"needs heads of width 16, 32, 64 or 128, not {width}"
    if backend == "pallas_tpu":
        if blocks.heads_per_block(heads, width) is None:
            return (
                f"needs {blocks.LANES} features in a whole number of heads, not {heads} x {width}"
            )
        if case.key_length > blocks.MAX_KEYS:
            return f"takes rows of at most {blocks.MAX_KEYS} keys, not {case.key_length}"
    return ""


class AttentionInputs(NamedTuple):
    """The arrays of fused attention.

    Queries, keys and values are [B, H, T, K] and [B, G, S, K]; query head h attends to head
    h // (H / G). The backend "pallas_gpu" also takes them packed, as one product of matrices writes
    them, without their biases: `query` [B, T, H, 3, K] of queries, keys and values; or `query`
    [B, T, H, 1, K] and `key` [B, S, G, 2, K] of keys and values. (Keys need no bias: it does not
    change the weights.)
    """

    query: Array
    key: Array | None
    """None if `query` has the keys."""
    value: Array | None
    """None if `query` or `key` has the values."""
    query_segments: Array
    """int32 [B, T], the number of each query's sentence in its row."""
    key_segments: Array
    """int32 [B, S]; keys of segment 0 are hidden."""
    bias: Array | None
    """[B or 1, H, T, S], added to the scaled scores."""
    dropout_key: Array | None
    """Of the weights' dropout; None without dropout."""
    query_bias: Array | None = None
    """[H, K], added to packed queries; None without biases, as `value_bias`."""
    value_bias: Array | None = None
    """[G, K], added to packed values."""

    @property
    def is_packed(self) -> bool:
        """Whether arrays have an axis for several of queries, keys and values."""
        return self.query.ndim == 5


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_attention(options: AttentionOptions, inputs: AttentionInputs) -> Array:
    """Computes attention without writing its weights; see `scaled_dot_product_attention`.

    The backward pass draws the random numbers of dropout again. On TPUs they are the same as there;
    on GPUs, see `kept_weights`.

    Returns:
      The context [B, H, T, K], in the dtype of `query`. A query without any key gets zeros.
    """
    return _forward(options, inputs)[0]


def is_fused_attention(primitive: Primitive, *_: Any, **params: Any) -> bool:
    """Whether an operation names a kernel's results: a policy of `jax.checkpoint` to store them."""
    return primitive.name == "name" and params["name"] == FUSED_ATTENTION


def _forward(options: AttentionOptions, inputs: AttentionInputs) -> tuple[Array, Any]:
    operands = _operands(options, inputs)
    of_operands, of_saved = _specs(operands)
    forward = functools.partial(_kernels(options.backend).forward, options)
    run = on_each_device(forward, (of_operands,), (of_saved.context, of_saved))
    context, saved = checkpoint_name(run(operands), FUSED_ATTENTION)
    return context.swapaxes(1, 2), (inputs, saved)


def _backward(options: AttentionOptions, residuals: Any, gradient: Array) -> tuple[AttentionInputs]:
    inputs, saved = residuals
    operands = _operands(options, inputs)
    of_operands, of_saved = _specs(operands)
    of_vectors, of_pairs = of_saved
    gradient = gradient.swapaxes(1, 2)
    backward = functools.partial(_kernels(options.backend).backward, options)
    run = on_each_device(
        backward,
        (of_operands, of_saved, of_vectors),
        Gradients(of_vectors, of_vectors, of_vectors, of_pairs, of_pairs),
    )
    *vectors, of_query_bias, of_value_bias = run(operands, saved, gradient)
    if not inputs.is_packed:
        vectors = [x.swapaxes(1, 2) for x in vectors]
    of_bias = None
    if inputs.bias is not None:
        of_bias = _bias_gradient(operands, options, gradient, inputs.bias)
    return (
        inputs._replace(
            query=vectors[0],
            key=vectors[1],
            value=vectors[2],
            query_segments=None,
            key_segments=None,
            bias=of_bias,
            dropout_key=None,
            query_bias=_summed_bias(of_query_bias, inputs.query_bias),
            value_bias=_summed_bias(of_value_bias, inputs.value_bias),
        ),
    )


def _summed_bias(gradient: Array | None, bias: Array | None) -> Array | None:
    """Adds up the gradients [B, H, K] of rows and query heads to that of a bias [G, K]."""
    if gradient is None or bias is None:
        return None
    of_heads = jnp.sum(gradient, axis=0).reshape(len(bias), -1, bias.shape[1])
    return jnp.sum(of_heads, axis=1).astype(bias.dtype)


fused_attention.defvjp(_forward, _backward)


def _kernels(backend: str) -> Any:
    """Returns the module with the functions `forward` and `backward`."""
    # Imported here, because Pallas takes a quarter of a second, for which CPUs need not wait.
    name = {"pallas_gpu": "gpu", "pallas_tpu": "tpu"}[backend]
    return importlib.import_module(f"flaxformer_mt.model.kernels.attention_{name}")


def _operands(options: AttentionOptions, inputs: AttentionInputs) -> Operands:
    """Brings the inputs into the kernels' layout, in which the projections write them."""

    def wide(x: Array | None) -> Array | None:
        return None if x is None else x.astype(jnp.float32)

    query: Any
    query, key, value = inputs[:3]
    if not inputs.is_packed:
        query, key, value = (x.swapaxes(1, 2) for x in inputs[:3] if x is not None)
    dropout = None
    if inputs.dropout_key is not None:
        (rows, queries), keys = inputs.query_segments.shape, inputs.key_segments.shape[1]
        shape = rows, query.shape[2], queries
        if options.backend == "pallas_gpu":
            dropout = jax.random.bits(inputs.dropout_key, shape, jnp.uint32)
        else:
            numbers = random_uint16(inputs.dropout_key, (*shape, keys))
            dropout = (numbers >= jnp.uint16(options.dropout_threshold)).astype(jnp.int8)
    return Operands(
        query,
        key,
        value,
        inputs.query_segments,
        inputs.key_segments,
        wide(inputs.bias),
        dropout,
        wide(inputs.query_bias),
        wide(inputs.value_bias),
    )


def _unpacked(operands: Operands) -> list[Array]:
    """Returns queries, keys and values, with their biases, [B, T, H, K] and [B, S, G, K]."""
    arrays = [x for x in operands[:3] if x is not None]
    if operands.query.ndim == 4:
        return arrays
    vectors = [array[:, :, :, part] for array in arrays for part in range(array.shape[3])]
    biases = operands.query_bias, None, operands.value_bias
    return [
        x if bias is None else (x + bias).astype(x.dtype)
        for x, bias in zip(vectors, biases, strict=True)
    ]


def _bias_gradient(
    operands: Operands, options: AttentionOptions, gradient: Array, bias: Array
) -> Array:
    """Computes the gradient of the bias, which has the size of the weights, by XLA.

    XLA drops it where the bias is not trained.
    """
    query, *key_value = _unpacked(operands)
    key, value = (blocks.repeated(x, query.shape[2]) for x in key_value)
    multiply = functools.partial(jnp.einsum, "bthk,bshk->bhts", preferred_element_type=jnp.float32)
    visible = jax.vmap(lambda row, column: blocks.visible_keys(row, column, 0, 0, options.causal))(
        operands.query_segments[:, :, None], operands.key_segments[:, None]
    )[:, None]  # [B, 1, T, S]

    def weights(bias: Array) -> Array:
        scores = multiply(query, key) * query.shape[-1] ** -0.5 + bias.astype(jnp.float32)
        return masked_softmax(scores, visible)

    of_weights = multiply(gradient, value)
    kept = operands.dropout
    if kept is not None and options.backend == "pallas_gpu":
        keys = jnp.arange(key.shape[1], dtype=jnp.uint32)
        kept = blocks.kept_weights(kept[..., None], keys, options.dropout_threshold)
    factors = blocks.dropout_factors(kept, options.dropped)
    of_weights = of_weights if factors is None else of_weights * factors
    return jax.vjp(weights, bias)[1](of_weights)[0]


def _specs(operands: Operands) -> tuple[Operands, Saved]:
    """Returns how the mesh shards the arrays of a kernel: by rows and heads."""
    rows = operands.query.shape[0]
    heads = (operands.query if operands.key is None else operands.key).shape[2]
    row_axes = dividing_axes("batch", rows) or None
    head_axes = dividing_axes("attention_heads", heads) or None
    vectors = PartitionSpec(row_axes, None, head_axes)
    pairs = PartitionSpec(row_axes, head_axes)
    has_rows = operands.bias is not None and operands.bias.shape[0] > 1
    of_bias = PartitionSpec(row_axes if has_rows else None, head_axes)
    segments = PartitionSpec(row_axes)
    by_head = PartitionSpec(head_axes)
    of_operands = Operands(
        vectors, vectors, vectors, segments, segments, of_bias, pairs, by_head, by_head
    )
    return of_operands, Saved(vectors, pairs)
