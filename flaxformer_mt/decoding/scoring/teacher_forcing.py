"""Teacher forcing: what a model predicts after each prefix of given targets, in one full pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching.length_buckets import fill_rows, plan_buckets
from flaxformer_mt.decoding.batching.workers import batch_tokens
from flaxformer_mt.decoding.parameters import on_one_device
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.errors import UserError
from flaxformer_mt.memory_limits import explained_exhaustion
from flaxformer_mt.model.transformer import Transformer


class TeacherForcingResult(NamedTuple):
    """The log-probabilities, and optionally the attention, of one sentence pair."""

    log_probabilities: list[float]
    """Of each of the T target tokens, given the source and the preceding tokens."""
    attention: np.ndarray | None
    """[T, S], the cross-attention of the step that predicts each target token; None if not
    requested."""


def teacher_force(
    params: Any,
    model: TransformerConfig,
    decode: DecodeConfig,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    attention: bool = False,
    numbers: Sequence[int] | None = None,
) -> list[TeacherForcingResult]:
    """Computes the log-probabilities of given targets.

    The result for a pair depends on that pair alone, not on the others.

    Args:
      params: of the model.
      model: with its vocabulary sizes.
      decode: `batch_tokens`; `renormalize`, which makes the probabilities those of a search that
        never chooses padding or the start token; `alignment_layer` and `alignment_head`.
      sources: token ids, the end token included.
      targets: token ids of as many targets, at least one each.
      attention: whether to return the attention of that layer and head.
      numbers: of the pairs, for error messages; None = from 1.

    Raises:
      UserError: the model has no such layer or head, a sentence is longer than its position table,
        or the device has too little memory.
    """
    check_alignment_options(model, decode)
    program = functools.partial(
        target_log_probabilities,
        params,
        model=model,
        excluded=forbidden_token_ids(model, decode) if decode.renormalize else (),
        attention=(decode.alignment_layer, decode.alignment_head) if attention else None,
    )
    with explained_exhaustion("scoring", "shorten the longest lines"):
        found = _in_batches(program, model, decode, sources, targets, numbers)
    return [
        TeacherForcingResult(
            log_probabilities[: len(target)].tolist(),
            None if weights is None else weights[: len(target), : len(source)],
        )
        for (log_probabilities, weights), source, target in zip(
            found, sources, targets, strict=True
        )
    ]


def predict_tokens(
    params: Any,
    model: TransformerConfig,
    decode: DecodeConfig,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Predicts each target token from the source and the preceding target tokens.

    Arguments and errors are those of `teacher_force`.
    """

    def program(source_tokens: np.ndarray, input_tokens: np.ndarray, _: np.ndarray) -> Array:
        return most_probable_tokens(params, source_tokens, input_tokens, model=model)

    found = _in_batches(program, model, decode, sources, targets)
    return [row[: len(target)].tolist() for row, target in zip(found, targets, strict=True)]


def _in_batches(
    program: Callable[..., Any],
    model: TransformerConfig,
    decode: DecodeConfig,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    numbers: Sequence[int] | None = None,
) -> list[Any]:
    """Returns the rows of each pair in the arrays that a program computes.

    Its arguments are source tokens [B, S], and the decoder's input and target tokens [B, T].
    """
    inputs = [[model.bos_id, *tokens[:-1]] for tokens in targets]
    # Both sides get the length of the longer one, which limits the number of shapes.
    lengths = [max(map(len, pair)) for pair in zip(sources, targets, strict=True)]
    tokens = batch_tokens(decode, jax.default_backend())
    found: dict[int, Any] = {}
    for bucket in plan_buckets(lengths, tokens, model, numbers):
        padded = (fill_rows(side, bucket, model.pad_id) for side in (sources, inputs, targets))
        arrays = jax.device_get(on_one_device(program(*padded)))
        for row, index in enumerate(bucket.indices):
            found[index] = jax.tree.map(lambda array, row=row: array[row], arrays)
    return [found[index] for index in range(len(targets))]


def check_alignment_options(model: TransformerConfig, decode: DecodeConfig) -> None:
    """Raises UserError if the decoder does not have the alignment layer and head."""
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
def target_log_probabilities(
    params: Any,
    source_tokens: Array,
    input_tokens: Array,
    target_tokens: Array,
    *,
    model: TransformerConfig,
    excluded: tuple[int, ...] = (),
    attention: tuple[int, int] | None = None,
) -> tuple[Array, Array | None]:
    """Computes the log-probability of each target token, given the source and preceding tokens.

    Source tokens are int32 [B, S], input and target tokens [B, T]; the sum of probabilities leaves
    out the `excluded` tokens.

    Returns:
      The log-probabilities, in at least float32 [B, T], and the cross-attention [B, T, S] of a
      decoder layer and head, if requested; head -1 is the mean of all. Meaningless at padding.
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


@functools.partial(jax.jit, static_argnames="model")
def most_probable_tokens(
    params: Any, source_tokens: Array, input_tokens: Array, *, model: TransformerConfig
) -> Array:
    """Computes the most probable token at each target position, int32 [B, T]."""
    logits: Any = Transformer(model).apply({"params": params}, source_tokens, input_tokens)
    return logits.argmax(axis=-1)
