"""The position-wise feed-forward network."""

import functools
from collections.abc import Callable

import jax
from flax import linen as nn
from jax import Array
from jaxtyping import Float

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.kernels.products import Biased, Shared
from flaxformer_mt.model.linear import dense
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.numerics import Dropout

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
        self, x: Float[Array, "B T D"], deterministic: bool, add_bias: bool = True
    ) -> Float[Array, "B T D"] | Biased:
        """Maps each position, on request without adding the last bias."""
        shared = Shared.of(x, self.config.d_ff)
        hidden = constrain(self.hidden(shared), "batch", "length", "hidden")
        hidden = ACTIVATIONS[self.config.activation](hidden)
        if self.config.feed_forward_gate:
            hidden = hidden * constrain(self.gate(shared), "batch", "length", "hidden")
        hidden = self.dropout(hidden, deterministic)
        if add_bias:
            return constrain(self.output(hidden), "batch", "length", "embed")
        product, bias = self.output.biased(hidden)
        return Biased(constrain(product, "batch", "length", "embed"), bias)
