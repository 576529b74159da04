"""Guided alignment: the loss of the paper, which sharpens the alignments of a trained model."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

import flaxformer_mt as fmt
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.objectives.guided_alignment import alignment_loss
from flaxformer_mt.objectives.losses import label_smoothed_cross_entropy

CONFIG = fmt.TransformerConfig(
    source_vocab_size=11,
    target_vocab_size=11,
    d_model=8,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dropout_rate=0.1,
)


def a_batch():
    """Two rows; the second has two segments and padding. Some tokens have no link, some several."""
    random = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0]])
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]])
    source, target, inputs = random.integers(4, 11, (3, 2, 6))
    links = np.zeros((2, 6, 6), np.float32)
    links[0, 0, 3] = links[0, 1, 0] = links[1, 3, 3] = 1
    links[0, 2, [1, 4]] = links[1, 1, [0, 2]] = 0.5
    arrays = [source, inputs, target, segments, segments, positions, positions]
    source, inputs, target, *rest = (jnp.asarray(array, jnp.int32) for array in arrays)
    weights = jnp.asarray(segments > 0, jnp.float32)
    return Batch(source, inputs, target, weights, *rest, alignment=jnp.asarray(links))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({}, 0), ({"scan_layers": False}, -1), ({"remat": "full"}, 1), ({"decoder_kind": "ssru"}, 0)
    ],
)  # fmt: skip
def test_the_loss_is_the_formula_of_all_logits_and_weights(float64, changes, layer):
    changes = {"dtype": "float64", "param_dtype": "float64", **changes}
    config, batch = dataclasses.replace(CONFIG, **changes), a_batch()
    params = drawn_params(config)
    key = jax.random.key(1)

    def formula(params):
        logits, attention = fmt.Transformer(config).apply(
            {"params": params},
            batch.encoder_input_tokens,
            batch.decoder_input_tokens,
            encoder_segment_ids=batch.encoder_segment_ids,
            decoder_segment_ids=batch.decoder_segment_ids,
            encoder_positions=batch.encoder_positions,
            decoder_positions=batch.decoder_positions,
            deterministic=False,
            return_attention=True,
            rngs={"dropout": key},
        )
        weights = attention.decoder_cross[layer].mean(axis=1)
        alignment = sum(
            -sum(jnp.log(weights[row, target, source]) for source in sources) / len(sources)
            for row, target, sources in (
                (0, 0, [3]), (0, 1, [0]), (0, 2, [1, 4]), (1, 1, [0, 2]), (1, 3, [3]),
            )
        )  # fmt: skip
        loss, _ = label_smoothed_cross_entropy(
            logits, batch.decoder_target_tokens, batch.decoder_loss_weights, 0.1
        )
        return loss + 0.7 * alignment, (alignment, 5.0, 11.0)

    def given(params):
        sums = fmt.guided_alignment(
            config, params, batch, key, weight=0.7, layer=layer, smoothing=0.1
        )
        return sums.loss, (*sums.metrics["alignment"], sums.weight)

    found, expected = (
        jax.jit(jax.value_and_grad(function, has_aux=True))(params) for function in (given, formula)
    )
    chex.assert_trees_all_close(found, expected, atol=1e-10)


def test_a_batch_without_links_is_refused():
    batch = dataclasses.replace(a_batch(), alignment=None)
    with pytest.raises(fmt.UserError, match=r"no links .* give read_pairs a file"):
        fmt.guided_alignment(CONFIG, {}, batch, weight=1.0)


def test_a_weight_that_underflows_gives_a_finite_loss_and_gradient():
    def loss(scores):
        weights = jax.nn.softmax(scores)[None, None]
        batch = dataclasses.replace(
            a_batch(),
            decoder_loss_weights=jnp.ones((1, 1)),
            alignment=jnp.array([[[1.0, 0.0]]]),
        )
        return alignment_loss(weights, batch)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.array([[-200.0, 0.0]]))
    assert np.isfinite(value)
    assert value > 80
    assert np.isfinite(gradient).all()
