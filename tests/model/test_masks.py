"""Masks against literal 0/1 matrices."""

import jax.numpy as jnp
import numpy as np

from flaxformer_mt.model import masks


def test_padding_mask_hides_the_pad_token_from_every_query():
    tokens = jnp.array([[5, 9, 7], [9, 5, 9]])
    expected = np.array([[[[1, 0, 1]]], [[[0, 1, 0]]]], bool)
    np.testing.assert_array_equal(masks.padding_mask(tokens, pad_id=9), expected)


def test_causal_mask_shows_the_past_and_the_present():
    expected = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)
    np.testing.assert_array_equal(masks.causal_mask(3), expected[None, None])


def test_segment_mask_keeps_sentences_apart_and_padding_out():
    queries = jnp.array([[1, 1, 2, 0]])
    keys = jnp.array([[1, 2, 2, 3, 0]])
    expected = np.array([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(masks.segment_mask(queries, keys), expected[None, None])
