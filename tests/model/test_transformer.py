"""The whole model: shapes, switches, packing, the cache, layouts of the stack."""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params
from flax import linen as nn
from flax.linen import kw_only_dataclasses as flax_dataclasses

from examples import own_attention  # noqa: F401  (registers "cosine")
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.layers import EncoderLayer
from flaxformer_mt.model.stack import stack
from flaxformer_mt.model.transformer import Embedding, Transformer

TINY = TransformerConfig(
    source_vocab_size=23,
    target_vocab_size=23,
    d_model=12,
    num_heads=2,
    d_ff=20,
    num_encoder_layers=2,
    num_decoder_layers=3,
    max_length=16,
)
SOURCE = jnp.array([[3, 4, 5, 2, 0], [7, 8, 2, 0, 0]], jnp.int32)
TARGET = jnp.array([[1, 4, 5, 9], [1, 8, 2, 0]], jnp.int32)
CONFIGS = {
    "post": TINY,
    "pre": dataclasses.replace(TINY, norm_position="pre", final_norm=True),
    "free heads": dataclasses.replace(TINY, head_dim=5, value_dim=7, qkv_bias=False),
    "learned": dataclasses.replace(TINY, position_kind="learned", tie_embeddings="none"),
    "no positions": dataclasses.replace(TINY, position_kind="none", embedding_norm=True),
    "annotated norm": dataclasses.replace(TINY, norm_kind="unbiased_std", output_bias=True),
    "zero start": dataclasses.replace(TINY, bos_id=-1, zero_pad_embeddings=True),
    "padding start": dataclasses.replace(TINY, bos_id=TINY.pad_id),
    "language model": dataclasses.replace(TINY, has_inputs=False),
    "recurrent": dataclasses.replace(TINY, decoder_kind="ssru"),
    "unrolled": dataclasses.replace(TINY, scan_layers=False),
    "capped": dataclasses.replace(
        TINY, query_key_norm=True, score_cap=2.0, logit_cap=3.0, position_kind="rotary"
    ),
    "own attention": dataclasses.replace(TINY, attention_kind="cosine"),
}


class Compiled(Transformer):
    """The model with its methods compiled whole: op by op, each would compile dozens of times."""

    @functools.partial(
        jax.jit, static_argnums=0, static_argnames=("method", "deterministic", "return_attention")
    )
    def apply(self, *args, **kwargs):
        return super().apply(*args, **kwargs)


@functools.cache
def initialise(config):
    model = Compiled(config)
    source = SOURCE if config.has_inputs else None
    target = TARGET.at[:, 0].set(config.bos_id)
    return model, {"params": drawn_params(config)}, source, target


def check_cached_steps(config, tolerance):
    """Feeds the target token by token, to two hypotheses, and compares with the full pass."""
    model, variables, source, target = initialise(config)
    full = model.apply(variables, source, target)
    chex.assert_shape(full, (2, 4, 23))
    encoded = None if source is None else model.apply(variables, source, method="encode")
    init_cache = functools.partial(Transformer(config).apply, method="init_cache")
    cache = jax.jit(init_cache, static_argnums=(3, 4, 5))(variables, encoded, source, 2, 6, 2)
    for position in range(3):  # Row 1 has padding at position 3, which decoding never feeds.
        tokens = jnp.repeat(target[:, position, None], 2, axis=1)
        logits, cache = model.apply(
            variables, tokens, cache, jnp.full(2, position), method="decode_step"
        )
        chex.assert_trees_all_close(logits[:, 0], full[:, position], rtol=0, atol=tolerance)
        chex.assert_trees_all_close(logits[:, 1], full[:, position], rtol=0, atol=tolerance)


@pytest.mark.slow_except("recurrent", "capped")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cached_step_equals_the_full_pass(name):
    check_cached_steps(CONFIGS[name], tolerance=1e-5)


@pytest.mark.slow
def test_one_parameter_layout_runs_as_a_loop_and_unrolled():
    model, variables, source, target = initialise(TINY)
    unrolled = Compiled(CONFIGS["unrolled"])
    chex.assert_trees_all_equal_shapes_and_dtypes(variables, initialise(CONFIGS["unrolled"])[1])
    chex.assert_trees_all_close(
        model.apply(variables, source, target),
        unrolled.apply(variables, source, target),
        atol=1e-6,
    )


def test_the_scale_of_embeddings_has_their_dtype():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    table = jnp.asarray(np.random.default_rng(0).normal(size=(23, 12)), jnp.float32)
    found = Embedding(config, 23).apply({"params": {"embedding": table}}, SOURCE)
    expected = table[SOURCE].astype(jnp.bfloat16) * jnp.bfloat16(12**0.5)
    chex.assert_trees_all_equal(found, expected)


def test_without_segments_padding_does_not_matter():
    model, variables, source, target = initialise(TINY)
    padded = model.apply(variables, source, target)
    alone = model.apply(variables, source[1:, :3], target[1:, :3])
    chex.assert_trees_all_close(padded[1:, :3], alone, atol=1e-6)


def test_attention_of_every_layer_is_returned_and_sums_to_one():
    model, variables, source, target = initialise(TINY)
    logits, attention = model.apply(variables, source, target, return_attention=True)
    chex.assert_trees_all_close(logits, model.apply(variables, source, target), atol=1e-6)
    chex.assert_shape(attention.encoder_self, (2, 2, 2, 5, 5))
    chex.assert_shape(attention.decoder_self, (3, 2, 2, 4, 4))
    chex.assert_shape(attention.decoder_cross, (3, 2, 2, 4, 5))
    np.testing.assert_allclose(attention.decoder_cross.sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(attention.decoder_cross[:, 1, :, :, 3:], 0)
    np.testing.assert_array_equal(attention.decoder_self[..., 0, 1:], 0)


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_site_can_act_alone(rate):
    off = dict.fromkeys(
        ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"), 0.0
    ) | {"activation_dropout_rate": 0.0}
    model, variables, source, target = initialise(
        dataclasses.replace(TINY, **off | {f"{rate}_rate": 0.5})
    )

    def run(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply(variables, source, target, deterministic=False, rngs=rngs)

    chex.assert_trees_all_equal(run(0), run(0))
    assert float(jnp.abs(run(0) - run(1)).max()) > 1e-3
    silent = Compiled(dataclasses.replace(TINY, **off))
    rngs = {"dropout": jax.random.key(0)}
    chex.assert_trees_all_close(
        silent.apply(variables, source, target, deterministic=False, rngs=rngs),
        silent.apply(variables, source, target),
    )


def test_bfloat16_keeps_parameters_and_logits_in_float32():
    model, variables, source, target = initialise(dataclasses.replace(TINY, dtype="bfloat16"))
    logits = model.apply(variables, source, target)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    exact = Compiled(TINY).apply(variables, source, target)
    assert 0 < float(jnp.abs(logits - exact).max()) < 0.2


@pytest.mark.slow
def test_gradients_of_embeddings_are_added_up_in_float32():
    config = dataclasses.replace(TINY, dtype="bfloat16", scale_embeddings=False)
    embedding, tokens = Embedding(config, 4), jnp.full((1, 1025), 3)
    variables = embedding.init(jax.random.key(0), tokens)

    def total(variables):
        return jnp.sum(embedding.apply(variables, tokens), dtype=jnp.float32)

    gradient = jax.grad(total)(variables)["params"]["embedding"]
    np.testing.assert_array_equal(gradient[3], 1025)  # bfloat16 cannot count beyond 256


def test_float64_has_no_float32_inside(float64):
    config = dataclasses.replace(TINY, dtype="float64", param_dtype="float64")
    _, variables, source, target = initialise(config)
    assert "f32" not in str(jax.make_jaxpr(Transformer(config).apply)(variables, source, target))


def test_heads_that_do_not_divide_d_model_are_refused():
    with pytest.raises(
        UserError, match=r"model\.d_model=12 is not a multiple of model\.num_heads=5"
    ):
        dataclasses.replace(TINY, num_heads=5)


def test_stacks_are_created_by_several_threads_at_once(monkeypatch):
    """As translation does. Flax removes fields of the layer's class in the meantime."""
    fields = flax_dataclasses.dataclasses.fields

    def slow_fields(kind):
        for _ in kind.__dataclass_fields__:
            time.sleep(1e-4)
        return fields(kind)

    def create(_):
        return stack(EncoderLayer, TINY, 2, {"__call__": (nn.broadcast,)})

    before = list(EncoderLayer.__dataclass_fields__)
    monkeypatch.setattr(flax_dataclasses.dataclasses, "fields", slow_fields)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(create, range(40)))
    assert list(EncoderLayer.__dataclass_fields__) == before
