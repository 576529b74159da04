"""The published layer norms, and their position relative to a sub-layer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jaxtyping import Float

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.kernels import gpu_refusal
from flaxformer_mt.model.kernels.products import Biased
from flaxformer_mt.model.logical_axes import mesh_device_kind, mesh_platform
from flaxformer_mt.model.numerics import Dropout, at_least_float32, column_sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "N D"], scale: Float[Array, "D"], bias: Float[Array, "D"], epsilon: float
) -> Float[Array, "N D"]:
    r"""Normalizes by mean and biased standard deviation, with epsilon inside the root.

    .. math:: y = \hat x \odot scale + bias,\quad \hat x = (x - \mu) / \sqrt{\sigma^2 + \epsilon}

    Its gradient is written out, because it needs only x and two numbers per row:

    .. math:: \partial x = (g - \overline{g} - \hat x\, \overline{g \hat x})
        / \sqrt{\sigma^2 + \epsilon},\quad g = \partial y \odot scale

    Source: Ba et al. 2016. The variance is computed from the centered x: the difference of two
    means that some libraries use loses all digits if the mean is large.
    """
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centered = x - mean
    inverse_std = lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    return centered * inverse_std * scale + bias, (x, mean, inverse_std, scale)


def _layer_norm_backward(epsilon, kept, gradient):
    del epsilon  # It is in the standard deviation.
    x, mean, inverse_std, scale = kept
    normalized = (x - mean) * inverse_std
    g = gradient * scale
    along = jnp.mean(g * normalized, axis=-1, keepdims=True)
    x_gradient = (g - jnp.mean(g, axis=-1, keepdims=True) - normalized * along) * inverse_std
    return x_gradient, column_sums(gradient * normalized), column_sums(gradient)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def unbiased_std_norm(
    x: Float[Array, "N D"], scale: Float[Array, "D"], bias: Float[Array, "D"], epsilon: float
) -> Float[Array, "N D"]:
    r"""Normalizes by mean and unbiased standard deviation, with epsilon outside the root.

    .. math:: (x - \mu) / (s + \epsilon) \odot scale + bias,\quad s^2 = \sum (x - \mu)^2 / (D - 1)

    Source: The Annotated Transformer, `LayerNorm`.
    """
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.sum(jnp.square(centered), axis=-1, keepdims=True) / (x.shape[-1] - 1)
    # The derivative of the root at zero is infinite; PyTorch, too, gives a constant row gradient 0.
    constant = variance == 0
    std = jnp.where(constant, 0, jnp.sqrt(jnp.where(constant, 1, variance)))
    return centered / (std + epsilon) * scale + bias


def rms_norm(
    x: Float[Array, "N D"], scale: Float[Array, "D"], epsilon: float
) -> Float[Array, "N D"]:
    r"""Normalizes by the root of the mean square; the mean is not subtracted.

    .. math:: y = x / \sqrt{\overline{x^2} + \epsilon} \odot scale

    Source: Zhang and Sennrich 2019; T5, `T5LayerNorm`.
    """
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + epsilon) * scale


class Norm(nn.Module):
    """A norm of the kind `config.norm_kind`, with a learned scale [D] and, unless RMS, bias [D].

    D is the width of the model, or `width` if it is not 0.
    """

    config: TransformerConfig
    width: int = 0

    def setup(self) -> None:
        c = self.config
        shape, dtype = (self.width or c.d_model,), jnp.dtype(c.param_dtype)
        is_offset = c.norm_kind == "rms_offset"
        init = nn.initializers.zeros if is_offset else nn.initializers.ones
        self.scale = self.param("scale", init, shape, dtype)
        if c.norm_has_bias:
            self.bias = self.param("bias", nn.initializers.zeros, shape, dtype)

    def __call__(self, x: Array) -> Array:
        """Normalizes the last axis of `x` [..., D], in float32 at least; keeps its dtype."""
        c = self.config
        self.sow("intermediates", "input", x)
        dtype = at_least_float32(x.dtype)
        rows, scale = x.reshape(-1, x.shape[-1]).astype(dtype), self.scale.astype(dtype)
        if not c.norm_has_bias:
            scale = 1 + scale if c.norm_kind == "rms_offset" else scale
            y = rms_norm(rows, scale, c.norm_epsilon)
        else:
            normalize = layer_norm if c.norm_kind == "layer_norm" else unbiased_std_norm
            y = normalize(rows, scale, self.bias.astype(dtype), c.norm_epsilon)
        return y.reshape(x.shape).astype(x.dtype)

    def fused_with_sum(
        self, x: Array, y: Array | Biased, dropout: Dropout, uses: int
    ) -> tuple[Array, ...]:
        """Normalizes x + dropout(y) in one kernel, once for each of the `uses` of the result."""
        from flaxformer_mt.model.kernels.fused_norm import NormInputs, NormOptions, residual_norm

        key = dropout.draw_key() if dropout.threshold else None
        options = NormOptions(self.config.norm_epsilon, dropout.threshold, False, uses)
        product, bias = y if isinstance(y, Biased) else (y, None)
        return residual_norm(options, NormInputs(x, product, bias, self.scale, self.bias, key))

    def fuses(self, x: Array) -> bool:
        """Whether training computes the norm of a sum like `x` [B, T, D] in one kernel.

        Raises:
          UserError: `config.norm_backend` cannot do this.
        """
        c = self.config
        if c.norm_backend == "xla" or self.is_mutable_collection("intermediates"):
            return False
        refusal = gpu_refusal(mesh_platform(), mesh_device_kind())
        if c.norm_kind != "layer_norm":
            refusal = f"needs model.norm_kind=layer_norm, not {c.norm_kind}"
        elif not has_fused_norm(c.d_model, x.dtype):
            refusal = (
                "computes in float32 or bfloat16, with a power of two of at least 128 as "
                f"model.d_model, not in {x.dtype} with {c.d_model}"
            )
        if c.norm_backend == "auto":
            return not refusal
        if refusal:
            raise UserError(f"model.norm_backend=pallas_gpu {refusal}: use auto or xla")
        return True


def has_fused_norm(width: int, dtype: jnp.dtype) -> bool:
    """Whether the kernel can compute vectors of a width: a warp loads powers of two."""
    return dtype in (jnp.float32, jnp.bfloat16) and width >= 128 and width & (width - 1) == 0


class NormOutputs(NamedTuple):
    """The output of a fused norm, once for the next sub-layer and once for its residual connection.

    The backward pass of the kernel takes both gradients and adds them itself, which saves a pass
    over memory.
    """

    of_sublayer: Array
    of_residual: Array


def residual(
    x: Array | NormOutputs,
    sublayer: Callable[[Array, bool], tuple[Any, Any]],
    norm: Norm,
    output_norm: Norm | None,
    dropout: Dropout,
    deterministic: bool,
    is_last: bool = False,
) -> tuple[Any, Any]:
    """Applies a sub-layer f with its residual: norm(x + f(x)) or x + f(norm(x)).

    The configuration of the norm says which: "post" (Vaswani et al. 2017, section 3.1) or "pre"
    (its published code). With "both", `output_norm` normalizes the output of f.

    The sub-layer is called as f(x, add_bias). It returns its output, or a `Biased` if not
    `add_bias`, and a second result of any kind, which is returned, too. The output [B, T, D] can be
    a `NormOutputs`, unless the sub-layer `is_last` of its layer.
    """
    x, beside = x if isinstance(x, NormOutputs) else (x, x)
    if norm.config.norm_position != "post":
        y, extra = sublayer(norm(x), True)
        y = y if output_norm is None else output_norm(y)
        return beside + dropout(y, deterministic=deterministic), extra
    is_fused = not deterministic and norm.fuses(x)
    y, extra = sublayer(x, not is_fused)
    if not is_fused:
        return norm(beside + dropout(y, deterministic=deterministic)), extra
    results = norm.fused_with_sum(beside, y, dropout, 1 if is_last else 2)
    return results[0] if is_last else NormOutputs(*results), extra
