"""The decoder: its layer and its stack, for whole targets or one token per call."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.attention import KeyValue, attention_class
from flaxformer_mt.model.cache import KeyValueCache, LayerState, RecurrentState
from flaxformer_mt.model.feed_forward import FeedForward
from flaxformer_mt.model.kernels.products import Biased
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.masks import Visibility
from flaxformer_mt.model.normalization import Norm, NormOutputs, residual
from flaxformer_mt.model.numerics import Dropout
from flaxformer_mt.model.positions import (
    AttentionPositions,
    attention_bias,
    position_bias,
    query_key_transform,
    with_shared_bias,
)
from flaxformer_mt.model.recurrence import SSRU
from flaxformer_mt.model.stack import layer_variables, stack


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, feed-forward, each with residual and norm.

    Without inputs (`config.has_inputs`) there is no attention to the encoder. A recurrent unit can
    replace self-attention (`config.decoder_kind`).
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Creates the parameters."""
        c = self.config
        if c.decoder_kind == "ssru":
            self.recurrence = SSRU(c)
            self.recurrence_norm = Norm(c)
        else:
            self.self_attention = attention_class(c)(c)
            self.self_attention_norm = Norm(c)
            self.position_bias = position_bias(c, bidirectional=False, shared=False)
        if c.has_inputs:
            self.cross_attention = attention_class(c)(c)
            self.cross_attention_norm = Norm(c)
        self.feed_forward = FeedForward(c)
        self.feed_forward_norm = Norm(c)
        self.dropout = Dropout(c.dropout_rate)

    def project_encoded(self, encoded: Array) -> tuple[Array, KeyValue]:
        """Returns `encoded` [B, S, D], and the keys and values that cross-attention makes of it."""
        return encoded, self.cross_attention.project(encoded)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"] | None,
        self_mask: Visibility | Array | None,
        cross_mask: Visibility | Array | None,
        positions: AttentionPositions | None,
        deterministic: bool,
        return_attention: bool | Literal["cross"],
    ) -> tuple[Float[Array, "B T D"], tuple[Array | None, Array | None] | None]:
        """Applies the layer to whole targets; arguments as in `Decoder.__call__`.

        Also returns the weights of self- [B, H, T, T] (None for a recurrent unit) and
        cross-attention [B, H, T, S], if requested.
        """

        def recur(y: Array, _: bool) -> tuple[Array, None]:
            return self.recurrence(y, cast(Array | None, self_mask)), None

        def attend(y: Array, add_bias: bool) -> tuple[Array | Biased, Array | None]:
            transform = query_key_transform(self.config, positions)
            bias = attention_bias(positions, self.position_bias)
            return self.self_attention(
                y, y, self_mask, deterministic, bias, transform, return_attention is True, add_bias
            )

        self_weights: Array | None
        if self.config.decoder_kind == "ssru":
            x, self_weights = self._residual(x, recur, self.recurrence_norm, deterministic)
        else:
            x, self_weights = self._residual(x, attend, self.self_attention_norm, deterministic)
        x, cross_weights = self._after_self_attention(
            x, encoded, cross_mask, deterministic, bool(return_attention)
        )
        if return_attention == "cross":
            self_weights = None
        return x, (self_weights, cross_weights) if return_attention else None

    def step(
        self,
        x: Float[Array, "B W D"],
        cross: KeyValue | None,
        state: LayerState,
        token_positions: Int[Array, "B"],
        visible: Bool[Array, "B 1 W PW"],
        cross_mask: Bool[Array, "B 1 1 S"] | None,
        positions: AttentionPositions | None,
    ) -> tuple[Float[Array, "B W D"], LayerState, Float[Array, "B H W S"] | None]:
        """Maps one token of W hypotheses per sentence; arguments as in `Decoder.step`.

        The hypotheses of a sentence share the keys and values of cross-attention. Also returns the
        state including these tokens, and the cross-attention weights [B, H, W, S].
        """

        def recur(y: Array, _: bool) -> tuple[Array, RecurrentState]:
            y, memory = self.recurrence.step(y, cast(RecurrentState, state).memory, token_positions)
            return y, RecurrentState(memory)

        def attend(y: Array, _: bool) -> tuple[Array | Biased, KeyValueCache]:
            transform = query_key_transform(self.config, positions)
            bias = attention_bias(positions, self.position_bias)
            new = self.self_attention.project(y, transform)
            cache = cast(KeyValueCache, state).append(new, token_positions)
            attended = cache.joined()
            return self.self_attention(y, attended, visible, True, bias, transform)[0], cache

        if self.config.decoder_kind == "ssru":
            x, state = self._residual(x, recur, self.recurrence_norm, True)
        else:
            x, state = self._residual(x, attend, self.self_attention_norm, True)
        # Hypotheses are on the time axis: all of them attend to the same source.
        x, cross_weights = self._after_self_attention(x, cross, cross_mask, True, True)
        return x, state, cross_weights

    def _after_self_attention(
        self,
        x: Array | NormOutputs,
        attended: Array | KeyValue | None,
        cross_mask: Visibility | Array | None,
        deterministic: bool,
        return_attention: bool,
    ) -> tuple[Array, Array | None]:
        weights = None
        if attended is not None:

            def attend_to_encoded(y: Array, add_bias: bool) -> tuple[Array | Biased, Array | None]:
                return self.cross_attention(
                    y,
                    attended,
                    cross_mask,
                    deterministic,
                    return_weights=return_attention,
                    add_bias=add_bias,
                )

            x, weights = self._residual(
                x, attend_to_encoded, self.cross_attention_norm, deterministic
            )

        def feed_forward(y: Array, add_bias: bool) -> tuple[Array | Biased, None]:
            return self.feed_forward(y, deterministic, add_bias), None

        x, _ = self._residual(x, feed_forward, self.feed_forward_norm, deterministic, is_last=True)
        return constrain(x, "batch", "length", "embed"), weights

    def _residual(self, x, sublayer, norm, deterministic, is_last=False):
        return residual(x, sublayer, norm, self.dropout, deterministic, is_last)


class Decoder(nn.Module):
    """A stack of `num_decoder_layers` layers, with an optional norm below and one on top."""

    config: TransformerConfig

    def setup(self) -> None:
        """Creates the parameters."""
        c = self.config
        if c.embedding_norm:
            self.embedding_norm = Norm(c)
        self.position_bias = position_bias(c, bidirectional=False, shared=True)
        same = nn.broadcast
        self.layers = stack(
            DecoderLayer,
            c,
            c.num_decoder_layers,
            {
                "__call__": (same, same, same, same, same, same),
                "project_encoded": (),
            },
        )
        if c.final_norm:
            self.final_norm = Norm(c)

    def project_encoded(self, encoded: Array) -> KeyValue:
        """Computes the keys [L, B, H, S, K] and values of `encoded` [B, S, D] for every layer."""
        keys_and_values: KeyValue = self.layers.project_encoded(encoded)[1]
        return keys_and_values

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"] | None,
        self_mask: Visibility | Array | None = None,
        cross_mask: Visibility | Array | None = None,
        positions: AttentionPositions | None = None,
        *,
        deterministic: bool = True,
        return_attention: bool | Literal["cross"] = False,
    ) -> tuple[
        Float[Array, "B T D"],
        Float[Array, "L B H T T"] | None,
        Float[Array, "L B H T S"] | None,
    ]:
        """Decodes whole targets.

        Args:
          x: embedded decoder inputs.
          encoded: the encoder's output; None without inputs.
          self_mask: which keys are visible; or bool, broadcastable to [B, H, T, T], True = attend;
            for recurrent units [B, T], True where a sentence starts.
          cross_mask: which keys are visible; or bool, broadcastable to [B, H, T, S].
          positions: from `attention_positions`; None if the position kind does not need them.
          deterministic: no dropout.
          return_attention: return the weights of every layer; "cross" = of cross-attention only.

        Returns:
          The outputs, and the weights of self-attention (None for recurrent units) and
          cross-attention, if requested.
        """
        positions = with_shared_bias(positions, self.position_bias)
        x, weights = self.layers(
            self._below(x),
            encoded,
            self_mask,
            cross_mask,
            positions,
            deterministic,
            return_attention,
        )
        self_weights, cross_weights = weights if return_attention else (None, None)
        return self._above(x), self_weights, cross_weights

    def step(
        self,
        x: Float[Array, "B W D"],
        cross: Sequence[KeyValue | None],
        states: Sequence[LayerState],
        token_positions: Int[Array, "B"],
        visible: Bool[Array, "B 1 W PW"],
        cross_mask: Bool[Array, "B 1 1 S"] | None,
        positions: AttentionPositions | None,
    ) -> tuple[Float[Array, "B W D"], tuple[LayerState, ...], Float[Array, "B H W S"] | None]:
        """Runs `DecoderLayer.step` of every layer, each with its own `cross` and state.

        The layers are unrolled, because a loop would copy the cache of every layer at every token.
        Slicing the stacked parameters costs nothing per token: it does not depend on the token, and
        XLA moves it out of the loop over tokens.

        Args:
          x: the embedded tokens.
          cross: per layer, keys [B, G, S, K] and values [B, G, S, U]; None without inputs.
          states: per layer, the key/value cache, or the state of the recurrent unit.
          token_positions: the position of each sentence's tokens, from 0.
          visible: the cached tokens that each hypothesis attends to.
          cross_mask: True = attend; None without inputs.
          positions: of the tokens [B, 1] and of the cached keys [1, P * W]; None if attention does
            not use them.

        Returns:
          The outputs in the compute dtype; the states including these tokens; the last layer's
          cross-attention weights, or None without inputs.
        """
        x = self._below(x)
        positions = with_shared_bias(positions, self.position_bias)
        layer = DecoderLayer(self.config, parent=None)

        @jax.jit  # The layers share one trace.
        def step(variables: Any, *inputs: Any) -> Any:
            return layer.apply(variables, *inputs, method="step")

        new_states = []
        cross_weights = None
        all_variables = layer_variables(self.layers, len(states))
        for variables, layer_cross, state in zip(all_variables, cross, states, strict=True):
            x, state, cross_weights = step(
                variables,
                x,
                layer_cross,
                state,
                token_positions,
                visible,
                cross_mask,
                positions,
            )
            new_states.append(state)
        return self._above(x), tuple(new_states), cross_weights

    def _below(self, x: Array) -> Array:
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def _above(self, x: Array) -> Array:
        x = self.final_norm(x) if self.config.final_norm else x
        return constrain(x, "batch", "length", "embed")
