"""cuDNN's attention, by `jax.nn.dot_product_attention`.

It knows neither segments nor, through this function, dropout: the mask of packed rows is an array
[B, 1, T, S] that it reads in every layer. It cannot be interpreted, so that its parity is shown on
a GPU only (`benchmarks/battery.py`), and "auto" does not take it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from flaxformer_mt.model.fused_attention.blocks import Operands
from flaxformer_mt.model.fused_attention.operation import (
    Inputs,
    Options,
    on_rows_and_heads,
    operands_of,
    visible_pairs,
)


def cudnn_attention(options: Options, inputs: Inputs) -> Array:
    """Computes what `fused_attention` does, without bias and dropout.

    Where kernels are interpreted, XLA computes it in cuDNN's place.
    """
    operands = operands_of(options, inputs)

    def attend(operands: Operands) -> Array:
        visible = visible_pairs(operands, options.causal)
        context = jax.nn.dot_product_attention(
            operands.query,
            operands.key,
            operands.value,
            mask=visible,
            implementation="xla" if options.interpret else "cudnn",
        )
        # A query without keys would get the mean of all values.
        has_keys = jnp.any(visible, axis=3)[:, 0, :, None, None]
        return jnp.where(has_keys, context, jnp.zeros_like(context))

    run = on_rows_and_heads(attend, operands, lambda specs: ((specs.operands,), specs.vectors))
    return run(operands).swapaxes(1, 2)
