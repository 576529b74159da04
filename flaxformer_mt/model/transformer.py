"""The encoder-decoder Transformer: tokens in, logits out."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array, lax

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.attention import KeyValue
from flaxformer_mt.model.decoder import Decoder
from flaxformer_mt.model.encoder import Encoder
from flaxformer_mt.model.masks import (
    ancestor_mask,
    causal_mask,
    padding_mask,
    segment_mask,
    sentence_starts,
)
from flaxformer_mt.model.numerics import Dropout, at_least_float32, dense, embedding_init
from flaxformer_mt.model.past import Past, resize
from flaxformer_mt.model.positions import PositionEncoding

ZERO_VECTOR = -1
"""The token that embeds to the zero vector: how some models start decoding."""


@struct.dataclass
class AttentionWeights:
    """Every layer's attention, before dropout; None where the model has no such attention."""

    encoder_self: Array | None
    """[L, B, H, S, S]"""
    decoder_self: Array | None
    """[L, B, H, T, T]"""
    decoder_cross: Array | None
    """[L, B, H, T, S]"""


@struct.dataclass
class Cache:
    """All that decoding one more token needs to know of source and target so far.

    A sentence has W hypotheses. What each has written stays where it is, however often they go on
    from one another: only `ancestry` follows them, and the memory of recurrent units.
    """

    past: tuple[Past | Array, ...]
    """Of each layer, keys and values of the target, where P is the longest that fits; or its
    recurrent unit's memory [B, W, D]."""
    cross: tuple[KeyValue | None, ...]
    """Of each layer, keys [B, H, S, K] and values [B, H, S, U] of the source; None without inputs.
    """
    cross_mask: Array | None
    """[B, 1, 1, S], True = attend."""
    ancestry: Array
    """int32 [B, W, P], by which hypothesis each token of hypothesis w was written."""


def reorder_cache(cache: Cache, parents: Array) -> Cache:
    """Lets each hypothesis continue another one of its sentence.

    Args:
      cache: what the old hypotheses have seen.
      parents: int32 [B, W]; new hypothesis w of sentence b continues old hypothesis parents[b, w].
    """

    def gather(array: Array) -> Array:
        return jnp.take_along_axis(array, parents[:, :, None], axis=1)

    past = tuple(p if isinstance(p, Past) else gather(p) for p in cache.past)
    return dataclasses.replace(cache, past=past, ancestry=gather(cache.ancestry))


def insert_rows(cache: Cache, new: Cache, rows: Array) -> Cache:
    """Gives rows of the cache to new sentences, which have no target yet.

    Args:
      cache: of B sentences.
      new: of R sentences, as `Transformer.init_cache` makes it, of the same S, W and P.
      rows: int32 [R], where they go; a number that is not below B leaves the sentence out.
    """

    def replace(old: Array, inserted: Array) -> Array:
        return old.at[rows].set(inserted, mode="drop")

    # Of its row's past, a sentence reads nothing that it has not written itself.
    cross, cross_mask = jax.tree.map(
        replace, (cache.cross, cache.cross_mask), (new.cross, new.cross_mask)
    )
    return dataclasses.replace(cache, cross=cross, cross_mask=cross_mask)


def resize_cache(cache: Cache, max_length: int) -> Cache:
    """The same cache, with room for targets of `max_length` tokens; those that it has must fit."""
    past = tuple(p.resized(max_length) if isinstance(p, Past) else p for p in cache.past)
    return dataclasses.replace(cache, past=past, ancestry=resize(cache.ancestry, max_length, 2))


class Unprojected(NamedTuple):
    """What logits are made of: scale * (vectors @ table.T + bias).

    A loss that is given the factors need never hold all logits at a time.
    """

    vectors: Array
    """[B, T, D], the decoder's output."""
    table: Array
    """[V, D]."""
    bias: Array | None
    """[V]."""
    scale: float


class Embedding(nn.Module):
    """A [V, D] table of token vectors, which can also serve as output projection."""

    config: TransformerConfig
    vocab_size: int

    def setup(self) -> None:
        """Makes the table."""
        c = self.config
        shape = (self.vocab_size, c.d_model)
        self.embedding = self.param("embedding", embedding_init(c), shape, jnp.dtype(c.param_dtype))

    def __call__(self, tokens: Array) -> Array:
        """Looks up tokens [B, T] and gives [B, T, D]; ids that are no token give NaN."""
        c = self.config
        table = self.embedding.astype(jnp.dtype(c.dtype))
        vectors = jnp.take(table, jnp.where(tokens == ZERO_VECTOR, 0, tokens), axis=0)
        if c.bos_id == c.pad_id:
            # Elsewhere padding is masked. Where it starts decoding, the published code (PyTorch's
            # `padding_idx`) does not train its vector by looking it up.
            padding = (tokens == c.pad_id)[..., None]
            vectors = jnp.where(padding, lax.stop_gradient(vectors), vectors)
        zero = tokens == ZERO_VECTOR
        if c.zero_pad_embeddings:
            zero |= tokens == c.pad_id
        vectors = jnp.where(zero[..., None], 0, vectors)
        return vectors * c.d_model**0.5 if c.scale_embeddings else vectors

    def attend(self, x: Array) -> Array:
        """Products of vectors [B, T, D] with every token's vector: [B, T, V], float32 at least."""
        table = self.embedding.astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=at_least_float32(x.dtype))


class Bias(nn.Module):
    """The bias of logits whose matrix is the target embedding."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, logits: Array) -> Array:
        """Adds the bias [V] to [B, T, V]."""
        dtype = jnp.dtype(self.config.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, logits.shape[-1:], dtype)
        return logits + bias.astype(logits.dtype)


def _columns(tokens: Array, positions: Array | None) -> Array:
    """The given positions, or else each token's column: int32 [B, T]."""
    if positions is not None:
        return positions
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


class Transformer(nn.Module):
    """The model of "Attention Is All You Need", with the switches of its published variants.

    `presets.py` names the variants. The model never shifts targets: decoder inputs come from the
    data room.
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Makes embeddings, stacks and output projection."""
        c = self.config
        self.target_embedding = Embedding(c, c.target_vocab_size)
        if c.has_inputs:
            if not c.shares_source_and_target:
                self.source_embedding = Embedding(c, c.source_vocab_size)
            self.encoder = Encoder(c)
        self.decoder = Decoder(c)
        if c.position_kind != "none":
            self.source_positions = PositionEncoding(c)
            self.target_positions = PositionEncoding(c)
        self.embedding_dropout = Dropout(c.embedding_dropout)
        if not c.shares_target_and_output:
            self.output: Any = dense(c, c.d_model, c.target_vocab_size, c.output_bias)
        elif c.output_bias:
            self.output = Bias(c)

    def __call__(
        self,
        encoder_input_tokens: Array | None,
        decoder_input_tokens: Array,
        *,
        encoder_segment_ids: Array | None = None,
        decoder_segment_ids: Array | None = None,
        encoder_positions: Array | None = None,
        decoder_positions: Array | None = None,
        deterministic: bool = True,
        return_attention: bool = False,
        project: bool = True,
    ) -> Array | Unprojected | tuple[Array, AttentionWeights]:
        """Logits of every next target token.

        Args:
          encoder_input_tokens: int32 [B, S]; None without inputs.
          decoder_input_tokens: int32 [B, T], the targets shifted right.
          encoder_segment_ids: int32 [B, S], number of a token's sentence in its packed row, 0 for
            padding. Without them a row is one sentence and padding is where the token is `pad_id`.
          decoder_segment_ids: int32 [B, T], the same for the target.
          encoder_positions: int32 [B, S], place of a token in its sentence; by default its column.
          decoder_positions: int32 [B, T], the same for the target.
          deterministic: no dropout; otherwise `rngs={"dropout": key}` is needed.
          return_attention: also return every layer's attention.
          project: False returns what the logits are made of.

        Returns:
          [B, T, V] in float32, or float64 where that is the compute dtype; and the attention, if
          asked for.
        """
        c = self.config
        if c.has_inputs and (encoder_segment_ids is None) != (decoder_segment_ids is None):
            raise ValueError("segment ids are needed for both encoder and decoder, or for neither")

        encoded, encoder_self, cross_mask = None, None, None
        if c.has_inputs:
            encoded, encoder_self = self._encode(
                encoder_input_tokens,
                encoder_segment_ids,
                encoder_positions,
                deterministic=deterministic,
                return_attention=return_attention,
            )
            cross_mask = self._key_mask(
                encoder_input_tokens, decoder_segment_ids, encoder_segment_ids
            )

        self_mask: Array | None = causal_mask(decoder_input_tokens.shape[1])
        if c.decoder_kind == "ssru":
            segments = decoder_segment_ids
            self_mask = None if segments is None else sentence_starts(segments)
        elif c.mask_target_padding or decoder_segment_ids is not None:
            key_mask = self._key_mask(
                decoder_input_tokens, decoder_segment_ids, decoder_segment_ids
            )
            self_mask = self_mask & key_mask
        x = self._embed_target(decoder_input_tokens, decoder_positions, deterministic)
        x, decoder_self, decoder_cross = self.decoder(
            x,
            encoded,
            self_mask,
            cross_mask,
            deterministic=deterministic,
            return_attention=return_attention,
        )
        if not project:
            return self._unprojected(x)
        logits = self._logits(x)
        if return_attention:
            return logits, AttentionWeights(encoder_self, decoder_self, decoder_cross)
        return logits

    def encode(
        self,
        encoder_input_tokens: Array,
        *,
        encoder_segment_ids: Array | None = None,
        encoder_positions: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """The encoder's output [B, S, D] for source tokens [B, S]; arguments as in `__call__`."""
        return self._encode(
            encoder_input_tokens,
            encoder_segment_ids,
            encoder_positions,
            deterministic=deterministic,
            return_attention=False,
        )[0]

    def init_cache(
        self,
        encoded: Array | None,
        encoder_input_tokens: Array | None,
        beam_size: int,
        max_length: int,
        batch_size: int | None = None,
    ) -> Cache:
        """The cache before the first target token.

        Args:
          encoded: [B, S, D] from `encode`; None without inputs.
          encoder_input_tokens: [B, S]; padding is where the token is `pad_id`.
          beam_size: W, hypotheses per sentence.
          max_length: P, target tokens that will fit.
          batch_size: B, needed only without inputs.
        """
        c = self.config
        layers = range(c.num_decoder_layers)
        cross: tuple[KeyValue | None, ...] = tuple(None for _ in layers)
        cross_mask = None
        if encoded is not None and encoder_input_tokens is not None:
            stacked = self.decoder.project_encoded(encoded)
            cross = tuple(KeyValue(stacked.key[layer], stacked.value[layer]) for layer in layers)
            cross_mask = padding_mask(encoder_input_tokens, c.pad_id)
            batch_size = encoded.shape[0]
        if batch_size is None:
            raise ValueError("without inputs, init_cache needs batch_size")
        dtype = jnp.dtype(c.dtype)
        past: tuple[Past | Array, ...]
        if c.decoder_kind == "ssru":
            memory = jnp.zeros((batch_size, beam_size, c.d_model), at_least_float32(dtype))
            past = tuple(memory for _ in layers)
        else:
            shape = (batch_size, c.num_heads, max_length, beam_size, c.key_width)
            past = tuple(Past.empty(shape, c.value_width, dtype) for _ in layers)
        ancestry = jnp.zeros((batch_size, beam_size, max_length), jnp.int32)
        return Cache(past, cross, cross_mask, ancestry)

    def decode_step(
        self, tokens: Array, cache: Cache, positions: Array, *, return_attention: bool = False
    ) -> tuple[Array, Cache] | tuple[Array, Cache, Array]:
        """Logits of the token after `tokens`; equals that position of the full pass.

        Args:
          tokens: int32 [B, W], the last token of each hypothesis.
          cache: filled at all earlier positions.
          positions: int32 [B], below P: where each sentence's tokens stand in the target, from 0.
          return_attention: also return the cross-attention of the last layer.

        Returns:
          [B, W, V], and the cache with these tokens added; and the mean over heads of the last
          layer's cross-attention weights [B, W, S], if asked for.
        """
        beams, length = cache.ancestry.shape[1:]
        own = jnp.arange(beams, dtype=jnp.int32)[:, None]
        now = jnp.arange(length, dtype=jnp.int32) == positions[:, None, None]  # [B, 1, P]
        ancestry = jnp.where(now, own, cache.ancestry)
        x = self._embed_target(
            tokens, jnp.broadcast_to(positions[:, None], tokens.shape), True, length
        )
        x, past, attention = self.decoder.step(
            x,
            cache.cross,
            cache.past,
            positions,
            ancestor_mask(ancestry, positions),
            cache.cross_mask,
        )
        cache = dataclasses.replace(cache, past=past, ancestry=ancestry)
        logits = self._logits(x)
        if not return_attention:
            return logits, cache
        if attention is None:
            raise ValueError("without inputs there is no cross-attention")
        return logits, cache, attention.mean(axis=1)

    def _key_mask(self, tokens, query_segments, key_segments):
        """Who may attend to the keys `tokens` [B, K]: by segment if given, else all but padding."""
        if key_segments is None:
            return padding_mask(tokens, self.config.pad_id)
        return segment_mask(query_segments, key_segments)

    def _encode(self, tokens, segment_ids, positions, *, deterministic, return_attention):
        """What `Encoder` returns for source tokens [B, S]."""
        shared = self.config.shares_source_and_target
        x = (self.target_embedding if shared else self.source_embedding)(tokens)
        if self.config.position_kind != "none":
            x = x + self.source_positions(_columns(tokens, positions), tokens.shape[1])
        x = self.embedding_dropout(x, deterministic=deterministic)
        mask = self._key_mask(tokens, segment_ids, segment_ids)
        return self.encoder(x, mask, deterministic=deterministic, return_attention=return_attention)

    def _embed_target(self, tokens, positions, deterministic, length=None):
        """What goes into `Decoder` [B, T, D] for tokens [B, T] at positions below `length`."""
        x = self.target_embedding(tokens)
        if self.config.position_kind != "none":
            x = x + self.target_positions(_columns(tokens, positions), length or tokens.shape[1])
        return self.embedding_dropout(x, deterministic=deterministic)

    def _logits(self, x: Array) -> Array:
        """[B, T, D] to [B, T, V]."""
        c = self.config
        if c.shares_target_and_output:
            logits = self.target_embedding.attend(x)
            if c.output_bias:
                logits = self.output(logits)
        else:
            logits = self.output(x).astype(at_least_float32(x.dtype))
        return logits * c.d_model**-0.5 if c.scale_logits else logits

    def _unprojected(self, x: Array) -> Unprojected:
        """The factors of `_logits` for the decoder's output [B, T, D]."""
        c = self.config
        if c.shares_target_and_output:
            table = self.target_embedding.embedding
        else:
            table = self.output.get_variable("params", "kernel").T
        bias = self.output.get_variable("params", "bias") if c.output_bias else None
        return Unprojected(x, table, bias, c.d_model**-0.5 if c.scale_logits else 1.0)
