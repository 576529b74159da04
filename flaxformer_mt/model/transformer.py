"""The encoder-decoder Transformer: tokens in, logits out."""

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array, lax

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import masks
from flaxformer_mt.model.attention import KeyValue
from flaxformer_mt.model.cache import Cache, KeyValueCache, LayerState, RecurrentState
from flaxformer_mt.model.layers import Decoder, Encoder
from flaxformer_mt.model.linear import dense, embedding_init
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.lookup import look_up
from flaxformer_mt.model.numerics import Dropout, at_least_float32, soft_cap
from flaxformer_mt.model.positions import POSITION_KINDS, attention_positions

ZERO_VECTOR = -1
"""Token id that embeds to the zero vector, with which some models start decoding."""


@struct.dataclass
class AttentionWeights:
    """The attention weights of all layers, before dropout; None if absent or not asked for."""

    encoder_self: Array | None  # [L, B, H, S, S]
    decoder_self: Array | None  # [L, B, H, T, T]
    decoder_cross: Array | None  # [L, B, H, T, S]


class OutputFactors(NamedTuple):
    """The factors of the output projection.

    Logits are scale * (vectors @ table.T + bias), with `soft_cap` if `cap` is not 0.

    They allow the chunked cross-entropy to compute the logits in chunks.
    """

    vectors: Array  # [B, T, D], the decoder's output
    table: Array  # [V, D]
    bias: Array | None  # [V]
    scale: float
    cap: float = 0.0


class Embedding(nn.Module):
    """A [V, D] table of token vectors, which can also serve as output projection."""

    config: TransformerConfig
    vocab_size: int

    def setup(self) -> None:
        c = self.config
        shape = (self.vocab_size, c.d_model)
        self.embedding = self.param("embedding", embedding_init(c), shape, jnp.dtype(c.param_dtype))

    def __call__(self, tokens: Array) -> Array:
        c = self.config
        known = jnp.where(tokens == ZERO_VECTOR, 0, tokens)
        vectors = look_up(self.embedding, known, jnp.dtype(c.dtype))
        if c.bos_id == c.pad_id and not c.train_pad_embedding:
            # Padding is masked, except where it starts decoding: there the published code
            # (PyTorch's `padding_idx`) does not train its vector through the lookup.
            padding = (tokens == c.pad_id)[..., None]
            vectors = jnp.where(padding, lax.stop_gradient(vectors), vectors)
        zero = tokens == ZERO_VECTOR
        if c.zero_pad_embeddings:
            zero |= tokens == c.pad_id
        vectors = jnp.where(zero[..., None], 0, vectors)
        if c.scale_embeddings:
            vectors = vectors * c.d_model**0.5
        return constrain(vectors, "batch", "length", "embed")

    def attend(self, x: Array) -> Array:
        table = self.embedding.astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=at_least_float32(x.dtype))


class OutputBias(nn.Module):
    """The bias [V] of logits whose matrix is the target embedding."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        shape, dtype = (c.target_vocab_size,), jnp.dtype(c.param_dtype)
        self.bias = self.param("bias", nn.initializers.zeros, shape, dtype)

    def effective_bias(self) -> Array:
        return self.bias

    def __call__(self, logits: Array) -> Array:
        return logits + self.effective_bias().astype(logits.dtype)


def require_segment_ids(side: str, segment_ids: Array | None, positions: Array | None) -> None:
    """Raises UserError for positions without segment ids: packed rows need both."""
    if positions is not None and segment_ids is None:
        raise UserError(
            f"{side}_positions without {side}_segment_ids: give both for packed rows, or neither; "
            "rows of one padded sentence have segment id 1, and 0 in padding"
        )


def _columns(length: int, positions: Array | None) -> Array:
    return jnp.arange(length, dtype=jnp.int32)[None] if positions is None else positions


class Transformer(nn.Module):
    """The model of "Attention Is All You Need", with the switches of its published variants.

    `presets.py` names the variants. The model does not shift targets: `data/` makes the
    decoder inputs.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        encoding = POSITION_KINDS[c.position_kind].encoding
        self.embedding_dropout = Dropout(c.embedding_dropout)
        if c.has_inputs:
            if not c.shares_source_and_target:
                self.source_embedding = Embedding(c, c.source_vocab_size)
            self.source_positions = encoding(c) if encoding else None
            self.encoder = Encoder(c)
        if not c.has_targets:
            return
        self.target_embedding = Embedding(c, c.target_vocab_size)
        self.target_positions = encoding(c) if encoding else None
        self.decoder = Decoder(c)
        if not c.shares_target_and_output:
            self.output: Any = dense(c, "output", c.d_model, c.target_vocab_size, c.output_bias)
        elif c.output_bias:
            self.output = OutputBias(c)

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
        return_attention: bool | Literal["cross"] = False,
        project: bool = True,
    ) -> Array | OutputFactors | tuple[Array | OutputFactors, AttentionWeights]:
        """Computes the logits of every next target token.

        Args:
          encoder_input_tokens: int32 [B, S]; None without inputs.
          decoder_input_tokens: int32 [B, T], the targets shifted right.
          encoder_segment_ids: int32 [B, S], number of a token's sentence in its packed row, 0 for
            padding. Without them a row is one sentence and padding is where the token is `pad_id`.
          decoder_segment_ids: int32 [B, T], the same for the target.
          encoder_positions: int32 [B, S], position of a token in its sentence; by default its
            column.
          decoder_positions: int32 [B, T], the same for the target.
          deterministic: no dropout; otherwise `rngs={"dropout": key}` is needed.
          return_attention: also return the attention of every layer; "cross" = only that from
            target to source. Attention that is returned is computed by einsum, not by a kernel.
          project: False returns the factors of the output projection instead of the logits.

        Returns:
          [B, T, V] in float32, or float64 if that is the compute dtype; and the attention, if
          requested.

        Raises:
          ValueError: only one side has segment ids, or a side is longer than its learned positions.
          UserError: the model is an encoder alone (`encode`), or no kernel can do what
            `attention_backend` or `norm_backend` require.
        """
        c = self.config
        if not c.has_targets:
            raise UserError(
                "model.has_targets=False: an encoder alone has no logits; call its `encode`"
            )
        if c.has_inputs and (encoder_segment_ids is None) != (decoder_segment_ids is None):
            raise ValueError("segment ids are needed for both encoder and decoder, or for neither")

        encoded, encoder_self, cross_visibility = None, None, None
        if c.has_inputs:
            encoded, encoder_self = self._encode(
                encoder_input_tokens,
                encoder_segment_ids,
                encoder_positions,
                deterministic,
                return_attention is True,
            )
            cross_visibility = masks.visibility(
                decoder_input_tokens,
                cast(Array, encoder_input_tokens),
                decoder_segment_ids,
                encoder_segment_ids,
                pad_id=c.pad_id,
            )

        self_mask: masks.Mask
        if c.decoder_kind == "ssru":
            segments = decoder_segment_ids
            self_mask = None if segments is None else masks.sentence_starts(segments)
        else:
            self_mask = masks.visibility(
                decoder_input_tokens,
                decoder_input_tokens,
                decoder_segment_ids,
                decoder_segment_ids,
                pad_id=c.pad_id,
                causal=True,
                # The start is never hidden.
                hide_padding=c.mask_target_padding and c.bos_id != c.pad_id,
            )
        length = decoder_input_tokens.shape[1]
        positions = _columns(length, decoder_positions)
        x = self._embed_target(decoder_input_tokens, positions, deterministic, length)
        x, decoder_self, decoder_cross = self.decoder(
            x,
            encoded,
            self_mask,
            cross_visibility,
            attention_positions(c, positions, positions, length),
            deterministic=deterministic,
            return_attention=return_attention,
        )
        outputs = self._logits(x) if project else self._output_factors(x)
        if return_attention:
            return outputs, AttentionWeights(encoder_self, decoder_self, decoder_cross)
        return outputs

    def encode(
        self,
        encoder_input_tokens: Array,
        *,
        encoder_segment_ids: Array | None = None,
        encoder_positions: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Encodes source tokens, int32 [B, S], to [B, S, D] in the compute dtype."""
        require_segment_ids("encoder", encoder_segment_ids, encoder_positions)
        return self._encode(
            encoder_input_tokens, encoder_segment_ids, encoder_positions, deterministic
        )[0]

    def init_cache(
        self,
        encoded: Array | None,
        encoder_input_tokens: Array | None,
        beam_size: int,
        max_length: int,
        batch_size: int | None = None,
    ) -> Cache:
        """Creates the decoding cache of empty targets.

        Args:
          encoded: [B, S, D] from `encode`; None without inputs.
          encoder_input_tokens: int32 [B, S]; padding is where the token is `pad_id`.
          beam_size: W, hypotheses per sentence.
          max_length: P, the capacity in target tokens.
          batch_size: B, needed only without inputs.
        """
        c = self.config
        layers = range(c.num_decoder_layers)
        cross: tuple[KeyValue | None, ...] = tuple(None for _ in layers)
        cross_mask = None
        if encoded is not None and encoder_input_tokens is not None:
            stacked = self.decoder.project_encoded(encoded)
            cross = tuple(KeyValue(stacked.key[layer], stacked.value[layer]) for layer in layers)
            cross_mask = masks.padding_mask(encoder_input_tokens, c.pad_id)
            batch_size = encoded.shape[0]
        if batch_size is None:
            raise ValueError("without inputs, init_cache needs batch_size")
        dtype = jnp.dtype(c.dtype)
        state: LayerState
        if c.decoder_kind == "ssru":
            shape: tuple[int, ...] = (batch_size, beam_size, c.d_model)
            state = RecurrentState(jnp.zeros(shape, at_least_float32(dtype)))
        else:
            shape = (batch_size, c.kv_heads, max_length, beam_size, c.key_width)
            state = KeyValueCache.empty(shape, c.value_width, dtype)
        ancestry = jnp.zeros((batch_size, beam_size, max_length), jnp.int32)
        return Cache(tuple(state for _ in layers), cross, cross_mask, ancestry)

    def decode_step(
        self, tokens: Array, cache: Cache, positions: Array, *, return_attention: bool = False
    ) -> tuple[Array, Cache] | tuple[Array, Cache, Array]:
        """Computes the logits after `tokens`, which equal those of the whole pass.

        A cache of one hypothesis per sentence (W = 1) takes N tokens in one step, int32 [B, N], for
        example to verify the tokens that a smaller model proposes. To take tokens back, give the
        next call an earlier position: later entries of the cache are not read, and are written
        over. The state of a recurrent decoder cannot go back; keep the earlier cache.

        Args:
          tokens: int32 [B, N * W], N tokens of each of W hypotheses; mostly N = 1, the last token
            of each. With several, all first tokens come first, then all second ones.
          cache: of the tokens at all earlier positions.
          positions: int32 [B]: the position of each sentence's first token in the target. That of
            the last token has to be below P.
          return_attention: also return the cross-attention of the last layer.

        Returns:
          [B, N * W, V] in at least float32, and the cache with these tokens added; and the mean
          over heads of the last layer's cross-attention weights [B, N * W, S], if requested.
        """
        beams, length = cache.ancestry.shape[1:]
        number = tokens.shape[1] // beams
        hypotheses = jnp.arange(beams, dtype=jnp.int32)[:, None]
        slots = jnp.arange(length, dtype=jnp.int32)
        first, last = positions[:, None, None], positions[:, None, None] + (number - 1)
        is_new = (slots >= first) & (slots <= last)  # [B, 1, P]
        ancestry = jnp.where(is_new, hypotheses, cache.ancestry)
        # The hypotheses of a sentence have the same length.
        queries = positions[:, None] + jnp.arange(number, dtype=jnp.int32)  # [B, N]
        queries = jnp.repeat(queries, beams, axis=1) if number > 1 else queries
        keys = jnp.broadcast_to(slots[:, None], (length, beams)).reshape(1, -1)  # [1, P * W]
        x, layers, attention = self.decoder.step(
            self._embed_target(tokens, queries, True, length),
            cache.cross,
            cache.layers,
            positions,
            masks.ancestor_mask(ancestry, positions, number),
            cache.cross_mask,
            attention_positions(self.config, queries, keys, length),
        )
        cache = dataclasses.replace(cache, layers=layers, ancestry=ancestry)
        logits = self._logits(x)
        if not return_attention:
            return logits, cache
        if attention is None:
            raise ValueError("without inputs there is no cross-attention")
        return logits, cache, attention.mean(axis=1)

    def _encode(self, tokens, segment_ids, positions, deterministic, return_attention=False):
        c, length = self.config, tokens.shape[1]
        x = (self.target_embedding if c.shares_source_and_target else self.source_embedding)(tokens)
        positions = _columns(length, positions)
        return self.encoder(
            self._with_positions(x, self.source_positions, positions, deterministic, length),
            masks.visibility(tokens, tokens, segment_ids, segment_ids, pad_id=c.pad_id),
            attention_positions(c, positions, positions, length),
            deterministic=deterministic,
            return_attention=return_attention,
        )

    def _embed_target(self, tokens, *options):
        return self._with_positions(self.target_embedding(tokens), self.target_positions, *options)

    def _with_positions(self, x, encoding, positions, deterministic, length):
        if encoding is not None:
            x = x + encoding(positions, length)
        return self.embedding_dropout(x, deterministic=deterministic)

    def _logits(self, x: Array) -> Array:
        c = self.config
        if c.shares_target_and_output:
            logits = self.target_embedding.attend(x)
            if c.output_bias:
                logits = self.output(logits)
        else:
            logits = self.output(x).astype(at_least_float32(x.dtype))
        logits = logits * c.d_model**-0.5 if c.scale_logits else logits
        return constrain(soft_cap(logits, c.logit_cap), "batch", "length", "vocabulary")

    def _output_factors(self, x: Array) -> OutputFactors:
        c = self.config
        tied = c.shares_target_and_output
        table = self.target_embedding.embedding if tied else self.output.effective_kernel().T
        bias = self.output.effective_bias() if c.output_bias else None
        scale = c.d_model**-0.5 if c.scale_logits else 1.0
        return OutputFactors(x, table, bias, scale, c.logit_cap)
