"""Packing changes nothing: each pair has the loss, and the gradient, that it has by itself."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.batches import BatchShape, make_batch
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.losses import token_losses

SOURCES = [[3, 4, 2], [5, 6, 7, 8, 2], [9, 2], [10, 11, 12, 2], [3, 2]]
TARGETS = [[4, 4, 6, 2], [7, 2], [8, 9, 10, 2], [11, 2], [12, 3, 5, 7, 2]]
PACKED = [[0, 1, 2], [4, 3]]


def batch_of(rows, length, **changes):
    sides = Sentences.from_lists(SOURCES), Sentences.from_lists(TARGETS)
    shape = BatchShape(len(rows), length, length)
    return make_batch(TokenPairs(*sides), rows, shape, TransformerConfig()).replace(**changes)


@pytest.fixture
def losses_and_gradients(tie_embeddings, dtype):
    """A function from a batch to the loss of each pair's tokens, and the gradient of their sum."""
    config = TransformerConfig(
        source_vocab_size=13,
        target_vocab_size=13,
        d_model=8,
        num_heads=2,
        d_ff=16,
        num_encoder_layers=1,
        num_decoder_layers=1,
        tie_embeddings=tie_embeddings,
        dtype=dtype,
        param_dtype=dtype,
        scan_layers=False,
    )
    model = Transformer(config)

    @jax.jit
    def compute(params, batch):
        def total(params):
            logits = model.apply(
                {"params": params},
                batch.encoder_input_tokens,
                batch.decoder_input_tokens,
                encoder_segment_ids=batch.encoder_segment_ids,
                decoder_segment_ids=batch.decoder_segment_ids,
                encoder_positions=batch.encoder_positions,
                decoder_positions=batch.decoder_positions,
            )
            losses = token_losses(logits, batch.decoder_target_tokens, 0.1)
            return jnp.sum(losses * jnp.asarray(batch.decoder_loss_weights, dtype)), losses

        gradients, losses = jax.grad(total, has_aux=True)(params)
        return losses, gradients

    def compute_from_seed(batch):
        tokens = (batch.encoder_input_tokens, batch.decoder_input_tokens)
        return compute(jax.jit(model.init)(jax.random.key(0), *tokens)["params"], batch)

    return compute_from_seed


def by_pair(losses, rows):
    """[B, T] to one array a pair, in the order of the corpus."""
    pairs = {}
    for number, row in enumerate(rows):
        lengths = [len(TARGETS[pair]) for pair in row]
        parts = np.split(np.asarray(losses[number]), np.cumsum(lengths))
        pairs |= dict(zip(row, parts, strict=False))
    return [pairs[number] for number in range(len(TARGETS))]


@pytest.mark.parametrize(
    ("dtype", "tolerance", "tie_embeddings"),
    [
        ("float64", 1e-12, "all"),
        pytest.param("float64", 1e-12, "none", marks=pytest.mark.slow),
        pytest.param("float32", 1e-6, "all", marks=pytest.mark.slow),
        pytest.param("float32", 1e-6, "none", marks=pytest.mark.slow),
    ],
)
def test_packed_and_unpacked_batches_agree(losses_and_gradients, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        alone = [[number] for number in range(len(TARGETS))]
        plain = dict.fromkeys(
            ["encoder_segment_ids", "decoder_segment_ids", "encoder_positions", "decoder_positions"]
        )
        losses, gradients = losses_and_gradients(batch_of(alone, 5, **plain))
        packed_losses, packed_gradients = losses_and_gradients(batch_of(PACKED, 12))

        expected = by_pair(losses, alone)
        chex.assert_trees_all_close(by_pair(packed_losses, PACKED), expected, rtol=tolerance)
        assert all(array.dtype == dtype for array in jax.tree.leaves((expected, packed_gradients)))
        # Relative to the largest gradient: single ones may be 0 but for rounding.
        scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradients))
        chex.assert_trees_all_close(packed_gradients, gradients, rtol=0, atol=tolerance * scale)
