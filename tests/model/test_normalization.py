"""The published layer norms against plain NumPy and against PyTorch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.normalization import (
    Norm,
    layer_norm,
    residual,
    rms_norm,
    unbiased_std_norm,
)


def test_layer_norm_is_pytorch_s_even_far_from_zero():
    x = np.random.default_rng(0).normal(100, 0.03, (4, 16)).astype(np.float32)
    exact = torch.nn.functional.layer_norm(torch.tensor(x).double(), (16,), eps=1e-5)
    ours = layer_norm(jnp.asarray(x), jnp.ones(16), jnp.zeros(16), 1e-5)
    # float32 keeps about 3 digits of a spread of 0.03 around 100; the fast variance keeps none.
    chex.assert_trees_all_close(ours, exact.float().numpy(), atol=2e-3)


def test_unbiased_std_norm_is_the_formula(float64):
    x = np.random.default_rng(0).normal(size=(4, 16))
    expected = (x - x.mean(-1, keepdims=True)) / (x.std(-1, ddof=1, keepdims=True) + 1e-6)
    chex.assert_trees_all_close(
        unbiased_std_norm(jnp.asarray(x), jnp.ones(x.shape[1]), jnp.zeros(x.shape[1]), 1e-6),
        expected,
        rtol=1e-12,
    )


def test_rms_norm_is_pytorch_s(float64):
    x, scale = np.random.default_rng(0).normal(size=(2, 4, 16))
    expected = torch.nn.functional.rms_norm(
        torch.tensor(x), (16,), torch.tensor(scale[0]), eps=1e-3
    )
    chex.assert_trees_all_close(
        rms_norm(jnp.asarray(x), jnp.asarray(scale[0]), 1e-3), expected.numpy(), rtol=1e-12
    )


@pytest.mark.parametrize("normalise", [layer_norm, unbiased_std_norm])
def test_a_constant_row_has_finite_gradients(normalise):
    ones, zeros = jnp.ones(4), jnp.zeros(4)
    total = jax.jit(jax.grad(lambda x: normalise(x, ones, zeros, 1e-6).sum()))
    gradient = total(jnp.full((1, 4), 3.0))
    chex.assert_tree_all_finite(gradient)


def test_the_written_gradient_of_layer_norm_is_pytorch_s(float64):
    rng = np.random.default_rng(0)
    x, scale, bias, weights = (rng.normal(size=shape) for shape in ((5, 8), 8, 8, (5, 8)))
    tensors = [torch.tensor(value, requires_grad=True) for value in (x, scale, bias)]
    y = torch.nn.functional.layer_norm(tensors[0], (8,), tensors[1], tensors[2], eps=1e-3)
    (y * torch.tensor(weights)).sum().backward()
    gradients = jax.grad(
        lambda *args: jnp.sum(layer_norm(*args, 1e-3) * weights), argnums=(0, 1, 2)
    )
    for ours, theirs in zip(gradients(x, scale, bias), tensors, strict=True):
        chex.assert_trees_all_close(ours, theirs.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norm_keeps_the_dtype_of_its_input(dtype):
    norm = Norm(TransformerConfig(d_model=16, num_heads=2, dtype=dtype))
    x = jnp.ones((2, 16), dtype)
    variables = norm.init(jax.random.key(0), x)
    assert norm.apply(variables, x).dtype == jnp.dtype(dtype)
    assert variables["params"]["scale"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("position", "expected"), [("post", 2 + 60 + 1), ("pre", 2 + 90), ("both", 2 + 100)]
)
def test_residual_places_the_norm(position, expected):
    class AddOne(Norm):
        def __call__(self, x):
            return x + 1

    def sublayer(x, add_bias):
        assert add_bias
        return 3 * x, "extra"

    def dropout(x, deterministic):
        assert not deterministic
        return 10 * x

    norm = AddOne(TransformerConfig(norm_position=position, norm_backend="xla"))
    of_output = norm if position == "both" else None
    assert residual(2, sublayer, norm, of_output, dropout, deterministic=False) == (
        expected,
        "extra",
    )
