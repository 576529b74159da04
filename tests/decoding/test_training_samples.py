"""Samples drawn inside a training step."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from talker import full_pass

from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.decoding.training_samples import Samples, sample
from flaxformer_mt.errors import UserError

END = 2
SOURCE = np.array([[5, 9, 7, END, 0], [8, END, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
PACKED = np.array([[5, END, 9, 7, END]], np.int32)


def batch_of(tokens, segment_ids=None):
    return Batch(tokens, *[None] * 3, segment_ids, *[None] * 3)


def padded_batch(tokens):
    is_token = (tokens > 0).astype(np.int32)
    positions = np.arange(tokens.shape[1], dtype=np.int32) * is_token
    return Batch(tokens, *[tokens] * 2, is_token, is_token, is_token, positions, positions)


@functools.partial(jax.jit, static_argnames=("model", "n", "options"))
def drawn(model, params, source, key, n, options):
    return sample(model, params, source, key, n, **dict(options))


def draw(talker, source=SOURCE, seed=0, n=4, **options):
    key = jax.random.key(seed)
    return drawn(talker.model, talker.params, source, key, n, tuple(options.items()))


def test_log_probabilities_are_those_of_the_full_pass(talker):
    found = draw(talker, max_length=8)
    assert found.tokens.shape == found.input_tokens.shape == found.weights.shape == (3, 4, 8)
    for row in range(2):
        source = np.pad(SOURCE[row : row + 1], ((0, 0), (0, 95)))
        for index in range(4):
            inputs = np.pad(found.input_tokens[row, index], (0, 92))[None]
            scores = full_pass(talker.params, source, inputs, model=talker.model)[0]
            own = scores[jnp.arange(8), found.tokens[row, index]] @ found.weights[row, index]
            np.testing.assert_allclose(found.log_probabilities[row, index], own, rtol=1e-5)
    lengths = np.asarray(found.weights.sum(axis=-1), int)
    ends = found.tokens == END
    assert ((ends.argmax(axis=-1) + 1 == lengths) | (lengths == 8))[:2].all()
    assert (found.input_tokens[..., 0] == talker.model.bos_id).all()
    np.testing.assert_array_equal(found.input_tokens[..., 1:], found.tokens[..., :-1])
    assert not lengths[2].any()  # A row without a sentence.


def test_rows_are_a_batch_of_every_sample_with_its_source():
    batch = padded_batch(SOURCE[:2])
    tokens = np.array([[[5, END, 0], [7, 8, END]], [[END, 0, 0], [9, END, 0]]], np.int32)
    inputs = np.array([[[1, 5, 0], [1, 7, 8]], [[1, 0, 0], [1, 9, 0]]], np.int32)
    rows = Samples(tokens, inputs, np.float32(tokens > 0), np.zeros((2, 2))).rows(batch)
    lengths = np.array([2, 3, 1, 2])
    is_token = np.arange(3) < lengths[:, None]
    expected = Batch(
        encoder_input_tokens=np.repeat(batch.encoder_input_tokens, 2, axis=0),
        decoder_input_tokens=inputs.reshape(4, 3),
        decoder_target_tokens=tokens.reshape(4, 3),
        decoder_loss_weights=np.float32(is_token),
        encoder_segment_ids=np.repeat(batch.encoder_segment_ids, 2, axis=0),
        decoder_segment_ids=np.int32(is_token),
        encoder_positions=np.repeat(batch.encoder_positions, 2, axis=0),
        decoder_positions=np.int32(np.where(is_token, np.arange(3), 0)),
    )
    chex.assert_trees_all_equal(rows, expected)


def test_packed_rows_are_refused(talker):
    arguments = talker.model, talker.params
    key = jax.random.key(0)
    with pytest.raises(UserError, match="row 1 of the batch has several sentences"):
        sample(*arguments, np.concatenate([SOURCE[:1], PACKED]), key, 2)
    with pytest.raises(UserError, match="row 0 of the batch has several sentences"):
        sample(*arguments, batch_of(SOURCE, np.array([[1, 1, 2, 2, 0]] * 3)), key, 2)
    with pytest.raises(UserError, match=r"segment ids, so its rows may be packed: .*unpacked=True"):
        draw(talker, batch_of(SOURCE, (SOURCE > 0).astype(np.int32)))


@pytest.mark.slow
def test_packed_rows_that_are_traced_give_nan(talker):
    found = draw(talker, np.concatenate([SOURCE[:1], PACKED]))
    assert np.isfinite(found.weights[0]).all()
    assert np.isnan(found.weights[1]).all()
    assert np.isnan(found.log_probabilities[1]).all()
    segment_ids = np.array([[1, 1, 1, 1, 0], [1, 2, 0, 0, 0]], np.int32)
    found = draw(talker, batch_of(SOURCE[:2], segment_ids), unpacked=True)
    assert np.isnan(found.weights).any(axis=(1, 2)).tolist() == [False, True]
