"""Windows of self-attention: which keys each layer sees, in every way that a model is run."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer

WINDOW, LENGTH = 4, 12
TINY = TransformerConfig(
    source_vocab_size=19, target_vocab_size=19, d_model=8, num_heads=2, d_ff=8,
    num_encoder_layers=3, num_decoder_layers=3, attention_window=WINDOW, norm_position="both",
    norm_kind="rms_offset", position_kind="rotary", dtype="float64", param_dtype="float64",
)  # fmt: skip
DRAW = np.random.default_rng(0)
SOURCE, TARGET = (jnp.array(DRAW.integers(3, 19, (2, LENGTH)), jnp.int32) for _ in range(2))


def whole(config, source=SOURCE, target=TARGET, **options):
    variables = {"params": drawn_params(config)}
    return jax.jit(lambda: Transformer(config).apply(variables, source, target, **options))()


@pytest.mark.parametrize("position_kind", ["rotary", "sinusoidal"])
def test_every_second_layer_sees_only_what_is_near(float64, position_kind):
    config = dataclasses.replace(TINY, position_kind=position_kind)
    _, attention = whole(config, return_attention=True)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)  # From the query back to the key.
    for layer in range(3):
        in_encoder, in_decoder = True, distance >= 0
        if layer % 2 == 0:
            in_encoder, in_decoder = abs(distance) <= WINDOW, (distance >= 0) & (distance < WINDOW)
        seen = [weights[layer] > 0 for weights in (attention.encoder_self, attention.decoder_self)]
        assert (seen[0] == in_encoder).all()
        assert (seen[1] == in_decoder).all()
    assert (attention.decoder_cross > 0).all()


def test_packed_sentences_are_those_of_separate_rows(float64):
    """A window is of positions in a sentence; here those are not the columns."""
    separate = whole(TINY)
    rows = {"segment_ids": jnp.repeat(jnp.array([[1, 2]]), LENGTH, axis=1)}
    rows["positions"] = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32)[None], (1, 2))
    packed = whole(
        TINY,
        SOURCE.reshape(1, -1),
        TARGET.reshape(1, -1),
        **{f"{side}_{name}": row for side in ("encoder", "decoder") for name, row in rows.items()},
    )
    chex.assert_trees_all_close(packed.reshape(separate.shape), separate, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fields", [{"scan_layers": False}, {"scan_layers": True, "remat": "full"}])
def test_loops_unrolled_layers_and_computing_again_are_equal(float64, fields):
    def loss(params, config):
        return (Transformer(config).apply({"params": params}, SOURCE, TARGET) ** 2).mean()

    params = drawn_params(TINY)
    both = (TINY, dataclasses.replace(TINY, **fields))
    fast = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(jax.value_and_grad(loss), static_argnums=1, compiler_options=fast)
    found = [compiled(params, each) for each in both]
    chex.assert_trees_all_close(*found, rtol=1e-10, atol=1e-12)


def test_cached_steps_equal_the_whole_pass(float64):
    model, variables = Transformer(TINY), {"params": drawn_params(TINY)}
    encoded = model.apply(variables, SOURCE, method="encode")
    cache = model.apply(variables, encoded, SOURCE, 1, LENGTH, method="init_cache")

    @jax.jit
    def step(tokens, cache, position):
        positions = jnp.full(2, position, jnp.int32)
        return model.apply(variables, tokens, cache, positions, method="decode_step")

    found = []
    for position in range(LENGTH):
        logits, cache = step(TARGET[:, position, None], cache, position)
        found.append(logits[:, 0])
    chex.assert_trees_all_close(jnp.stack(found, 1), whole(TINY), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "fields",
    [{"attention_backend": "pallas_gpu"}, {"decoder_kind": "ssru", "position_kind": "none"}],
)
def test_what_has_no_windows_is_refused_by_name(fields):
    with pytest.raises(UserError, match=r"model.attention_window=4"):
        dataclasses.replace(TINY, **fields)
