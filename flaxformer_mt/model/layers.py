"""The encoder and the decoder: their layers and stacks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.model import DENSE
from flaxformer_mt.model.attention import ATTENTION, KeyValue
from flaxformer_mt.model.cache import KeyValueCache, LayerState, RecurrentState
from flaxformer_mt.model.kernels.products import Biased, Shared
from flaxformer_mt.model.linear import dense, to_residual
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.masks import Mask, Visibility
from flaxformer_mt.model.normalization import Norm, NormOutputs, residual
from flaxformer_mt.model.numerics import Dropout, at_least_float32
from flaxformer_mt.model.positions import (
    AttentionPositions,
    bias_and_transform,
    of_stack,
    position_bias,
    within,
)
from flaxformer_mt.model.recurrence import SSRU
from flaxformer_mt.model.registry import Class, Registry
from flaxformer_mt.model.stack import LOSSES, layer_variables, stack

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    r"""Two linear maps with an activation between them, the same at every position.

    .. math:: a(x W_1 + b_1) W_2 + b_2,\quad
        \text{with a gate}\ (a(x W_1 + b_1) \odot (x V + c)) W_2 + b_2

    Source: Vaswani et al. 2017, equation 2 (with a = ReLU); Shazeer 2020, equation 6.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.hidden = dense(c, "feed_forward", c.d_model, c.d_ff, c.feed_forward_bias)
        if c.feed_forward_gate:
            self.gate = dense(c, "feed_forward", c.d_model, c.d_ff, c.feed_forward_bias)
        self.output = dense(c, "feed_forward", c.d_ff, c.d_model, c.feed_forward_bias)
        self.dropout = Dropout(c.activation_dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        deterministic: bool,
        add_bias: bool = True,
        is_token: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"] | Biased:
        """Maps each position by itself; custom networks (`register_feed_forward`) override this.

        Args:
          x: the inputs; in decoding, T = W hypotheses of one token each.
          deterministic: no dropout.
          add_bias: False leaves the bias of the output to be added: a `Biased` is returned. A
            network that has none returns an array all the same.
          is_token: False in padding; None = all are tokens.
        """
        shared = Shared.of(x, self.config.d_ff)
        hidden = constrain(self.hidden(shared), "batch", "length", "hidden")
        hidden = ACTIVATIONS[self.config.activation](hidden)
        if self.config.feed_forward_gate:
            hidden = hidden * constrain(self.gate(shared), "batch", "length", "hidden")
        hidden = self.dropout(hidden, deterministic)
        return to_residual(self.output, hidden, add_bias)

    def add_loss(self, name: str, value: Array) -> None:
        """Adds a loss to the objective, such as one that balances the load of experts.

        `value` is a sum over the tokens of the call, times a weight: like all losses, it is divided
        by the number of target tokens in the whole batch. `cross_entropy` reports the sum over all
        layers as the metric `name`.
        """
        value = value.astype(at_least_float32(value.dtype))
        self.sow(LOSSES, name, value, init_fn=lambda: jnp.zeros_like(value), reduce_fn=jnp.add)


FEED_FORWARD = Registry("feed_forward_kind", "register_feed_forward", DENSE, FeedForward)


def register_feed_forward(name: str) -> Callable[[Class], Class]:
    """Decorator that registers a custom feed-forward network as a value of `feed_forward_kind`.

        @register_feed_forward("wide")
        class Wide(FeedForward):
            factor: float = 2.0

            def __call__(self, x, deterministic, add_bias=True, is_token=None):
                return super().__call__(self.factor * x, deterministic, add_bias, is_token)

    Fields of the class are options, `feed_forward_kind="wide(factor=3.0)"`; see
    `register_attention`. `examples/mixture_of_experts.py` has a router with a loss of its own.

    Raises:
      TypeError: the name is not a string, or the class is not a subclass of `FeedForward`.
      UserError: the name is that of the built-in network.
    """
    return FEED_FORWARD.register(name)


class _Layer(nn.Module):
    config: TransformerConfig

    def _create_norms(self, sublayer: str) -> None:
        names = ["norm", *["output_norm"] * (self.config.norm_position == "both")]
        for name in names:
            setattr(self, f"{sublayer}_{name}", Norm(self.config))

    def _create_self_attention(self, *, bidirectional: bool) -> None:
        c = self.config
        self.self_attention = ATTENTION.of(c.attention_kind)(c)
        self._create_norms("self_attention")
        self.position_bias = position_bias(c, bidirectional=bidirectional, shared=False)

    def _create_feed_forward(self) -> None:
        self.feed_forward = FEED_FORWARD.of(self.config.feed_forward_kind)(self.config)
        self._create_norms("feed_forward")
        self.dropout = Dropout(self.config.dropout_rate)

    def _attend_to_itself(
        self,
        x: Array,
        mask: Mask,
        positions: AttentionPositions | None,
        is_local: Array | None,
        deterministic: bool,
        return_attention: bool,
    ) -> tuple[Array | NormOutputs, Array | None]:
        mask = within(mask, positions, is_local)

        def attend(y: Array, add_bias: bool) -> tuple[Array | Biased, Array | None]:
            bias, transform = bias_and_transform(self.config, positions, self.position_bias)
            return self.self_attention(
                y, y, mask, deterministic, bias, transform, return_attention, add_bias
            )

        return self._residual(x, attend, "self_attention", deterministic)

    def _feed_forward(self, x: Array | NormOutputs, mask: Mask, deterministic: bool) -> Array:
        is_token = mask.is_token if isinstance(mask, Visibility) else None

        def feed_forward(y: Array, add_bias: bool) -> tuple[Array | Biased, None]:
            return self.feed_forward(y, deterministic, add_bias, is_token), None

        y, _ = self._residual(x, feed_forward, "feed_forward", deterministic, is_last=True)
        return constrain(y, "batch", "length", "embed")

    def _residual(self, x, sublayer, name, deterministic, is_last=False):
        norms = getattr(self, f"{name}_norm"), getattr(self, f"{name}_output_norm", None)
        return residual(x, sublayer, *norms, self.dropout, deterministic, is_last)


class EncoderLayer(_Layer):
    """Self-attention, then feed-forward, each with residual and norm."""

    def setup(self) -> None:
        self._create_self_attention(bidirectional=True)
        self._create_feed_forward()

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Mask,
        positions: AttentionPositions | None,
        is_local: Bool[Array, ""] | None,
        deterministic: bool,
        return_attention: bool,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B H S S"] | None]:
        y, weights = self._attend_to_itself(
            x, mask, positions, is_local, deterministic, return_attention
        )
        return self._feed_forward(y, mask, deterministic), weights if return_attention else None


class DecoderLayer(_Layer):
    """Self-attention, attention to the encoder, feed-forward, each with residual and norm.

    Without inputs (`config.has_inputs`) there is no attention to the encoder. A recurrent unit can
    replace self-attention (`config.decoder_kind`).
    """

    def setup(self) -> None:
        c = self.config
        if c.decoder_kind == "ssru":
            self.recurrence = SSRU(c)
            self._create_norms("recurrence")
        else:
            self._create_self_attention(bidirectional=False)
        if c.has_inputs:
            self.cross_attention = ATTENTION.of(c.attention_kind)(c)
            self._create_norms("cross_attention")
        self._create_feed_forward()

    def project_encoded(self, encoded: Array) -> tuple[Array, KeyValue]:
        return encoded, self.cross_attention.project(encoded)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"] | None,
        self_mask: Mask,
        cross_mask: Mask,
        positions: AttentionPositions | None,
        is_local: Bool[Array, ""] | None,
        deterministic: bool,
        return_attention: bool | Literal["cross"],
    ) -> tuple[Float[Array, "B T D"], tuple[Array | None, Array | None] | None]:
        """Applies the layer to whole targets.

        Also returns the weights of self- [B, H, T, T] (None for a recurrent unit) and
        cross-attention [B, H, T, S], if requested.
        """

        def recur(y: Array, _: bool) -> tuple[Array, None]:
            return self.recurrence(y, cast(Array | None, self_mask)), None

        y: Array | NormOutputs
        self_weights: Array | None
        if self.config.decoder_kind == "ssru":
            y, self_weights = self._residual(x, recur, "recurrence", deterministic)
        else:
            y, self_weights = self._attend_to_itself(
                x, self_mask, positions, is_local, deterministic, return_attention is True
            )
        x, cross_weights = self._after_self_attention(
            y, encoded, self_mask, cross_mask, deterministic, bool(return_attention)
        )
        if return_attention == "cross":
            self_weights = None
        return x, (self_weights, cross_weights) if return_attention else None

    def step(
        self,
        x: Float[Array, "B NW D"],
        cross: KeyValue | None,
        state: LayerState,
        token_positions: Int[Array, "B"],
        visible: Bool[Array, "B 1 NW PW"],
        cross_mask: Bool[Array, "B 1 1 S"] | None,
        positions: AttentionPositions | None,
        is_local: Bool[Array, ""] | None,
    ) -> tuple[Float[Array, "B NW D"], LayerState, Float[Array, "B H NW S"] | None]:
        """Maps N tokens of W hypotheses per sentence, which share the keys of cross-attention."""

        def recur(y: Array, _: bool) -> tuple[Array, RecurrentState]:
            y, memory = self.recurrence.step(y, cast(RecurrentState, state).memory, token_positions)
            return y, RecurrentState(memory)

        def attend(y: Array, _: bool) -> tuple[Array | Biased, KeyValueCache]:
            bias, transform = bias_and_transform(self.config, positions, self.position_bias)
            new = self.self_attention.project(y, transform)
            cache = cast(KeyValueCache, state).append(new, token_positions)
            mask = within(visible, positions, is_local)
            attended = cache.joined()
            return self.self_attention(y, attended, mask, True, bias, transform)[0], cache

        if self.config.decoder_kind == "ssru":
            x, state = self._residual(x, recur, "recurrence", True)
        else:
            x, state = self._residual(x, attend, "self_attention", True)
        # Hypotheses are on the time axis: all of them attend to the same source.
        x, cross_weights = self._after_self_attention(x, cross, None, cross_mask, True, True)
        return x, state, cross_weights

    def _after_self_attention(
        self,
        x: Array | NormOutputs,
        attended: Array | KeyValue | None,
        self_mask: Mask,
        cross_mask: Mask,
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

            x, weights = self._residual(x, attend_to_encoded, "cross_attention", deterministic)

        # The mask of a recurrent unit does not tell tokens from padding.
        mask = self_mask if isinstance(self_mask, Visibility) else cross_mask
        return self._feed_forward(x, mask, deterministic), weights


class _Stack(nn.Module):
    """Layers with an optional bias and norm below, and a norm on top."""

    config: TransformerConfig

    bidirectional = True

    def _create(self, layer: type[nn.Module], num_layers: int, methods: dict[str, Any]) -> None:
        c = self.config
        if c.embedding_bias:
            dtype = jnp.dtype(c.param_dtype)
            self.bias = self.param("bias", nn.initializers.zeros, (c.d_model,), dtype)
        if c.embedding_norm:
            self.embedding_norm = Norm(c)
        self.position_bias = position_bias(c, bidirectional=self.bidirectional, shared=True)
        self.layers = stack(layer, c, num_layers, methods)
        self.num_layers = num_layers
        if c.final_norm:
            self.final_norm = Norm(c)

    def _below(self, x: Array) -> Array:
        x = x + self.bias.astype(x.dtype) if self.config.embedding_bias else x
        return self.embedding_norm(x) if self.config.embedding_norm else x

    def _of_stack(
        self, positions: AttentionPositions | None
    ) -> tuple[AttentionPositions | None, Array | None]:
        """Returns the inputs of all layers, and for each layer whether it has a window, [L]."""
        window = self.config.attention_window
        found = of_stack(positions, self.position_bias, window, bidirectional=self.bidirectional)
        return found, jnp.arange(self.num_layers) % 2 == 0 if window else None

    def _above(self, x: Array) -> Array:
        x = self.final_norm(x) if self.config.final_norm else x
        return constrain(x, "batch", "length", "embed")


class Encoder(_Stack):
    """A stack of `num_encoder_layers` layers."""

    def setup(self) -> None:
        methods = {"__call__": (nn.broadcast, nn.broadcast, 0, nn.broadcast, nn.broadcast)}
        self._create(EncoderLayer, self.config.num_encoder_layers, methods)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Mask = None,
        positions: AttentionPositions | None = None,
        *,
        deterministic: bool = True,
        return_attention: bool = False,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "L B H S S"] | None]:
        """Encodes embedded tokens; also returns the attention of all layers, if requested."""
        x = self._below(x)
        positions, is_local = self._of_stack(positions)
        x, weights = self.layers(x, mask, positions, is_local, deterministic, return_attention)
        return self._above(x), weights


class Decoder(_Stack):
    """A stack of `num_decoder_layers` layers, for whole targets or few tokens per call."""

    bidirectional = False

    def setup(self) -> None:
        axes = (*(nn.broadcast,) * 4, 0, nn.broadcast, nn.broadcast)
        methods = {"__call__": axes, "project_encoded": ()}
        self._create(DecoderLayer, self.config.num_decoder_layers, methods)

    def project_encoded(self, encoded: Array) -> KeyValue:
        return self.layers.project_encoded(encoded)[1]  # [L, B, G, S, K]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"] | None,
        self_mask: Mask = None,
        cross_mask: Mask = None,
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

        The mask of recurrent units is [B, T], True where a sentence starts. `return_attention`
        gives the weights of every layer; "cross", those of cross-attention only.

        Returns:
          The outputs, and the weights of self-attention (None for recurrent units) and
          cross-attention, if requested.
        """
        positions, is_local = self._of_stack(positions)
        x, weights = self.layers(
            self._below(x),
            encoded,
            self_mask,
            cross_mask,
            positions,
            is_local,
            deterministic,
            return_attention,
        )
        self_weights, cross_weights = weights if return_attention else (None, None)
        return self._above(x), self_weights, cross_weights

    def step(
        self,
        x: Float[Array, "B NW D"],
        cross: Sequence[KeyValue | None],
        states: Sequence[LayerState],
        token_positions: Int[Array, "B"],
        visible: Bool[Array, "B 1 NW PW"],
        cross_mask: Bool[Array, "B 1 1 S"] | None,
        positions: AttentionPositions | None,
    ) -> tuple[Float[Array, "B NW D"], tuple[LayerState, ...], Float[Array, "B H NW S"] | None]:
        """Runs `DecoderLayer.step` of every layer, each with its own `cross` and state.

        The layers are unrolled, because a loop would copy the cache of every layer at every token.
        Slicing the stacked parameters costs nothing per token: it does not depend on the token, and
        XLA moves it out of the loop over tokens.

        `token_positions` count the tokens of each sentence from 0. `positions` are those of the
        tokens [B, N] and of the cached keys [1, P * W].

        Returns:
          The outputs in the compute dtype; the states including these tokens; the last layer's
          cross-attention weights, or None without inputs.
        """
        x = self._below(x)
        positions, is_local = self._of_stack(positions)
        layer = DecoderLayer(self.config, parent=None)

        @jax.jit  # The layers share one trace.
        def step(variables: Any, *inputs: Any) -> Any:
            return layer.apply(variables, *inputs, method="step")

        new_states = []
        cross_weights = None
        all_variables = layer_variables(self.layers, len(states))
        flags = [None] * len(states) if is_local is None else is_local
        shared = token_positions, visible, cross_mask, positions
        for variables, layer_cross, state, flag in zip(
            all_variables, cross, states, flags, strict=True
        ):
            x, state, cross_weights = step(variables, x, layer_cross, state, *shared, flag)
            new_states.append(state)
        return self._above(x), tuple(new_states), cross_weights
