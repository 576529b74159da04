"""Fused attention as a differentiable function of arrays that a mesh may shard."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from flaxformer_mt.model.fused_attention.blocks import (
    Form,
    Operands,
    dropout_factors,
    visible_keys,
)
from flaxformer_mt.model.logical_axes import dividing_axes, mesh_of_rules
from flaxformer_mt.model.numerics import masked_softmax, random_uint16


class Options(NamedTuple):
    """The static options of fused attention."""

    backend: str
    """A key of `PLATFORMS`."""
    causal: bool
    """Whether query t attends to no key after t."""
    dropout_threshold: int
    """A weight is dropped if its random number of 16 bits is below it."""
    interpret: bool
    """Whether the kernel is interpreted, as on CPUs."""


class Inputs(NamedTuple):
    """The arrays of fused attention."""

    query: Array
    """[B, H, T, K]."""
    key: Array
    """[B, H, S, K]."""
    value: Array
    """[B, H, S, K]."""
    query_segments: Array
    """int32 [B, T], the number of each query's sentence in its row."""
    key_segments: Array
    """int32 [B, S]; keys of segment 0 are hidden."""
    bias: Array | None
    """[B or 1, H, T, S], added to the scaled scores."""
    dropout_key: Array | None
    """Of the weights' dropout; None without dropout."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_attention(options: Options, inputs: Inputs) -> Array:
    """Computes attention without writing its weights; see `scaled_dot_product_attention`.

    The weights are dropped by the same random numbers as there, which the backward pass draws
    again.

    Returns:
      The context [B, H, T, K], in the dtype of `query`. A query without any key gets zeros.
    """
    return _forward(options, inputs)[0]


def _forward(options: Options, inputs: Inputs) -> tuple[Array, Any]:
    kernels, operands = _kernels(options.backend), operands_of(options, inputs)
    run = on_each_device(
        functools.partial(kernels.forward, form=_form(options, inputs)),
        operands,
        lambda s: ((s.operands,), (s.vectors, kernels.saved_specs(s.vectors, s.pairs))),
    )
    context, saved = run(operands)
    return context.swapaxes(1, 2), (inputs, saved)


def _backward(options: Options, residuals: Any, gradient: Array) -> tuple[Inputs]:
    inputs, saved = residuals
    kernels, operands = _kernels(options.backend), operands_of(options, inputs)
    form = _form(options, inputs)
    gradient = gradient.swapaxes(1, 2)
    run = on_each_device(
        functools.partial(kernels.backward, form=form),
        operands,
        lambda s: (
            (s.operands, kernels.saved_specs(s.vectors, s.pairs), s.vectors),
            (s.vectors, s.vectors, s.vectors),
        ),
    )
    query, key, value = (x.swapaxes(1, 2) for x in run(operands, saved, gradient))
    of_bias = None if inputs.bias is None else _bias_gradient(operands, form, gradient, inputs.bias)
    return (Inputs(query, key, value, None, None, of_bias, None),)  # type: ignore[arg-type]


fused_attention.defvjp(_forward, _backward)


def _kernels(backend: str) -> Any:
    """Returns the module with the functions `forward`, `backward` and `saved_specs`."""
    # Imported here, because Pallas takes a quarter of a second, for which CPUs need not wait.
    name = {"pallas_gpu": "gpu", "pallas_tpu": "tpu"}[backend]
    return importlib.import_module(f"flaxformer_mt.model.fused_attention.{name}")


def _form(options: Options, inputs: Inputs) -> Form:
    return Form(
        options.causal,
        inputs.query.shape[-1] ** -0.5,
        options.dropout_threshold / 2**16,
        options.interpret,
    )


def operands_of(options: Options, inputs: Inputs) -> Operands:
    """Brings the inputs into the kernels' layout, in which the projections write them."""
    kept = None
    if inputs.dropout_key is not None:
        shape = (*inputs.query.shape[:3], inputs.key.shape[2])
        numbers = random_uint16(inputs.dropout_key, shape)
        kept = (numbers >= jnp.uint16(options.dropout_threshold)).astype(jnp.int8)
    return Operands(
        inputs.query.swapaxes(1, 2),
        inputs.key.swapaxes(1, 2),
        inputs.value.swapaxes(1, 2),
        inputs.query_segments,
        inputs.key_segments,
        None if inputs.bias is None else inputs.bias.astype(jnp.float32),
        kept,
    )


def _bias_gradient(operands: Operands, form: Form, gradient: Array, bias: Array) -> Array:
    """Computes the gradient of the bias, which has the size of the weights, by XLA.

    XLA drops it where the bias is not trained.
    """
    query, key, value, _, _, _, kept = operands
    multiply = functools.partial(jnp.einsum, "bthk,bshk->bhts", preferred_element_type=jnp.float32)
    visible = visible_pairs(operands, form.causal)

    def weights(bias: Array) -> Array:
        scores = multiply(query, key) * form.scale + bias.astype(jnp.float32)
        return masked_softmax(scores, visible)

    of_weights = multiply(gradient, value)
    factors = dropout_factors(kept, form.dropped)
    of_weights = of_weights if factors is None else of_weights * factors
    return jax.vjp(weights, bias)[1](of_weights)[0]


class Specs(NamedTuple):
    """How a mesh shards the arrays of a kernel: by rows and heads."""

    operands: Operands
    vectors: PartitionSpec
    """Of [B, T, H, K]."""
    pairs: PartitionSpec
    """Of [B, H, T], or [B, H, T, S]."""


def on_each_device(
    function: Callable, operands: Operands, specs: Callable[[Specs], tuple[Any, Any]]
) -> Callable:
    """Lets each device run a kernel on its rows and heads, which XLA would gather everywhere.

    Args:
      function: the kernel.
      operands: of the whole mesh.
      specs: returns the partition specs of the function's arguments and of its results.
    """
    mesh = mesh_of_rules()
    if mesh is None:
        return function
    rows, _, heads, _ = operands.query.shape
    row_axes = dividing_axes("batch", rows) or None
    head_axes = dividing_axes("attention_heads", heads) or None
    vectors = PartitionSpec(row_axes, None, head_axes)
    pairs = PartitionSpec(row_axes, head_axes)
    has_rows = operands.bias is not None and operands.bias.shape[0] > 1
    of_bias = PartitionSpec(row_axes if has_rows else None, head_axes)
    segments = PartitionSpec(row_axes)
    of_operands = Operands(vectors, vectors, vectors, segments, segments, of_bias, pairs)
    in_specs, out_specs = specs(Specs(of_operands, vectors, pairs))
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.auto_axes),
        check_vma=False,
    )


def visible_pairs(operands: Operands, causal: bool) -> Array:
    """Returns which keys the queries attend to, bool [B, 1, T, S]."""
    columns, rows = operands.query_segments[:, :, None], operands.key_segments[:, None]
    of_row = jax.vmap(lambda column, row: visible_keys(column, row, 0, 0, causal))
    return of_row(columns, rows)[:, None]
