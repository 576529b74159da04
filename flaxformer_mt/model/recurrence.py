"""The simple recurrent unit that can replace the self-attention of a decoder layer."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.linear import dense
from flaxformer_mt.model.logical_axes import constrain
from flaxformer_mt.model.numerics import at_least_float32


class SSRU(nn.Module):
    r"""A simple recurrent unit (SSRU): a running average of its inputs, gated by them.

    .. math:: c_t = f_t \odot c_{t-1} + (1 - f_t) \odot W x_t,\quad
        f_t = \sigma(W_f x_t + b_f),\quad h_t = \mathrm{relu}(c_t)

    The state c has D numbers for targets of any length, and starts at zero. As neither f nor W x
    depends on it, all c_t of a whole target are computed by a parallel scan, in log T rounds.

    Source: Kim et al. 2019, "From Research to Production and Back: Ludicrously Fast Neural Machine
    Translation", section 3.1; Marian, `SSRU` in src/rnn/cells.h, without its own layer norms.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.candidate = dense(c, "feed_forward", c.d_model, c.d_model, False)
        self.forget = dense(c, "feed_forward", c.d_model, c.d_model, True)

    def _gate(self, x: Array) -> tuple[Array, Array]:
        """Computes f and (1 - f) W x of [B, T, D], in float32 at least: c sums small numbers."""
        dtype = at_least_float32(x.dtype)
        forget = constrain(self.forget(x), "batch", "length", "embed")
        forget = jax.nn.sigmoid(forget.astype(dtype))
        candidate = constrain(self.candidate(x), "batch", "length", "embed")
        return forget, (1 - forget) * candidate.astype(dtype)

    def __call__(
        self, x: Float[Array, "B T D"], starts: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Maps whole targets; where a sentence of a packed row `starts`, the state is reset."""
        forget, new = self._gate(x)
        kept = forget if starts is None else jnp.where(starts[..., None], 0, forget)

        def joined(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
            (kept, memory), (later_kept, later_memory) = earlier, later
            return kept * later_kept, later_kept * memory + later_memory

        _, memory = lax.associative_scan(joined, (kept, new), axis=1)
        return jax.nn.relu(memory).astype(x.dtype)

    def step(
        self, x: Float[Array, "B NW D"], memory: Float[Array, "B W D"], positions: Int[Array, "B"]
    ) -> tuple[Float[Array, "B NW D"], Float[Array, "B W D"]]:
        """Maps N tokens of W hypotheses per sentence, from the position of each sentence on.

        `memory` is the state after the previous token, in float32 at least, and not read at
        position 0. Also returns the state after these tokens.
        """
        forget, new = self._gate(x)
        memory = jnp.where(positions[:, None, None] == 0, 0, memory)
        beams, states = memory.shape[1], list[Array]()
        for token in range(x.shape[1] // beams):
            part = slice(token * beams, (token + 1) * beams)
            memory = forget[:, part] * memory + new[:, part]
            states.append(memory)
        outputs = jnp.concatenate(states, axis=1) if len(states) > 1 else memory
        return jax.nn.relu(outputs).astype(x.dtype), memory
