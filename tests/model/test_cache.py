"""The decoding cache: rows that are given to other sentences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.model.attention import KeyValue
from flaxformer_mt.model.cache import Cache, insert_rows


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
