"""How much arithmetic the equations of the model ask for: the numerator of MFU.

Counted are the products of matrices, forward and backward, for the tokens of sentences. Padding,
masked positions and what a program computes twice are not counted.
Keys outside a window (`model.attention_window`) are counted, because they are computed.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.batches import Batch


class Work(NamedTuple):
    """Numbers of tokens, and of pairs of a token and one that it attends to."""

    sources: Any  # the sum of s over the sentences
    targets: Any  # the sum of t
    source_pairs: Any  # self-attention of the encoder: the sum of s * s
    target_pairs: Any  # self-attention of the decoder: the sum of t * (t + 1) / 2
    cross_pairs: Any  # cross-attention: the sum of t * s


def work_of_sentences(sources: np.ndarray, targets: np.ndarray) -> Work:
    """Returns the work of sentences with these lengths, each [sentences]."""
    s, t = np.asarray(sources, np.float64), np.asarray(targets, np.float64)
    return Work(s.sum(), t.sum(), (s * s).sum(), (t * (t + 1) / 2).sum(), (s * t).sum())


def work_of_batch(batch: Batch) -> Work:
    """Returns the work of the sentences of a batch, float32 scalars."""

    def total(values: Array) -> Array:
        return jnp.sum(values, dtype=jnp.float32)

    target_ids, target_positions = map(
        jnp.asarray, (batch.decoder_segment_ids, batch.decoder_positions)
    )
    is_target = target_ids > 0
    targets = total(is_target)
    target_pairs = total(jnp.where(is_target, target_positions + 1, 0))
    if batch.encoder_segment_ids is None:
        zero = jnp.float32(0)
        return Work(zero, targets, zero, target_pairs, zero)
    source_ids, source_positions = map(
        jnp.asarray, (batch.encoder_segment_ids, batch.encoder_positions)
    )
    is_source = source_ids > 0
    # Position p adds the pairs of p and all earlier ones, in both directions, and of p and p.
    source_pairs = total(jnp.where(is_source, 2 * source_positions + 1, 0))
    meets = is_target[:, :, None] & (target_ids[:, :, None] == source_ids[:, None, :])
    return Work(total(is_source), targets, source_pairs, target_pairs, total(meets))


def training_flops(model: TransformerConfig, work: Work) -> Any:
    """Returns multiplications and additions of one forward and backward pass.

    The backward pass has two products for each of the forward pass: one for the gradient of its
    input, one for that of its parameters.
    """
    width = model.d_model
    head = model.key_width + model.value_width
    pair = model.num_heads * head  # Scores and context.
    own, other = width * pair, width * model.kv_heads * head  # query, output; key, value
    feed_forward = (2 + model.feed_forward_gate) * width * model.d_ff
    encoder_layer = work.sources * (own + other + feed_forward)
    encoder_layer += work.source_pairs * pair
    decoder_layer = work.targets * feed_forward
    if model.decoder_kind == "ssru":
        decoder_layer += work.targets * 2 * width * width
    else:
        decoder_layer += work.targets * (own + other) + work.target_pairs * pair
    if model.has_inputs:
        decoder_layer += work.targets * own + work.sources * other
        decoder_layer += work.cross_pairs * pair
    decoder = model.num_decoder_layers * decoder_layer
    decoder += work.targets * width * model.target_vocab_size
    encoder = model.num_encoder_layers * encoder_layer
    products = (decoder if model.has_targets else 0) + (encoder if model.has_inputs else 0)
    return 3 * 2 * products
