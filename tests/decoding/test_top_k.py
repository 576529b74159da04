"""The blocked top_k and logsumexp, compared with those of JAX."""

import jax
import numpy as np
import pytest

from flaxformer_mt.decoding.search.top_k import logsumexp, top_k


def some_scores(columns):
    rng = np.random.default_rng(0)
    return np.concatenate(
        [
            rng.normal(size=(20, columns)),
            rng.integers(0, 4, size=(20, columns)),  # Many equal values: the first ones count.
            np.where(rng.random((20, columns)) < 0.02, 1.0, -np.inf),
            np.zeros((1, columns)),
        ]
    ).astype(np.float32)


@pytest.mark.parametrize(("columns", "count"), [(400, 3), (417, 8), (1000, 1), (50, 8), (5, 5)])
def test_top_k_equals_that_of_jax(columns, count):
    scores = some_scores(columns)
    found, expected = jax.jit(top_k, static_argnums=1)(scores, count), jax.lax.top_k(scores, count)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("columns", [417, 5])
def test_logsumexp_equals_that_of_jax(columns):
    large = np.array([[0, 1000, 999], [-np.inf] * 3, [0, np.nan, 1], [np.inf, 1, 2]], np.float32)
    for scores in (some_scores(columns), large):
        found = jax.jit(logsumexp)(scores.reshape(1, *scores.shape))
        expected = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        np.testing.assert_allclose(found[0], expected, rtol=1e-6)
