"""The decoder: its layer, and the stack of them, for whole targets or one token at a time."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.attention import KeyValue, MultiHeadAttention
from flaxformer_mt.model.feed_forward import FeedForward
from flaxformer_mt.model.normalization import Norm, residual
from flaxformer_mt.model.numerics import Dropout
from flaxformer_mt.model.past import Past
from flaxformer_mt.model.recurrence import SSRU
from flaxformer_mt.model.stack import stack


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, feed-forward, each with residual and norm.

    Without inputs (`config.has_inputs`) there is no attention to the encoder. A recurrent unit can
    take the place of self-attention (`config.decoder_kind`).
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Makes the sub-layers."""
        c = self.config
        if c.decoder_kind == "ssru":
            self.recurrence = SSRU(c)
            self.recurrence_norm = Norm(c)
        else:
            self.self_attention = MultiHeadAttention(c)
            self.self_attention_norm = Norm(c)
        if c.has_inputs:
            self.cross_attention = MultiHeadAttention(c)
            self.cross_attention_norm = Norm(c)
        self.feed_forward = FeedForward(c)
        self.feed_forward_norm = Norm(c)
        self.dropout = Dropout(c.dropout_rate)

    def project_encoded(self, encoded: Array) -> tuple[Array, KeyValue]:
        """Cross-attention's keys and values of `encoded` [B, S, D], which is handed on."""
        return encoded, self.cross_attention.project(encoded)

    def __call__(
        self,
        x: Array,
        cross: KeyValue | None,
        self_mask: Array | None,
        cross_mask: Array | None,
        deterministic: bool,
        return_attention: bool,
    ) -> tuple[Array, tuple[Array, Array | None] | None]:
        """Maps [B, T, D] to [B, T, D].

        Args:
          x: [B, T, D].
          cross: keys [B, H, S, K] and values [B, H, S, U] of the encoder's output.
          self_mask: broadcastable to [B, H, T, T]; for a recurrent unit bool [B, T], where a
            sentence starts.
          cross_mask: broadcastable to [B, H, T, S].
          deterministic: no dropout.
          return_attention: also return weights of self- [B, H, T, T] (None of a recurrent unit)
            and cross-attention [B, H, T, S].
        """

        def look_back(y: Array) -> tuple[Array, Array | None]:
            if self.config.decoder_kind == "ssru":
                return self.recurrence(y, self_mask), None
            return self.self_attention(y, self.self_attention.project(y), self_mask, deterministic)

        x, self_weights = self._residual(x, look_back, self._look_back_norm(), deterministic)
        x, cross_weights = self._attend_and_transform(x, cross, cross_mask, deterministic)
        return x, (self_weights, cross_weights) if return_attention else None

    def step(
        self,
        x: Array,
        cross: KeyValue | None,
        past: Past | Array,
        positions: Array,
        visible: Array,
        cross_mask: Array | None,
    ) -> tuple[Array, Past | Array, Array | None]:
        """Maps one token of W hypotheses per sentence, given all earlier ones.

        Args:
          x: [B, W, D].
          cross: keys [B, H, S, K] and values [B, H, S, U], one for all hypotheses of a sentence.
          past: the memory of self-attention, or of a recurrent unit [B, W, D].
          positions: int32 [B], the place of each sentence's token, from 0.
          visible: [B, 1, W, P * W], which of all the sentence's keys a hypothesis attends to.
          cross_mask: [B, 1, 1, S].

        Returns:
          [B, W, D], `past` with these tokens in it, and the cross-attention weights [B, H, W, S].
        """

        def look_back(y: Array) -> tuple[Array, Past | Array]:
            if not isinstance(past, Past):
                return self.recurrence.step(y, past, positions)
            now = past.append(self.self_attention.project(y), positions)
            return self.self_attention(y, now.joined(), visible, True)[0], now

        x, now = self._residual(x, look_back, self._look_back_norm(), True)
        # Hypotheses stand in the time axis: all of them attend to the same source.
        x, cross_weights = self._attend_and_transform(x, cross, cross_mask, True)
        return x, now, cross_weights

    def _look_back_norm(self) -> Norm:
        is_recurrent = self.config.decoder_kind == "ssru"
        return self.recurrence_norm if is_recurrent else self.self_attention_norm

    def _attend_and_transform(
        self, x: Array, cross: KeyValue | None, cross_mask: Array | None, deterministic: bool
    ) -> tuple[Array, Array | None]:
        """What follows self-attention; also returns the cross-attention weights."""
        weights = None
        if cross is not None:

            def attend_to_encoded(y: Array) -> tuple[Array, Array]:
                return self.cross_attention(y, cross, cross_mask, deterministic)

            x, weights = self._residual(
                x, attend_to_encoded, self.cross_attention_norm, deterministic
            )

        def transform(y: Array) -> tuple[Array, None]:
            return self.feed_forward(y, deterministic), None

        x, _ = self._residual(x, transform, self.feed_forward_norm, deterministic)
        return x, weights

    def _residual(self, x, sublayer, norm, deterministic):
        def dropout(y: Array) -> Array:
            return self.dropout(y, deterministic=deterministic)

        return residual(x, sublayer, norm, dropout, self.config.norm_position)


class Decoder(nn.Module):
    """`num_decoder_layers` layers between an optional norm below and an optional norm on top."""

    config: TransformerConfig

    def setup(self) -> None:
        """Makes the layers and norms."""
        c = self.config
        if c.embedding_norm:
            self.embedding_norm = Norm(c)
        same = nn.broadcast
        self.layers = stack(
            DecoderLayer,
            c,
            c.num_decoder_layers,
            {
                "__call__": (0, same, same, same, same),
                "project_encoded": (),
            },
        )
        if c.final_norm:
            self.final_norm = Norm(c)

    def project_encoded(self, encoded: Array) -> KeyValue:
        """Every layer's cross-attention keys [L, B, H, S, K] and values of `encoded` [B, S, D]."""
        return self.layers.project_encoded(encoded)[1]

    def __call__(
        self,
        x: Array,
        encoded: Array | None,
        self_mask: Array | None = None,
        cross_mask: Array | None = None,
        *,
        deterministic: bool = True,
        return_attention: bool = False,
    ) -> tuple[Array, Array | None, Array | None]:
        """Decodes whole targets.

        Args:
          x: [B, T, D] embedded decoder inputs.
          encoded: [B, S, D], or None without inputs.
          self_mask: bool, broadcastable to [B, H, T, T], True = attend; for recurrent units
            [B, T], where a sentence starts.
          cross_mask: bool, broadcastable to [B, H, T, S].
          deterministic: no dropout.
          return_attention: return the weights of every layer.

        Returns:
          [B, T, D]; self-attention weights [L, B, H, T, T] (None of recurrent units) and
          cross-attention weights [L, B, H, T, S], or None.
        """
        cross = None if encoded is None else self.project_encoded(encoded)
        x, weights = self.layers(
            self._below(x), cross, self_mask, cross_mask, deterministic, return_attention
        )
        self_weights, cross_weights = weights if return_attention else (None, None)
        return self._above(x), self_weights, cross_weights

    def step(
        self,
        x: Array,
        cross: Sequence[KeyValue | None],
        past: Sequence[Past | Array],
        positions: Array,
        visible: Array,
        cross_mask: Array | None,
    ) -> tuple[Array, tuple[Past | Array, ...], Array | None]:
        """`DecoderLayer.step` for every layer, each with its own `cross` and `past`.

        The layers are not a loop here: a loop would copy every layer's past at every token. Nor
        are their parameters cut out of the stacked ones at every token, because that does not
        depend on the token, and XLA moves it out of the loop over tokens.
        """
        x = self._below(x)
        stacked = self.layers.variables["params"]
        layer = DecoderLayer(self.config, parent=None)

        @jax.jit  # So that it is traced for one layer only.
        def step(params: Any, *inputs: Any) -> Any:
            return layer.apply({"params": params}, *inputs, method="step")

        now = []
        cross_weights = None
        for index, (layer_cross, layer_past) in enumerate(zip(cross, past, strict=True)):
            params = jax.tree.map(lambda leaf, index=index: leaf[index], stacked)
            x, layer_now, cross_weights = step(
                params, x, layer_cross, layer_past, positions, visible, cross_mask
            )
            now.append(layer_now)
        return self._above(x), tuple(now), cross_weights

    def _below(self, x: Array) -> Array:
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def _above(self, x: Array) -> Array:
        return self.final_norm(x) if self.config.final_norm else x
