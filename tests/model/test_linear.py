"""`Dense` is the only reader of the kernels and biases of linear maps."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.linear import Dense
from flaxformer_mt.model.transformer import Transformer

CONFIG = TransformerConfig(
    source_vocab_size=23,
    target_vocab_size=23,
    d_model=32,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    feed_forward_gate=True,
    tie_embeddings="none",
    output_bias=True,
    attention_backend="einsum",
)
SOURCE, TARGET = jnp.asarray(np.random.default_rng(0).integers(3, 23, size=(2, 2, 9)), jnp.int32)


def moved(name, x):
    return x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) * (1 + len(name))


@pytest.fixture
def adapted(monkeypatch):
    """Adds a fixed matrix and vector to every linear map, as a fork would add adapters."""
    kernel, bias = Dense.effective_kernel, Dense.effective_bias

    def effective_bias(self):
        return None if bias(self) is None else moved("bias", bias(self))

    monkeypatch.setattr(Dense, "effective_kernel", lambda self: moved("kernel", kernel(self)))
    monkeypatch.setattr(Dense, "effective_bias", effective_bias)


def as_parameters(params):
    """The same function with these matrices and vectors in the parameters."""

    def of_leaf(path, x):
        name = path[-1].key
        if name not in ("kernel", "bias") or any("norm" in entry.key for entry in path):
            return x
        stacked = any(entry.key == "layers" for entry in path)
        return jax.vmap(functools.partial(moved, name))(x) if stacked else moved(name, x)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


params_of = functools.cache(drawn_params)


@functools.cache
def expected(config):
    """Logits and gradient norm of a model whose parameters have the changes, by einsum."""
    plain = dataclasses.replace(config, attention_backend="einsum", remat="none")
    return computed(plain, as_parameters(params_of(config)))


def computed(config, params):
    # One program for both: XLA computes what they share once.
    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        logits, factors = (
            Transformer(config).apply({"params": params}, SOURCE, TARGET, project=project)
            for project in (True, False)
        )
        products = factors.scale * (factors.vectors @ factors.table.T + factors.bias)
        return jnp.mean(jnp.square(logits)), (logits, products)

    (_, logits), gradient = loss(params)
    return *logits, gradient


PATHS = {
    "einsum": {},
    "packed": {"attention_backend": "pallas_gpu"},
    "packed_remat": {"attention_backend": "pallas_gpu", "remat": "projections"},
    "packed_groups": {"attention_backend": "pallas_gpu", "num_kv_heads": 1},
    "separate": {"attention_backend": "pallas_gpu", "position_kind": "rotary"},
    "side_by_side": {"attention_backend": "pallas_tpu"},
    "recurrence": {"decoder_kind": "ssru"},
}


@pytest.mark.usefixtures("gpu_kernels_by_einsum")
@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_changed_map_is_changed_in_every_whole_pass(path, adapted, monkeypatch):
    config = dataclasses.replace(CONFIG, **PATHS[path])
    params = params_of(config)
    found = computed(config, params)
    monkeypatch.undo()
    chex.assert_trees_all_close(found, expected(config), rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    unchanged = jax.jit(Transformer(config).apply)({"params": params}, SOURCE, TARGET)
    assert float(jnp.max(jnp.abs(unchanged - found[0]))) > 0.1


def test_a_changed_map_is_changed_in_cached_steps(adapted, monkeypatch):
    model, variables = Transformer(CONFIG), {"params": params_of(CONFIG)}

    @jax.jit
    def begin(variables):
        encoded = model.apply(variables, SOURCE, method="encode")
        return model.apply(variables, encoded, SOURCE, 1, 9, method="init_cache")

    step = jax.jit(functools.partial(model.apply, method="decode_step"))
    cache, found = begin(variables), []
    for position in range(3):
        at = jnp.full(2, position, jnp.int32)
        tokens = TARGET[:, position : position + 1]
        logits, cache = step(variables, tokens, cache, at)
        found.append(logits)
    monkeypatch.undo()
    moved_params = as_parameters(params_of(CONFIG))
    logits_of_the_whole = jax.jit(model.apply)({"params": moved_params}, SOURCE, TARGET)
    chex.assert_trees_all_close(
        jnp.concatenate(found, axis=1), logits_of_the_whole[:, :3], rtol=1e-4, atol=1e-4
    )
