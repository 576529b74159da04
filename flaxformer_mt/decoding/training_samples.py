"""Translations that are sampled inside a training step, for objectives such as minimum risk."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching import search_programs as programs
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.search import search
from flaxformer_mt.decoding.search.state import unconstrained
from flaxformer_mt.decoding.sentence_decoder import longest_target
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.cache import reorder_cache


class Samples(NamedTuple):
    """n translations of each of B sentences, in the form of decoder inputs and targets."""

    tokens: Array
    """int32 [B, n, T], padded. The end token is the last one, unless the maximum length was
    reached."""
    input_tokens: Array
    """int32 [B, n, T], the tokens shifted right: the start token, then all tokens but the last."""
    weights: Array
    """float32 [B, n, T], 1 for tokens, 0 for padding; 0 for a row without a sentence, NaN for a
    packed row."""
    log_probabilities: Array
    """float32 [B, n], the model's, summed over the tokens; NaN for a packed row."""

    def rows(self, batch: Any) -> Any:
        """Returns `batch` with B * n rows: each source, once for each of its samples."""
        n = self.tokens.shape[1]
        source = {
            name: jnp.repeat(jnp.asarray(getattr(batch, name)), n, axis=0)
            for name in ("encoder_input_tokens", "encoder_segment_ids", "encoder_positions")
        }
        inputs, targets, weights = (
            each.reshape(-1, each.shape[-1])
            for each in (self.input_tokens, self.tokens, self.weights)
        )
        is_token = weights > 0
        positions = jnp.arange(inputs.shape[1], dtype=jnp.int32)
        return dataclasses.replace(
            batch,
            **source,
            decoder_input_tokens=inputs,
            decoder_target_tokens=targets,
            decoder_loss_weights=weights,
            decoder_segment_ids=is_token.astype(jnp.int32),
            decoder_positions=jnp.where(is_token, positions, 0),
        )


def sample(
    config: TransformerConfig,
    params: Any,
    source_batch: Any,
    key: Array,
    n: int,
    *,
    max_length: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    unpacked: bool = False,
) -> Samples:
    """Draws n translations of each sentence from the model, without dropout.

    A pure function that can be part of a jitted training step. Nothing is differentiated through
    the samples: an objective computes their log-probabilities again, from `input_tokens`, with
    gradients. Padding and the start token are never drawn.

    >>> source = jnp.array([[5, 6, 7, config.eos_id]])
    >>> samples = jax.jit(sample, static_argnums=(0, 4))(config, params, source, key, 8)
    >>> samples.tokens.shape
    (1, 8, 26)

    Args:
      config: the model, with its vocabulary sizes.
      params: its parameters.
      source_batch: int32 [B, S], one sentence per row with its end token, padded; or a batch with
        `encoder_input_tokens`.
      key: a key of `jax.random`. The samples are a function of it and the arguments above.
      n: number of translations per sentence.
      max_length: T; None = as in translation, 1.5 * the number of source tokens + 20. At most the
        size of the table of learned positions.
      temperature: divides the logits; `log_probabilities` are those of the model without it.
      top_k: see `DecodeConfig`.
      top_p: see `DecodeConfig`.
      unpacked: says that each row of a batch with segment ids has one sentence. The segment ids of
        a traced batch cannot be read.

    Returns:
      The samples of each sentence, the most probable first.

    Raises:
      UserError: a row is packed, or the batch may have packed rows (see `unpacked`); the model has
        no encoder; or an option is out of range.
    """
    if not config.has_inputs:
        raise UserError("model.has_inputs=False: a language model has no source sentences")
    tokens, segment_ids = _source(source_batch)
    is_packed = _is_packed(config, tokens, segment_ids)
    if not isinstance(is_packed, jax.core.Tracer):
        if is_packed.any():
            raise UserError(
                f"row {int(is_packed.argmax())} of the batch has several sentences: sample from "
                "rows that are not packed"
            )
    elif segment_ids is not None and not unpacked:
        raise UserError(
            "the batch has segment ids, so its rows may be packed: sample from rows with one "
            "sentence each, and say so with unpacked=True"
        )
    decode = DecodeConfig(
        sampling=True,
        n_best=n,
        length_penalty=0.0,
        max_length=max_length or 0,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    options = SearchOptions.from_config(decode, config)
    lengths = jnp.sum(tokens != config.pad_id, axis=1, dtype=jnp.int32)
    longest = max_length or longest_target(tokens.shape[1] - 1, decode)
    longest = min(longest, config.longest_sentence or longest)
    # The end token does not count, as in translation.
    limits = decode.max_length_factor * (lengths - 1).astype(jnp.float32)
    limits = limits.astype(jnp.int32) + decode.max_length_extra
    limits = jnp.full_like(limits, longest) if max_length else jnp.minimum(limits, longest)
    constraints = unconstrained(jnp.where(lengths > 0, limits, 0))._replace(
        keys=jax.random.bits(key, (len(tokens), 2), jnp.uint32)
    )
    params = jax.lax.stop_gradient(params)
    begun = programs.begin_search(
        (params,), tokens, constraints, options, configs=(config,), max_length=longest
    )
    step = programs.combine([programs.step_function(config, params, options)], decode.ensemble)
    found = search(step, programs.reorder_each(reorder_cache), options, begun)
    invalid = jnp.where(is_packed, jnp.nan, 0.0)
    is_token = jnp.arange(longest) < found.lengths[:, :, None]
    starts = jnp.full_like(found.tokens[..., :1], config.bos_id)
    return Samples(
        tokens=found.tokens,
        input_tokens=jnp.concatenate([starts, found.tokens[..., :-1]], axis=-1),
        weights=jnp.where(is_token, 1.0, 0.0) + invalid[:, None, None],
        log_probabilities=found.log_probabilities + invalid[:, None],
    )


def _source(batch: Any) -> tuple[Array, Array | None]:
    tokens = getattr(batch, "encoder_input_tokens", batch)
    segment_ids = getattr(batch, "encoder_segment_ids", None)
    if getattr(tokens, "ndim", None) != 2:
        raise TypeError("source_batch must be tokens [B, S], or a batch with encoder_input_tokens")
    return jnp.asarray(tokens), None if segment_ids is None else jnp.asarray(segment_ids)


def _is_packed(config: TransformerConfig, tokens: Array, segment_ids: Array | None) -> Array:
    """Whether each row, bool [B], has tokens after an end token, or a second segment."""
    is_end, is_token = tokens[:, :-1] == config.eos_id, tokens[:, 1:] != config.pad_id
    is_packed = (is_end & is_token).any(axis=1)
    return is_packed if segment_ids is None else is_packed | (segment_ids > 1).any(axis=1)
