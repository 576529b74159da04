"""Guided alignment: cross-attention learns given links between source and target tokens.

Source: Chen et al. 2016, "Guided Alignment Training for Topic-Aware Neural Machine Translation";
Marian's `--guided-alignment` with the cost "ce".
"""

import dataclasses

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.functional import apply_to_batch, as_module
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.model.stack import LOSSES
from flaxformer_mt.objectives.chunked import CrossEntropyOptions
from flaxformer_mt.objectives.cross_entropy import (
    Params,
    Sums,
    sums_of_factors,
    with_losses_of_layers,
)
from flaxformer_mt.objectives.losses import Convention


def guided_alignment(
    model: TransformerConfig | nn.Module,
    params: Params,
    batch: Batch,
    key: Array | None = None,
    *,
    weight: float,
    layer: int = -1,
    smoothing: float = 0.0,
    convention: Convention = "uniform",
    z_loss: float = 0.0,
) -> Sums:
    r"""Computes the cross-entropy plus `weight` times the alignment loss of each linked token.

    .. math:: -\frac{1}{|L_t|} \sum_{s \in L_t} \log \frac{1}{H} \sum_h a_{hts}

    L_t are the source tokens to which the target token t is linked, and a the weights of H heads of
    cross-attention in the same pass, before their dropout. The sum over the linked tokens is added
    to that of the cross-entropy, and both are divided by the number of all target tokens.

    Args:
      model: as for `cross_entropy`; so are `params`, `key`, `smoothing` and `convention`.
      params: the parameters.
      batch: B rows with `Batch.alignment`.
      key: of dropout.
      weight: the factor of the alignment loss.
      layer: the decoder layer whose attention is trained, from 0; negative counts from the last.
      smoothing: of the labels.
      convention: of smoothing.
      z_loss: as for `cross_entropy`.

    Returns:
      The sums of `cross_entropy`, and the metric "alignment": the alignment loss per linked token.

    Raises:
      UserError: the batch has no links.
    """
    if batch.alignment is None:
        raise UserError(
            "the batch has no links (Batch.alignment): give read_pairs a file of them as "
            "alignments, or use cross_entropy"
        )
    module = as_module(model)
    (factors, attention), collections = apply_to_batch(
        module, params, batch, key, project=False, return_attention="cross", mutable=[LOSSES]
    )
    options = CrossEntropyOptions(smoothing, convention, module.config.pad_id, z_loss=z_loss)
    sums = sums_of_factors(module.config, batch, factors, options, rows=batch)
    sums = with_losses_of_layers(sums, collections)
    loss, linked = alignment_loss(attention.decoder_cross[layer], batch)
    metrics = {**sums.metrics, "alignment": (loss, linked)}
    return dataclasses.replace(sums, loss=sums.loss + weight * loss, metrics=metrics)


def alignment_loss(attention: Array, batch: Batch) -> tuple[Array, Array]:
    """Sums the alignment loss of `guided_alignment` over the linked target tokens of a batch.

    `attention` has the weights [B, H, T, S] of a layer.

    Returns:
      The sum, and the number of linked tokens, both weighted by `decoder_loss_weights`; in float32,
      or float64 if the attention is.
    """
    mean = jnp.mean(attention, axis=1, dtype=at_least_float32(attention.dtype))
    links = jnp.asarray(batch.alignment, mean.dtype)
    weights = jnp.asarray(batch.decoder_loss_weights, mean.dtype)
    # Weights that underflow to 0 have no gradient.
    logarithms = jnp.log(jnp.maximum(mean, jnp.finfo(mean.dtype).tiny))
    losses = -jnp.sum(jnp.where(links > 0, links * logarithms, 0), axis=-1)
    is_linked = jnp.any(links > 0, axis=-1)
    return jnp.sum(losses * weights), jnp.sum(jnp.where(is_linked, weights, 0))
