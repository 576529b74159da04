"""One full pass over finished pairs: how probable each target token is, and what it attends to."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching.length_buckets import fill_rows, plan_buckets
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import ZERO_VECTOR, Transformer


class TeacherForcingResult(NamedTuple):
    """What the model thinks of one pair."""

    log_probabilities: list[float]
    """Of each of the T target tokens, given the source and the tokens before it."""
    attention: np.ndarray | None
    """[T, S], the cross-attention with which each target token was chosen; None if not asked for.
    """


def teacher_force(
    params: Any,
    model: TransformerConfig,
    decode: DecodeConfig,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    attention: bool = False,
    first: int = 1,
) -> list[TeacherForcingResult]:
    """Decodes targets that are given instead of searched for.

    What is found for a pair depends on that pair alone, not on the others.

    Args:
      params: of `model`.
      model: which Transformer, with its vocabulary sizes.
      decode: `batch_tokens`; `renormalize`, which makes the probabilities those of a search that
        never chooses padding or the start token; `alignment_layer` and `alignment_head`.
      sources: token ids, the end token included.
      targets: as many, each of at least one token.
      attention: also give the attention of that layer and head.
      first: number of the first pair, for messages.

    Returns:
      One result a pair, in the order given.

    Raises:
      UserError: the model has no such layer or head, or a sentence is longer than its table of
        positions.
    """
    check_alignment_options(model, decode)
    inputs = [[model.bos_id, *tokens[:-1]] for tokens in targets]
    # A pair is as long as the longer of its sides, so that shapes stay few.
    lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
    results: dict[int, TeacherForcingResult] = {}
    for bucket in plan_buckets(lengths, decode.batch_tokens, model, first):
        log_probabilities, weights = full_pass(
            params,
            fill_rows(sources, bucket, model.pad_id),
            fill_rows(inputs, bucket, model.pad_id),
            fill_rows(targets, bucket, model.pad_id),
            model=model,
            excluded=never_chosen(model) if decode.renormalize else (),
            attention=(decode.alignment_layer, decode.alignment_head) if attention else None,
        )
        rows = log_probabilities.tolist()
        matrices = None if weights is None else np.asarray(weights)
        for row, index in enumerate(bucket.indices):
            num_target, num_source = len(targets[index]), len(sources[index])
            results[index] = TeacherForcingResult(
                rows[row][:num_target],
                None if matrices is None else matrices[row, :num_target, :num_source],
            )
    return [results[index] for index in range(len(targets))]


def never_chosen(model: TransformerConfig) -> tuple[int, ...]:
    """Tokens that no search may choose: padding and the start token, if they are not the end."""
    return tuple(sorted({model.pad_id, model.bos_id} - {model.eos_id, ZERO_VECTOR}))


def check_alignment_options(model: TransformerConfig, decode: DecodeConfig) -> None:
    """Refuses a layer or head that the decoder does not have."""
    layers, heads = model.num_decoder_layers, model.num_heads
    if not -layers <= decode.alignment_layer < layers:
        raise UserError(
            f"decode.alignment_layer={decode.alignment_layer}: the decoder has {layers} layers, "
            "counted from 0, or from the last as -1"
        )
    if not -1 <= decode.alignment_head < heads:
        raise UserError(
            f"decode.alignment_head={decode.alignment_head}: the decoder has {heads} heads, "
            "counted from 0; -1 is the mean of all"
        )


@functools.partial(jax.jit, static_argnames=("model", "excluded", "attention"))
def full_pass(
    params: Any,
    source_tokens: Array,
    input_tokens: Array,
    target_tokens: Array,
    *,
    model: TransformerConfig,
    excluded: tuple[int, ...] = (),
    attention: tuple[int, int] | None = None,
) -> tuple[Array, Array | None]:
    """Log-probability of each target token, given the source and the target before it.

    Args:
      params: of `model`.
      source_tokens: int32 [B, S], with end token, padded.
      input_tokens: int32 [B, T], the targets shifted right by the start token.
      target_tokens: int32 [B, T], with end token, padded.
      model: which Transformer.
      excluded: tokens that have no part in the sum of probabilities.
      attention: decoder layer and head whose cross-attention is wanted; head -1 is the mean of all.

    Returns:
      float32 (or float64, where the model computes in it) [B, T]; and [B, T, S] if asked for. Both
      are meaningless at padding.
    """
    result: Any = Transformer(model).apply(
        {"params": params}, source_tokens, input_tokens, return_attention=attention is not None
    )
    logits = result if attention is None else result[0]
    chosen = jnp.take_along_axis(logits, target_tokens[..., None], axis=-1)[..., 0]
    if excluded:
        logits = logits.at[..., jnp.array(excluded)].set(-jnp.inf)
    log_probabilities = chosen - jax.nn.logsumexp(logits, axis=-1)
    if attention is None:
        return log_probabilities, None
    layer, head = attention
    weights = result[1].decoder_cross[layer]
    return log_probabilities, weights.mean(axis=1) if head == -1 else weights[:, head]
