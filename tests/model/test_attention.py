"""Attention against its equation."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import flaxformer_mt as fmt
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import attention
from flaxformer_mt.model.attention import (
    MultiHeadAttention,
    masked_softmax,
    scaled_dot_product_attention,
)

B, T, S, H, K, U = 2, 3, 5, 2, 4, 6


def inputs(dtype):
    rng = np.random.default_rng(0)
    shapes = (B, H, T, K), (B, H, S, K), (B, H, S, U)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


class AttentionTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_is_equation_1(self):
        query, key, value = inputs(jnp.float32)
        mask = jnp.asarray(np.random.default_rng(1).random((B, 1, T, S)) < 0.7).at[..., 0].set(True)
        context, weights = self.variant(scaled_dot_product_attention)(query, key, value, mask)
        for b in range(B):
            for h in range(H):
                q, k, v = (np.asarray(x[b, h], np.float64) for x in (query, key, value))
                scores = np.where(mask[b, 0], q @ k.T / np.sqrt(K), -np.inf)
                expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
                np.testing.assert_allclose(weights[b, h], expected, atol=1e-6)
                np.testing.assert_allclose(context[b, h], expected @ v, atol=1e-6)
        chex.assert_shape(context, (B, H, T, U))
        chex.assert_trees_all_equal_dtypes(context, weights, value)


def test_a_query_that_may_attend_to_nothing_gets_zeros_and_finite_gradients():
    query, key, value = inputs(jnp.float32)
    mask = jnp.ones((B, 1, T, S), bool).at[0, 0, 1].set(False)
    context, weights = scaled_dot_product_attention(query, key, value, mask)
    np.testing.assert_array_equal(context[0, :, 1], 0)
    np.testing.assert_array_equal(weights[0, :, 1], 0)
    assert np.abs(context[1, 1]).min() > 0
    gradients = jax.grad(
        lambda *qkv: scaled_dot_product_attention(*qkv, mask)[0].sum(), argnums=(0, 1, 2)
    )(query, key, value)
    chex.assert_tree_all_finite(gradients)


def test_the_written_gradient_of_the_softmax_is_the_derived_one(float64):
    rng = np.random.default_rng(0)
    scores, cotangents = rng.normal(size=(2, B, H, T, S))
    mask = rng.random((B, 1, T, S)) < 0.7

    def derived(scores):
        return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e9)), 0)

    gradients = [
        jax.jit(jax.grad(lambda x, f=softmax: jnp.sum(f(x) * cotangents)))(jnp.asarray(scores))
        for softmax in (lambda x: masked_softmax(x, mask), derived)
    ]
    chex.assert_trees_all_close(*gradients, atol=1e-14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_softmax_is_float32_or_wider(dtype):
    query, key, value = inputs(dtype)
    _, weights = scaled_dot_product_attention(query, key, value)
    assert weights.dtype == jnp.dtype(dtype)
    text = str(jax.make_jaxpr(scaled_dot_product_attention)(query, key, value))
    assert not [line for line in text.splitlines() if " exp " in line and "bf16" in line]


def test_float64_stays_float64(float64):
    query, key, value = inputs(jnp.float64)
    text = str(jax.make_jaxpr(scaled_dot_product_attention)(query, key, value))
    assert "f32" not in text


def test_a_key_bias_cannot_matter_and_is_not_trained():
    config = TransformerConfig(d_model=8, num_heads=2)
    module = MultiHeadAttention(config)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)

    def attend(module, inputs):
        return module(inputs, module.project(inputs), None, True)[0]

    init = jax.jit(functools.partial(module.init, method=attend))
    params = init(jax.random.key(0), x)["params"]

    @jax.jit
    @jax.value_and_grad
    def loss(bias):
        moved = params | {"key": params["key"] | {"bias": bias}}
        return jnp.sum(jnp.square(module.apply({"params": moved}, x, method=attend)))

    bias = jnp.arange(8, dtype=jnp.float32)
    (moved, gradient), (unmoved, _) = loss(bias), loss(0 * bias)
    assert float(moved) == pytest.approx(float(unmoved), rel=1e-5)
    np.testing.assert_array_equal(gradient, 0)


def test_a_key_bias_of_an_attention_of_ones_own_is_trained(kinds):
    @attention.register_attention("own")
    class Distances(MultiHeadAttention):
        def attend(self, query, key, value, *arguments):
            distances = jnp.square(query[..., None, :] - key[..., None, :, :]).sum(-1)
            weights = jax.nn.softmax(-distances)
            return weights @ value, weights

    module = Distances(TransformerConfig(d_model=8, num_heads=2, attention_kind="own"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)

    @jax.jit
    def gradient_at_the_start(key):
        variables = module.init(key, x, x, None, True)

        def loss(variables):
            return jnp.sum(jnp.square(module.apply(variables, x, x, None, True)[0]))

        return jax.grad(loss)(variables)

    assert gradient_at_the_start(jax.random.key(0))["params"]["key"]["bias"].any()


@pytest.fixture
def kinds(monkeypatch):
    """The registered kinds of attention, restored afterwards."""
    monkeypatch.setattr(attention.ATTENTION, "classes", {**attention.ATTENTION.classes})


def weights_of(config):
    """The attention of a layer, by its class, of the same parameters."""
    module = attention.ATTENTION.of(config.attention_kind)(config)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)
    variables = module.init(jax.random.key(0), x, x, None, True)
    return module.apply(variables, x, x, None, True)[1]


def test_an_attention_of_ones_own_may_be_replaced(kinds, monkeypatch):
    config = TransformerConfig(d_model=8, num_heads=2)
    own = dataclasses.replace(config, attention_kind="own")
    with pytest.raises(UserError, match="attention_kind=own is not registered: import the file"):
        weights_of(own)
    cleared, found = [], []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    for factor in (0.0, 1.0):

        @attention.register_attention("own")
        class Own(MultiHeadAttention):
            def attend(self, query, *arguments, factor=factor):
                return super().attend(factor * query, *arguments)

        found.append(weights_of(own))
    assert cleared == [True]  # Programs that were compiled with the first one.
    np.testing.assert_allclose(found[0], 1 / 3, atol=1e-6)
    np.testing.assert_array_equal(found[1], weights_of(config))


def test_what_cannot_be_registered(kinds):
    with pytest.raises(UserError, match="dot_product is the built-in attention_kind"):
        attention.register_attention("dot_product")
    with pytest.raises(TypeError, match="register_attention: the name must be a string"):
        attention.register_attention(MultiHeadAttention)
    with pytest.raises(TypeError, match="own must be a subclass of MultiHeadAttention"):
        attention.register_attention("own")(print)
    with pytest.raises(UserError, match="attention_backend=pallas_gpu computes dot products only"):
        TransformerConfig(attention_kind="own", attention_backend="pallas_gpu")


def test_query_key_norm_and_capped_scores_in_a_file_of_ones_own(monkeypatch):
    """Of public names alone, with the values and gradients of the built-in ones."""
    monkeypatch.setattr(attention.ATTENTION, "classes", {**attention.ATTENTION.classes})

    @fmt.register_attention("normed")
    class Normed(fmt.MultiHeadAttention):
        cap: float = 50.0

        def setup(self):
            super().setup()
            self.query_norm, self.key_norm = nn.RMSNorm(), nn.RMSNorm()

        def attend(self, query, key, value, mask, bias, deterministic):
            scores = self.query_norm(query) @ self.key_norm(key).mT * query.shape[-1] ** -0.5
            scores = self.cap * jnp.tanh(scores / self.cap)
            weights = fmt.masked_softmax(scores, mask)
            return weights @ value, weights

    built_in = TransformerConfig(
        source_vocab_size=9, target_vocab_size=9, d_model=8, num_heads=2, d_ff=8, norm_kind="rms",
        num_encoder_layers=1, num_decoder_layers=1, query_key_norm=True, score_cap=0.5,
    )  # fmt: skip
    own = {"query_key_norm": False, "score_cap": 0.0, "attention_kind": "normed(cap=0.5)"}
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 9, (2, 5)), jnp.int32)

    def gradient(params, config):
        def loss(params):
            logits = fmt.Transformer(config).apply({"params": params}, tokens, tokens)
            return jnp.sum(jnp.sin(logits))

        return jax.value_and_grad(loss)(params)

    params = jax.tree.map(lambda leaf: leaf * 1.3, fmt.init(built_in, jax.random.key(0)))
    ours, theirs = (
        jax.jit(functools.partial(gradient, config=config))(params)
        for config in (dataclasses.replace(built_in, **own), built_in)
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_kind", ["layer_norm", "rms"])
def test_query_key_norm_and_capped_scores_are_their_formulas(float64, norm_kind):
    config = TransformerConfig(
        d_model=8, num_heads=4, num_kv_heads=2, head_dim=6, norm_kind=norm_kind, norm_epsilon=1e-3,
        query_key_norm=True, score_cap=0.7, dtype="float64", param_dtype="float64",
    )  # fmt: skip
    random = np.random.default_rng(0)
    x, y = (jnp.asarray(random.normal(size=size)) for size in ((2, 3, 8), (2, 5, 8)))
    mask = jnp.asarray(random.random((2, 1, 3, 5)) < 0.7)
    module = MultiHeadAttention(config)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, y, mask, True))["params"]
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), shapes)

    def projected(name, inputs, heads):
        products = inputs @ params[name]["kernel"] + params[name]["bias"]
        z = products.reshape(2, -1, heads, 6).swapaxes(1, 2)
        if name == "value":
            return np.repeat(z, 4 // heads, axis=1)
        norm = params[f"{name}_norm"]
        if norm_kind == "layer_norm":
            z = z - z.mean(-1, keepdims=True)
        z = z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-3)
        return np.repeat(z * norm["scale"] + norm.get("bias", 0.0), 4 // heads, axis=1)

    q, k, v = projected("query", x, 4), projected("key", y, 2), projected("value", y, 2)
    scores = 0.7 * np.tanh(q @ k.swapaxes(-1, -2) / np.sqrt(6) / 0.7)
    weights = np.where(mask, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    context = (weights @ v).swapaxes(1, 2).reshape(2, 3, -1)
    expected = context @ params["output"]["kernel"] + params["output"]["bias"]

    def attend(params):
        return module.apply({"params": params}, x, y, mask, True)[0]

    np.testing.assert_allclose(jax.jit(attend)(params), expected, rtol=0, atol=1e-12)
    # After the norm, a bias of the keys no longer cancels in the softmax.
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(attend(params) ** 2)))(params)
    assert np.abs(gradient["key"]["bias"]).max() > 1e-3
