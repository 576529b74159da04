"""Bias, dropout, residual and norm in one kernel against the equations, in the interpreter."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.kernels.fused_norm import NormInputs, NormOptions, residual_norm
from flaxformer_mt.model.normalization import layer_norm
from flaxformer_mt.model.numerics import random_uint16
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.sharding import ACTIVATION_RULES
from tests.backends import needs_gpu_interpreter

EPSILON = 1e-6
DROPPED = round(0.25 * 2**16)


def example(rows=2, length=12, width=128, bias=True, dropout=True, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(rows, length, width)), dtype) for _ in range(2))
    parameters = [jnp.asarray(rng.normal(size=width), jnp.float32) for _ in range(3)]
    return NormInputs(
        x,
        y,
        parameters[0] if bias else None,
        *parameters[1:],
        jax.random.key(3) if dropout else None,
    )


def reference(inputs):
    x, y, bias, scale, shift, key = inputs
    y = y if bias is None else y + bias
    if key is not None:
        kept = random_uint16(key, y.shape) >= DROPPED
        y = jnp.where(kept, y / (1 - DROPPED / 2**16), 0)
    rows = (x + y).reshape(-1, x.shape[-1])
    return layer_norm(rows, scale, shift, EPSILON).reshape(x.shape)


def fused(inputs):
    threshold = 0 if inputs.key is None else DROPPED
    once, again = residual_norm(NormOptions(EPSILON, threshold, interpret=True, uses=2), inputs)
    return 0.25 * once + 0.75 * again


def with_gradients(function, inputs):
    """The result, and the gradients of all floating-point inputs."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=inputs.x.shape), jnp.float32)

    def weighted(floats):
        result = function(NormInputs(*floats, inputs.key))
        return jnp.sum(result * weights), result

    return jax.jit(jax.value_and_grad(weighted, has_aux=True))(inputs[:-1])


@pytest.mark.slow_except("True-True")
@needs_gpu_interpreter
@pytest.mark.parametrize(
    ("dropout", "bias"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_the_equations(bias, dropout):
    inputs = example(bias=bias, dropout=dropout)
    expected = with_gradients(reference, inputs)
    chex.assert_trees_all_close(with_gradients(fused, inputs), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_kernels_by_einsum")
def test_devices_draw_the_numbers_of_their_rows():
    inputs = example(rows=8)
    expected = with_gradients(reference, inputs)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def sharded(floats):
        abstract = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        with abstract, nn.logical_axis_rules(ACTIVATION_RULES):
            return with_gradients(fused, NormInputs(*floats, inputs.key))

    everywhere = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(sharded, in_shardings=everywhere, out_shardings=everywhere)
    chex.assert_trees_all_close(run(inputs[:-1]), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow_except("1024")
@needs_gpu_interpreter
@pytest.mark.parametrize("width", [128, 1024])
def test_it_is_lowered_for_gpus_without_one(width):
    """And without a warning that a part of JAX is deprecated."""
    inputs = example(width=width, dtype=jnp.bfloat16)
    options = NormOptions(EPSILON, DROPPED, interpret=False, uses=2)

    def gradients(inputs):
        def total(x, y):
            return sum(jnp.sum(z) for z in residual_norm(options, inputs._replace(x=x, y=y)))

        return jax.grad(total, argnums=(0, 1))(inputs.x, inputs.y)

    program = jax.jit(gradients).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("mosaic_gpu") >= 2


SMALL = TransformerConfig(
    source_vocab_size=11,
    target_vocab_size=11,
    d_model=128,
    num_heads=2,
    d_ff=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.25,
)
TOKENS = jnp.asarray([[3, 4, 5, 2], [6, 7, 2, 0]], jnp.int32)


def loss_and_gradients(config):
    model = Transformer(config)
    params = model.init(jax.random.key(0), TOKENS, TOKENS)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        rngs = {"dropout": jax.random.key(1)}
        return jnp.mean(
            jnp.square(model.apply(params, TOKENS, TOKENS, deterministic=False, rngs=rngs))
        )

    return loss(params)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_kernels_by_einsum")
def test_a_model_has_the_same_parameters_dropout_and_gradients_with_it():
    by_xla = loss_and_gradients(SMALL)
    fused_norms = loss_and_gradients(dataclasses.replace(SMALL, norm_backend="pallas_gpu"))
    chex.assert_trees_all_close(fused_norms, by_xla, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("gpu_kernels_by_einsum")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_kind", "unbiased_std"),
        ("norm_position", "pre"),
        ("d_model", 96),
        ("dtype", "float64"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(float64, field, value):
    def trained():
        return loss_and_gradients(
            dataclasses.replace(SMALL, **{field: value}, norm_backend="pallas_gpu")
        )

    with pytest.raises(UserError, match=r"model\.norm_backend=pallas_gpu .*: use auto or xla"):
        jax.eval_shape(trained)
