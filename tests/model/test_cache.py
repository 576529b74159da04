"""The decoding cache: rows that are given to other sentences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.attention import KeyValue
from flaxformer_mt.model.cache import Cache, insert_rows
from flaxformer_mt.model.transformer import Transformer


def cache_of(number, mask):
    """A cache of one layer for each row of the mask, with that number in keys and values."""
    rows, length = np.shape(mask)
    cross = KeyValue(*(jnp.full((rows, 1, length, 2), number, jnp.float32),) * 2)
    mask = jnp.array(mask, bool)[:, None, None, :]
    return Cache((), (cross,), mask, jnp.zeros((rows, 1, 1), jnp.int32))


def test_a_row_gets_keys_values_and_mask_of_its_new_sentence():
    old = cache_of(1, [[1, 1, 0], [1, 1, 0], [1, 1, 0]])
    new = cache_of(2, [[1, 0, 0], [1, 1, 1]])
    found = insert_rows(old, new, jnp.array([2, 3]))  # The second one has no row.
    kept, inserted = (jax.tree.map(lambda leaf: leaf[:2], each) for each in (found, old))
    chex.assert_trees_all_equal(kept, inserted)
    assert found.cross_mask[2].ravel().tolist() == [True, False, False]
    assert (found.cross[0].key[2] == 2).all()
    assert (found.cross[0].value[2] == 2).all()


KINDS = {
    "rotary": {"position_kind": "rotary"},
    "t5_relative": {"position_kind": "t5_relative", "num_kv_heads": 1},
    "alibi": {"position_kind": "alibi"},
    "window": {"position_kind": "rotary", "attention_window": 2},
    "learned": {"position_kind": "learned", "max_length": 12},
    "ssru": {"decoder_kind": "ssru"},
}


@pytest.mark.slow_except("t5_relative-2", "ssru-1")
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_several_tokens_in_one_step_are_those_of_one_at_a_time(float64, kind, beams):
    """Of sentences at different positions; tokens that were taken back are not seen."""
    config = TransformerConfig(
        source_vocab_size=19, target_vocab_size=19, d_model=8, num_heads=2, d_ff=8,
        num_encoder_layers=1, num_decoder_layers=2, dtype="float64", param_dtype="float64",
        **KINDS[kind],
    )  # fmt: skip
    model, draw = Transformer(config), np.random.default_rng(0)
    source = jnp.array(draw.integers(3, 19, (2, 4)), jnp.int32)
    tokens = jnp.array(draw.integers(3, 19, (2, 4, beams)), jnp.int32)
    variables = {"params": drawn_params(config)}

    @jax.jit
    def begun(variables):
        encoded = model.apply(variables, source, method="encode")
        return model.apply(variables, encoded, source, beams, 9, method="init_cache")

    @jax.jit
    def step(variables, tokens, cache, first):
        tokens, positions = tokens.reshape(2, -1), first + jnp.array([0, 2], jnp.int32)
        logits, cache = model.apply(variables, tokens, cache, positions, method="decode_step")
        return logits.reshape(2, -1, beams, logits.shape[-1]), cache

    cache = begun(variables)
    one_by_one, found = cache, []
    for first in range(4):
        logits, one_by_one = step(variables, tokens[:, first : first + 1], one_by_one, first)
        found.append(logits)
    start, cache = step(variables, tokens[:, :2], cache, 0)
    if kind != "ssru":
        _, cache = step(variables, tokens[:, :2], cache, 2)  # Taken back.
    together, _ = step(variables, tokens[:, 2:], cache, 2)
    together = jnp.concatenate([start, together], 1)
    np.testing.assert_allclose(together, jnp.concatenate(found, 1), rtol=0, atol=1e-12)
